"""`genctl run` and `genctl beam` at work: rows are loaded, decoded in groups, shown and written."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from genctl import events
from genctl.batch import readers
from genctl.batch.input_scan import InputScan, scan
from genctl.batch.records import error_record
from genctl.batch.rows import BadRow, InputRow
from genctl.batch.seeds import random_seed
from genctl.cli import job, notes, resume
from genctl.cli.beam_output import Search
from genctl.cli.inputs import is_terminal, prompts_of
from genctl.cli.interrupt import Interrupt
from genctl.cli.output import RecordOutput, ResumedOutput, ends_to_tell, opened, records_of
from genctl.cli.partial_results import Unfinished
from genctl.cli.run_options import RunOptions, check_search
from genctl.cli.shortfall import shortfalls
from genctl.cli.tally import RowTally
from genctl.cli.view import make_view, shows, wants_bar
from genctl.config import settings
from genctl.config.layers import Layer, Resolved, resolve
from genctl.errors import CheckError, Exit, GenctlError
from genctl.plural import count
from genctl.render.silent_view import SilentView, never_fail_to_encode
from genctl.results import Collector, Result

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.inspecting.batch_divergence import BatchDivergence
    from genctl.render.rows_bar import RowsBar
    from genctl.render.run_view import RunView
    from genctl.requests import Report, Request

AHEAD = 2  # times as many rows are read ahead where they are at hand, so that the longest begins first
SHOWN_TOP = 3  # alternatives shown with --scores on a terminal unless --top-logprobs says otherwise

Rows = Iterator[InputRow | BadRow]


def perform(options: RunOptions) -> int | None:
    """Do what the options say. Returns the exit status, or None if there is no prompt."""
    with Interrupt() as interrupt, ExitStack() as stack:
        _ = options.prompt_template  # a mistake in it is said at once, with --dry as well
        layers = [*options.beneath, *settings.standing_layers(options.presets), *options.flags]
        early = resolve(layers, tentative=True)
        if options.view == "beam":
            check_search(early)
        if options.dry:
            return _dry(options, early, layers)
        rows = prompts_of(options, lambda: interrupt.hide())
        if rows is None:
            return None
        stack.enter_context(rows)
        return RunJob(options, layers, early, iter(rows), interrupt, lone=rows.is_alone()).run()


def _dry(options: RunOptions, early: Resolved, layers: Sequence[Layer]) -> int:
    """Print the resolved job as TOML. Reads the checkpoint's settings, not its weights."""
    from genctl.config.dry import to_toml
    from genctl.session import planned

    flags = {"allow_pickle": options.allow_pickle, "trust_remote_code": options.trust_remote_code}
    sys.stdout.write(to_toml(planned(early.runtime, layers, **flags)))
    return int(Exit.DONE)


