"""`genctl run` and `genctl beam` at work: rows are loaded, decoded in groups, shown and written."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias

from genctl import events
from genctl.commands import job
from genctl.commands.engine_choice import LOCAL, EngineChoice
from genctl.commands.options import shown_top
from genctl.commands.run.options import RunOptions, check_search
from genctl.commands.run.output import SilentView, make_view, open_records, records_of, shows, wants_bar
from genctl.config.chat_settings import check_is_chat
from genctl.config.layers import Resolved
from genctl.engines.protocol import Flow, StreamProgress
from genctl.errors import Exit, count
from genctl.io.record_output import RecordOutput, RowTally
from genctl.io.records import error_record
from genctl.io.rows import BadRow, InputRow
from genctl.io.writers import FORMATS
from genctl.params import Runtime
from genctl.results import Collector, Result
from genctl.terminal import first_sign
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.standard_streams import is_terminal, never_fail_to_encode

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.commands.run.run_view import RunView
    from genctl.commands.run.search_output import Search
    from genctl.engines.protocol import Report, Request, Skipped
    from genctl.io.input_scan import InputScan
    from genctl.terminal.rows_bar import RowsBar

    Rows: TypeAlias = "Iterator[Request | Skipped | None]"

# Formats whose records say which row each token of a beam continued.
PARENTS = tuple(name for name, format in FORMATS.items() if format.nested)
AHEAD = 2  # times as many rows are read ahead where they are at hand, so that the longest begins first


class RunJob(job.Job[RunOptions]):
    """One run of a generating command."""

    def __init__(self, options: RunOptions, interrupt: Interrupt, choice: EngineChoice = LOCAL) -> None:
        super().__init__(options, interrupt, choice)
        self.tally = RowTally()
        self.watched: tuple[int, ...] = ()  # ids, known once there is a tokenizer
        self.rows: dict[str, InputRow] = {}  # those that are being decoded
        self.stop_at: int | None = None  # with --strict, the first row that failed
        self.stopper: Sequence[Mapping[str, Any]] = ()  # and its record
        self.taken = 0  # rows of the input
        self.threads: int | None = None  # that compute a step
        self.said_full = False  # that a text ended because the context was full
        self.bar: RowsBar | None = None
        self.err_console: Console | None = None

    def prepare(self) -> int | None:
        """Settings without those of the checkpoint; with --dry, print the whole job."""
        _ = self.options.prompt_template  # a mistake in it is said at once, with --dry as well
        super().prepare()
        if self.options.view == "beam":
            check_search(self.early)
        if self.options.are_texts:
            check_is_chat(self.early.runtime)
        if not self.options.dry:
            return None
        from genctl.config.dry import to_toml

        sys.stdout.write(to_toml(self.planned()))
        return int(Exit.DONE)

    def planned(self) -> Resolved:
        """The settings with those of the checkpoint, whose weights are not read."""
        return self.choice.planned(self.early.runtime, self.layers, self.options.trust)

    def open(self, stack: ExitStack) -> None:
        """Open the output, the event log and the view; look the input file over."""
        options = self.options
        plain = options.to_file or options.stream or options.tree_format
        self.live = not plain and self.choice.live and options.format == "text" and is_terminal(sys.stdout)
        view = self._make_view()
        search = self._make_search()
        self.shown = self.live or options.stream
        self.output: RecordOutput = open_records(options, self.tally, self.say_failed, shown=self.shown)
        stack.push(lambda kind, *_: self.output.abandon() if kind else self.output.close(cut_short=self._cut_short))
        self.open_event_log(stack, options.events, force=options.force)
        self.view: RunView | SilentView = stack.enter_context(view)  # type: ignore[assignment]
        self.search = None if search is None else stack.enter_context(search)
        for watcher in self.watchers:
            watcher.draw(self._drawn)
        self.looked = self._look()
        self._show_prompt()

    def load(self) -> None:
        """Load the checkpoint; begin or continue the output."""
        options, early = self.options, self.early
        self.engine = engine = self.load_engine(
            early.runtime,
            self.layers,
            on_event=self._loading,
            named=early.names_model,
            live=self.shown,
            waits=self.waits,
        )
        self.view.load_s = self.load_s
        self.base = self.settle(engine, self.layers, options.strategy)
        if options.with_tokens:
            engine.check_tokens("--scores" if options.scores else "--top-logprobs", self.base)
        self.texts, self.encoder_decoder = engine.has_texts, engine.is_encoder_decoder
        self.watched = engine.watched(options.watch)
        self.width = engine.width(self.base, 1 if self.live else job.WIDTH)
        self.batch_invariant_by = (
            "" if self.output.in_groups or not self.choice.batches else engine.batch_invariant_by(self.base)
        )
        recorded = None if self.batch_invariant_by else self.output.threads
        self.threads = engine.use_threads([self.base], 1 if self.lone else self.width, recorded)
        if options.verbose:
            self.detail(*engine.notes)
        self.describe(engine, self.base)
        self.span = job.SPAN * self.width if self.width > 1 and self.choice.batches else 1  # rows of a group
        self._begin()
        if self.live and self.lone:
            first_sign.status("reading the prompt")

    def deliver(self, stack: ExitStack) -> None:
        """Decode the rows that are not done."""
        options, output = self.options, self.output
        self._skip()
        if output.finished:
            self.say(f"{options.output} is complete: {count(output.done, 'row')}, nothing to do")
            return
        if self.err_console is not None and wants_bar(options, self.err_console, live=self.live):
            from genctl.terminal.rows_bar import RowsBar

            total = len(options.arguments) or (None if self.looked is None else self.looked.rows)
            self.bar = RowsBar(self.err_console, total, done=output.done)
            stack.callback(self.bar.close)
        self.collector = Collector()
        self.listeners += [self._show, self.note_prompt]
        self.listeners += [] if self.search is None else [self.search.feed]
        self.listeners += [self.reuse.feed]
        self.listeners += [] if self.bar is None or not self.choice.live else [self.bar.feed]
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
        from genctl.terminal.console import make_consoles

        out, self.err_console = make_consoles(options.color)
        several = self.early.generation.num_return_sequences > 1
        return make_view(options, out, self.err_console, live=self.live, lone=self.lone, several=several)

    def _make_search(self) -> Search | None:
        options = self.options
        if not (options.stream or options.tree or options.tree_format):
            return None
        from genctl.commands.run.search_output import Search

        return Search(options, self.err_console, stream=options.stream, live=self.live)

    def _drawn(self, console: Console) -> RunView:
        """A second view, which shows the run as a terminal would."""
        several = self.early.generation.num_return_sequences > 1
        return make_view(self.options, console, console, live=True, lone=self.lone, several=several)

    def _look(self) -> InputScan | None:
        """Look the input file over, where the number of its rows or its content is needed."""
        options = self.options
        if options.input in (None, "-") or not (options.resume or wants_bar(options, self.err_console, live=self.live)):
            return None
        from genctl.io.input_scan import scan

        assert options.input is not None
        return scan(options.input, options.input_kind)

    def _show_prompt(self) -> None:
        """Show a single prompt at once, in the line that says that the checkpoint is loaded."""
        if not (self.live and self.lone) or self.options.echo is False:
            return
        row = next(self.input, None)
        if row is None:
            return
        self.input = itertools.chain([row], self.input)
        self.show_prompt(row)

    def _loading(self, event: events.Loading) -> None:
        words = f"reading {event.done}/{event.total} {event.unit}"
        if event.unit != "B" and self.live and self.lone and first_sign.status(words, restart=False):
            return
        with self.interrupt.busy():
            if self.bar is not None:
                self.bar.hide()  # an auxiliary model is loaded: its bar takes the place of ours
            self.view.feed(event)

    def _begin(self) -> None:
        """Choose the seed, and with --resume compare the job with the one that began the output."""
        looked = self.looked
        self.seed = job.start_seed(self.base)
        if self.watchers:
            from genctl.config.dry import to_toml

        for watcher in self.watchers:
            watcher.settled(to_toml(self.base, defaults=False), seed=self.seed)
        if not self.options.resume:
            return
        changed = None not in (self.threads, self.output.threads) and self.threads != self.output.threads
        if changed and not self.batch_invariant_by:
            before = count(self.output.threads or 0, "thread")
            self.remark(
                f"{self.options.output} was begun with {before}, and goes on with {self.threads}: the last digits of "
                "log-probabilities may differ from those of an uninterrupted run"
            )
        from genctl.commands.run import resume

        identity = resume.identity(
            self.options,
            self.base,
            seed=self.seed,
            checkpoints=self.engine.fingerprints(),
            batch=self._batch(),
            input=None if looked is None else {**looked.identity(), "format": self.options.input_kind},
            top=self._report().top,
            watch=self.watched,
            threads=None if self.batch_invariant_by else self.threads,
        )
        again = 1 if self.batch_invariant_by else self.span  # rows that are decoded again beside those that follow
        self.seed = self.output.begin(identity, again, self.base.origins, seed_given=self.base.runtime.seed is not None)

    def _batch(self) -> dict[str, int | str]:
        """What the numbers of a row depend on, beside itself: how they are computed, or the rows of its group."""
        if self.batch_invariant_by:
            return {"numbers": self.batch_invariant_by}
        return {"width": self.width} if self.choice.batches else {}

    def _skip(self) -> None:
        """Pass over the rows that need not be decoded, comparing them with what was read before."""
        output = self.output
        if output.finished and output.compared:
            return
        until = output.done if output.finished else output.again
        while self.taken < until and (row := next(self.input, None)) is not None:
            self.taken += 1
            output.consume(row)
        if output.finished:
            self.taken += next(self.input, None) is not None
        if output.finished or self.taken < until:
            output.end_of_input(self.taken)

    # -- while decoding ------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Decode all rows. Where a row's numbers depend on its neighbours, in groups that do not depend on where a run
        began (`requests.grouped`).
        """
        if not self.choice.live:
            self.view.begin()
        self.listen(self._stream(), self.listeners)
        if self.interrupt.status:
            return
        if self.stop_at is not None:
            self.output.stop(self.stop_at, self.stopper)
        else:
            self.output.end_of_input(self.taken)

    def _stream(self) -> Generator[events.Event, None, None]:
        options = self.options
        flow = Flow(
            self.width,
            self.span,
            continuous=bool(self.batch_invariant_by),
            threads=self.threads,
            ahead=self.ahead,
            ordered=not options.unordered or options.strict,
            interrupted=self.interrupt,
            enough=lambda last: self.stop_at is not None and last >= self.stop_at,
            on_shortage=self._shortage,
            on_progress=self._progress,
        )
        return self.engine.stream(self._requests(), self._report(), flow)

    @property
    def ahead(self) -> int:
        """How many rows are read ahead: only with --unordered, so that an interrupt leaves the beginning of the input;
        and never from a pipe or a keyboard, which would keep other rows waiting.
        """
        at_hand = self.options.unordered and not self.waits
        return AHEAD * self.width if at_hand and self.width > 1 else 0

    def _shortage(self, width: int, fewer: int) -> None:
        self.say_shortage("prompts", width, fewer)

    def _progress(self, progress: StreamProgress) -> None:
        if self.bar is not None:
            with self.interrupt.busy():
                self.bar.work(progress.rows, progress.tokens, progress.speeds if self.options.verbose else ())

    def _requests(self) -> Rows:
        """A request for each row, or what stands for it where there is none (`Engine.stream`)."""
        from genctl.engines.protocol import Skipped

        for row in self._taken():
            if row is None:
                yield None
                continue
            usable = list(self.usable(iter([row]), lambda row: self.settings_of(row, self.base)))
            for row, resolved in usable:
                self.rows[row.id] = row
                yield job.request_of(row, resolved, job.seed_of(row, resolved, self.seed))
            if not usable:
                yield Skipped(row.index)

    def _taken(self) -> Iterator[InputRow | BadRow | None]:
        """The rows, until the run is to end; each is counted. None while the next one has to be waited for."""
        rows: Iterator[InputRow | BadRow | None] = self.input
        if self._reads_beside:
            from genctl.commands.run.row_queue import RowQueue

            rows = RowQueue(self.input, self._idle)
        while not self._ending:
            try:
                row = next(rows)
            except StopIteration:
                return
            if row is not None and not self._ending:
                self.taken += 1
                self.output.consume(row)
            if not self._ending or row is None:
                yield row

    @property
    def _reads_beside(self) -> bool:
        """Whether rows are read beside decoding: those that are there need not wait for a slow pipe."""
        if not self.waits or self.choice.ranks:
            return False
        return not self.choice.live or (bool(self.batch_invariant_by) and self.width > 1)

    def _idle(self) -> bool:
        """Whether nothing is decoded in this process until the next row comes."""
        return self.choice.live and not self.rows

    @property
    def _ending(self) -> bool:
        return self.stop_at is not None or bool(self.interrupt.status)

    def _report(self) -> Report:
        from genctl.engines.protocol import Report

        options, top = self.options, shown_top(self.options)
        listened = options.events or options.report or options.svg or options.with_tokens
        listened = listened or self.base.runtime.processed_logprobs
        steps = self.choice.live or bool(listened or options.tree or options.tree_format)
        return Report(top, options.scores or top > 0, options.explain, self.watched, steps, options.format in PARENTS)

    def _show(self, event: events.Event) -> None:
        self.end_sign(event)
        if self.live or not isinstance(event, events.Failed):
            self.view.feed(event)

    def source_of(self, lane: str) -> tuple[InputRow, Runtime]:
        """The row of a lane that begins, and the settings of its run."""
        return self.rows[lane], self.base.runtime

    def _collect(self, event: events.Event) -> None:
        result = self.collector.feed(event)
        if result is not None:
            self._take(result)

    def _take(self, result: Result) -> None:
        row = self.rows.pop(result.lane)
        if self.interrupt.status and self.options.resume:
            return  # incomplete: the next run decodes it again
        if result.error is not None:
            self.fail(row, result.error.code, result.error.message, said=self.live, hint=result.error.hint)
            return
        if self.stop_at is not None and row.index > self.stop_at:
            return
        if row.index >= self.output.done:
            for note in result.shortfalls(self.of(row)):
                self.say(f"warning: {note}")
            self._say_full(row, result)
        self.tally.look(row.index, self.of(row), result, self.options.fail_on, texts=self.texts)
        trees = [] if self.search is None else self.search.records(row.id)
        records: Sequence[Mapping[str, Any]] = trees or records_of(
            self.options,
            row,
            result,
            load_s=self.load_s,
            encoder_decoder=self.encoder_decoder,
            saved=self.reuse.path is not None,
            texts=self.texts,
        )
        self.output.put(row.index, records)
        self._row_done(row)

    def _say_full(self, row: InputRow, result: Result) -> None:
        """Say once that a text ended because the context was full, where no view shows the ends of texts."""
        full = next((one.hypothesis.cause for one in result.sequences if one.finish_reason == "context"), None)
        if full is not None and not self.said_full and not self.live:
            self.said_full = True
            self.note(f"{self.of(row)}the text ends at the {full}, before max_new_tokens (finish_reason: context)")

    def fail(self, row: InputRow | BadRow, code: str, message: str, *, said: bool = False, hint: str = "") -> None:
        """Write the record of a row that failed; with --strict it is the last one."""
        if not self.options.strict:
            super().fail(row, code, message, said=said, hint=hint)
            self._row_done(row, failed=True)
        elif self.stop_at is None or row.index < self.stop_at:
            self.subjects[row.id] = self.of(row)
            self.stop_at, self.stopper = row.index, [error_record(row.id, code, message)]

    def _row_done(self, row: InputRow | BadRow, *, failed: bool = False) -> None:
        """Count a row that is done, even if its record waits for that of an earlier row."""
        if self.bar is not None and row.index >= self.output.done:
            self.bar.row(failed=failed)

    # -- afterwards ----------------------------------------------------------------------------------------------------

    @property
    def _cut_short(self) -> bool:
        return bool(self.interrupt.status) or self.stop_at is not None

    def keep_partial(self) -> None:
        """Write what the unfinished rows have so far; with --resume the next run decodes them again."""
        if not self.options.resume and self.choice.live:
            for result in self.collector.unfinished(texts=self.texts):
                self._take(result)
        self.output.hurried = True
        self.status()

    def status(self) -> int:
        """The exit status. Raises CheckError where a requested check failed."""
        self.closing_notes()
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
        return self.tally.status()

    def closing_notes(self) -> None:
        """Print notes on what was found while decoding."""
        self.note(*self.reuse.notes(self.engine, verbose=self.options.verbose))
        self.detail(*self.engine.shares)

    def say_failed(self, record: Mapping[str, Any]) -> None:
        """Print why a row failed; with --strict `status` does."""
        if not self.options.strict:
            super().say_failed(record)

    def hide(self) -> None:
        """Take away what moves on the terminal."""
        if self.bar is not None:
            self.bar.hide()
        if self.view is not None:
            self.view.pause()