class RunJob(job.Job[RunOptions]):
    """One run of a generating command. `early` is what the layers say without the checkpoint's settings."""

    def __init__(
        self,
        options: RunOptions,
        layers: Sequence[Layer],
        early: Resolved,
        rows: Rows,
        interrupt: Interrupt,
        *,
        lone: bool = False,
    ) -> None:
        super().__init__(options, interrupt)
        self.layers, self.early, self.input = layers, early, rows
        self.tally = RowTally()
        self.lone = lone
        self.watched: tuple[int, ...] = ()  # ids, known once there is a tokenizer
        self.rows: dict[str, InputRow] = {}  # those that are being decoded
        self.stop_at: int | None = None  # with --strict, the first row that failed
        self.stopper: Sequence[Mapping[str, Any]] = ()  # and its record
        self.subjects: dict[str, str] = {}  # what messages call the rows that failed, by id
        self.read = 0  # rows of the input
        self.different = 0  # sequences that --check-batch found to depend on their batch
        self.checked = False  # whether --check-runtime has compared
        self.runtime_difference = ""  # what --check-runtime found, where it is too large
        self.bar: RowsBar | None = None
        self.err_console: Console | None = None

    def open(self, stack: ExitStack) -> None:
        """Open the output, the event log and the view; look the input file over."""
        options = self.options
        plain = options.to_file or options.stream or options.tree_format or options.raw
        self.live = not plain and options.format == "text" and is_terminal(sys.stdout)
        view = self._make_view()
        search = Search(options, self.err_console, stream=options.stream, raw=options.raw, live=self.live)
        output: RecordOutput
        if options.resume:
            output = ResumedOutput(options, self._written, self._say_failed, self.tally.kept)
        else:
            shown = self.live or options.stream
            output = RecordOutput(options, self._written, self._say_failed, shown=shown)
        self.output = stack.enter_context(opened(output, lambda: self._cut_short))
        self.open_event_log(stack, options.events, force=options.force)
        self.view: RunView | SilentView = stack.enter_context(view)  # type: ignore[assignment]
        self.search = stack.enter_context(search)
        self.interrupt.hide = self.hide
        self.looked = self._look()

    def load(self) -> None:
        """Load the checkpoint; begin or continue the output."""
        options = self.options
        self.session = session = self.load_session(self.early.runtime, self.layers, on_event=self._loading)
        self.view.load_s = self.load_s
        self.base = self.settle(session, self.layers, options.strategy)
        self.watched = session.watched(options.watch)
        self.detail(*self.base.notes, *session.loaded.verbose_notes)
        self.note(*self.base.notices, *notes.cache_notes(session, self.base))
        self.width = session.width(self.base, 1 if self.live else job.WIDTH)
        self.span = job.SPAN * self.width if self.width > 1 else 1
        self._begin()

    def deliver(self, stack: ExitStack) -> None:
        """Decode the rows that are not done."""
        options, output = self.options, self.output
        self._skip()
        if output.finished:
            self.say(f"{options.output} is complete: {count(output.done, 'row')}, nothing to do")
            return
        if self.err_console is not None and wants_bar(options, self.err_console, live=self.live):
            from genctl.render.rows_bar import RowsBar

            total = len(options.arguments) or (None if self.looked is None else self.looked.rows)
            self.bar = RowsBar(self.err_console, total, done=output.done)
            stack.callback(self.bar.close)
        self.collector = Collector(tokens=options.with_tokens or options.format in ("json", "jsonl"))
        self.unfinished = Unfinished(texts=self.session.loaded.tokenizer is not None)
        self.listeners += [self._show, self._note_cut, self.search.feed, self.reuse.feed, self.unfinished.feed]
        self.listeners += [] if self.bar is None else [self.bar.feed]
        self.listeners += [self._collect]
        with self.interrupt.rescued_by(lambda: self._rescue(stack)):
            self._decode()

    # -- before decoding -----------------------------------------------------------------------------------------------

    def _make_view(self) -> RunView | SilentView:
        options = self.options
        if not shows(options, live=self.live):
            for stream in (sys.stdout, sys.stderr):
                never_fail_to_encode(stream)
            return SilentView()
        from genctl.render.console import make_consoles

        out, self.err_console = make_consoles(options.color)
        several = self.early.generation.num_return_sequences > 1
        how: dict[str, Any] = {"live": self.live, "top": self._report().top, "lone": self.lone, "several": several}
        return make_view(options, out, self.err_console, **how)

    def _look(self) -> InputScan | None:
        """Look the input file over, where the number of its rows or its content is needed."""
        options = self.options
        if options.input in (None, "-") or not (options.resume or wants_bar(options, self.err_console, live=self.live)):
            return None
        assert options.input is not None
        return scan(options.input, self._input_format)

    @property
    def _input_format(self) -> str:
        return readers.format_of(self.options.input_format, self.options.input or "")

    def _loading(self, event: events.Loading) -> None:
        with self.interrupt.busy():
            if self.bar is not None:
                self.bar.hide()  # an auxiliary model is loaded: its bar takes the place of ours
            self.view.feed(event)

    def _begin(self) -> None:
        """Choose the seed, and with --resume compare the job with the one that began the output."""
        given, looked, session = self.base.runtime.seed, self.looked, self.session
        self.seed = random_seed() if given is None else given
        if not self.options.resume:
            return
        loaded = [session.loaded, *(one for one, _ in session.planner.auxiliary_models.values())]
        identity = resume.identity(
            self.options,
            self.base,
            seed=self.seed,
            checkpoints={one.name: one.fingerprint() for one in loaded},
            batch={"width": self.width},
            input=None if looked is None else {**looked.identity(), "format": self._input_format},
            top=self._report().top,
            watch=self.watched,
        )
        self.seed = self.output.begin(identity, self.span).seed
        self.tally.go_on(self.output.done, self.output.tally)

    def _skip(self) -> None:
        """Pass over the rows that need not be decoded, comparing them with what was read before."""
        output = self.output
        if output.finished and output.compared:
            return
        until = output.done if output.finished else output.again
        while self.read < until and (row := next(self.input, None)) is not None:
            self.read += 1
            output.consume(row)
        if output.finished:
            self.read += next(self.input, None) is not None
        if output.finished or self.read < until:
            output.end_of_input(self.read)

    # -- while decoding ------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Decode group by group, each to its end, so that a row's neighbours do not depend on where a run began."""
        for first in self.input:
            group = itertools.chain([first], itertools.islice(self.input, self.span - 1 - first.index % self.span))
            self.listen(self._stream(group), self.listeners)
            if self.interrupt.status:
                return
            if self.stop_at is not None:
                self.output.stop(self.stop_at, self.stopper)
                return
        self.output.end_of_input(self.read)

    def _stream(self, group: Rows) -> Generator[events.Event, None, None]:
        requests, report = self._requests(group), self._report()
        if self.options.check_runtime:
            requests = self._compared(requests)
        if not self.options.check_batch:
            # Read ahead only with --unordered, so that an interrupt leaves the beginning of the input; and never from a
            # pipe or a keyboard, which would keep other rows waiting.
            at_hand = (
                self.options.unordered and self.options.input != "-" and (self.options.input or self.options.arguments)
            )
            return self.session.stream(
                requests,
                report,
                width=self.width,
                interrupted=self.interrupt,
                on_shortage=self._shortage,
                ahead=AHEAD * self.width if at_hand and self.width > 1 else 0,
            )
        from genctl.inspecting.batch_divergence import checked

        return checked(self.session, requests, report, width=self.width, told=self._differs, interrupted=self.interrupt)

    def _compared(self, requests: Iterator[Request]) -> Iterator[Request]:
        """The same requests; the first prompt goes through both runtimes before it is decoded."""
        from genctl.inspecting.runtime_check import compare

        for number, request in enumerate(requests):
            if number == 0 and not self.checked:
                self.checked = True
                comparison = compare(self.session, request)
                self.say(f"check: {comparison}")
                self.runtime_difference = "" if comparison.close else str(comparison)
            yield request

    def _differs(self, comparison: BatchDivergence) -> None:
        self.different += 1
        self.say(f"check: {comparison}")

    def _shortage(self, width: int) -> None:
        self.say(f"note: not enough memory for {self.width} prompts at once, going on with {width}")
        self.width = width

    def _requests(self, rows: Rows) -> Iterator[Request]:
        for row in rows:
            if self.stop_at is not None or self.interrupt.status:
                return
            self.read += 1
            self.output.consume(row)
            if isinstance(row, BadRow):
                self._failure(row, row.code, row.message)
                continue
            try:
                resolved = self.settings_of(row, self.base)
            except GenctlError as error:
                self._failure(row, error.code, error.message)
                continue
            self.rows[row.id] = row
            self.unfinished.expect(row.id, resolved.generation.num_return_sequences)
            yield job.request_of(row, resolved, job.seed_of(row, resolved, self.seed))

    def _report(self) -> Report:
        from genctl.requests import Report

        options = self.options
        top = options.top_logprobs
        if top is None:
            top = SHOWN_TOP if options.scores and options.format == "text" else 0
        return Report(top, options.scores or top > 0, options.explain, self.watched)

    def _show(self, event: events.Event) -> None:
        if self.live or not isinstance(event, events.Failed):
            self.view.feed(event)

    def _note_cut(self, event: events.Event) -> None:
        if isinstance(event, events.Began):
            row = self.rows.get(event.lane)
            note = notes.cut_note(event, row, self.base.runtime)
            if note:
                self.say(f"note: {'' if row is None else self.of(row)}{note}")

    def _collect(self, event: events.Event) -> None:
        result = self.collector.feed(event)
        if result is not None:
            self._take(result)

    def _take(self, result: Result) -> None:
        row = self.rows.pop(result.lane)
        if self.interrupt.status and self.options.resume:
            return  # incomplete: the next run decodes it again
        if result.error is not None:
            self._failure(row, result.error.code, result.error.message, shown=self.live)
            return
        if self.stop_at is not None and row.index > self.stop_at:
            return
        if row.index >= self.output.done:
            for note in shortfalls(result, self.of(row)):
                self.say(f"warning: {note}")
        texts = self.session.loaded.tokenizer is not None
        self.tally.expect(row.index, ends_to_tell(self.options.fail_on, self.of(row), result, texts=texts))
        records: Sequence[Mapping[str, Any]] = self.search.records(row.id) or records_of(
            self.options,
            row,
            result,
            load_s=self.load_s,
            encoder_decoder=self.session.forward.is_encoder_decoder,
            saved=self.reuse.path is not None,
            texts=texts,
        )
        self.output.put(row.index, records)

    def _failure(self, row: InputRow | BadRow, code: str, message: str, *, shown: bool = False) -> None:
        """Write the record of a row that failed. Say so where the writer does not, unless the view has `shown` it."""
        record = error_record(row.id, code, message)
        self.subjects[row.id] = self.of(row)
        if self.options.strict:
            if self.stop_at is None or row.index < self.stop_at:
                self.stop_at, self.stopper = row.index, [record]
            return
        with self.interrupt.busy():
            if (self.live or self.options.stream) and not shown:
                self._say_failed(record)
            self.output.put(row.index, [record])

    def _written(self, index: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Count a row whose records are written."""
        failed = self.tally.written(index, records)
        if self.bar is not None:
            self.bar.row(failed=failed)

    # -- afterwards ----------------------------------------------------------------------------------------------------

    @property
    def _cut_short(self) -> bool:
        return bool(self.interrupt.status) or self.stop_at is not None

    def keep_partial(self) -> None:
        """Write what the unfinished rows have so far; with --resume the next run decodes them again."""
        if not self.options.resume:
            for result in self.unfinished.results():
                self._take(result)
        self.output.hurried = True
        self.status()

    def status(self) -> int:
        """The exit status. Raises CheckError where a requested check failed."""
        self.note(*self.reuse.notes(self.session, verbose=self.options.verbose))
        if self._cut_short and self.options.resume:
            done, them = count(self.tally.rows, "row is", "rows are"), "it" if self.tally.rows == 1 else "them"
            self.say(f"{done} in {self.options.output}; the same command goes on after {them}")
        if self.interrupt.status:
            return self.interrupt.status
        if self.output.differs:
            self.say(
                f"note: rows of {self.options.output} that were decoded again came out differently (another machine or "
                "number of threads, or a time limit); what was written stays"
            )
        if self.stop_at is not None:
            error = self.stopper[0]["error"]
            before = {0: "no row is before it", 1: "the row before it is written"}.get(
                self.stop_at, f"the {self.stop_at:,} rows before it are written"
            )
            subject = self.subjects[self.stopper[0]["id"]]
            self.say(f"error: {subject}{error['message']}; --strict stops here, {before}")
            return int(Exit.ROWS_FAILED)
        status = self.tally.status()
        if self.runtime_difference:
            raise CheckError(f"--check-runtime: {self.runtime_difference}")
        if self.different:
            differ = "sequence differs" if self.different == 1 else "sequences differ"
            raise CheckError(f"--check-batch: {self.different} {differ} from what is decoded alone")
        return status

    def _say_failed(self, record: Mapping[str, Any]) -> None:
        if self.options.strict:
            return  # `status` reports it
        self.say(f"error: {self.subjects.get(record['id'], '')}{record['error']['message']}")

    def hide(self) -> None:
        """Take away what moves on the terminal."""
        if self.bar is not None:
            self.bar.hide()
        self.view.pause()
