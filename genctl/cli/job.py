"""One run of a generating command: loaded, decoded, shown and written."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl import events as told
from genctl.batch import readers
from genctl.batch.input_scan import Looked, look_over
from genctl.batch.records import error_record
from genctl.batch.rows import BadRow, InputRow
from genctl.batch.seeds import random_seed, row_seed
from genctl.cli import beam_output, notes, resume, strategy
from genctl.cli.event_log import EventFile
from genctl.cli.inputs import are_texts, is_terminal, prompts_of
from genctl.cli.interrupt import Interrupt
from genctl.cli.output import Nowhere as Nowhere
from genctl.cli.output import RecordOutput, ends_to_tell, open_output, opened, records_of
from genctl.cli.partial_results import Unfinished
from genctl.cli.run_options import RunOptions, check_search
from genctl.cli.shortfall import shortfalls
from genctl.cli.tally import RowTally
from genctl.cli.view import make_bar, make_view, shows, wants_bar
from genctl.config import settings
from genctl.config.layers import Layer, Resolved, overlay, resolve, row_layer
from genctl.errors import CheckError, Exit, GenctlError
from genctl.render.unseen import Unseen, never_fail_to_encode
from genctl.results import Collector, Result

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.inspecting.batches import BatchDivergence
    from genctl.render.live import RunView
    from genctl.render.progress import RowsBar
    from genctl.requests import Report, Request
    from genctl.session import Session

WIDTH = 16  # prompts decoded at once where nobody watches
AHEAD = 2  # times as many rows are looked at, where they are at hand, for the longest to begin first
SPAN = 8  # times as many rows are a group, which is decoded to its end before the next begins
SHOWN_TOP = 3  # alternatives shown with --scores on a terminal unless --top-logprobs says otherwise


def perform(asked: RunOptions) -> int | None:
    """Do what was asked. Returns the exit status, or None if there is no prompt."""
    with Interrupt() as interrupt, ExitStack() as stack:
        layers = [*asked.beneath, *settings.standing_layers(asked.presets), *asked.flags]
        early = resolve(layers, tentative=True)
        if asked.view == "beam":
            check_search(early)
        if asked.dry:
            return _dry(asked, early, layers)
        rows = prompts_of(asked)
        if rows is None:
            return None
        stack.enter_context(rows)
        return Job(asked, layers, early, interrupt).run(iter(rows))


def _dry(asked: RunOptions, early: Resolved, layers: Sequence[Layer]) -> int:
    """Print the resolved job as TOML. Reads the checkpoint's settings, not its weights."""
    from genctl.config.dry import to_toml
    from genctl.session import planned

    flags = {"allow_pickle": asked.allow_pickle, "trust_remote_code": asked.trust_remote_code}
    sys.stdout.write(to_toml(planned(early.runtime, layers, **flags)))
    return int(Exit.DONE)


@dataclass
class Job:
    """One run of a generating command: what is asked stays, what is decoded passes through."""

    asked: RunOptions
    layers: Sequence[Layer]
    early: Resolved  # what the layers say before the checkpoint has had its word
    interrupt: Interrupt
    tally: RowTally = field(default_factory=RowTally)
    rows: dict[str, InputRow] = field(default_factory=dict)  # those that are being decoded
    stop_at: int | None = None  # with --strict, the first row that failed
    stopper: Sequence[Mapping[str, Any]] = ()  # and its record
    read: int = 0  # rows of the input
    different: int = 0  # sequences that --check-batch found to depend on their batch
    checked: bool = False  # whether --check-runtime has looked
    apart: str = ""  # what --check-runtime found, where it is too much
    load_s: float = 0.0
    seed: int = 0
    bar: RowsBar | None = None

    def run(self, rows: Iterator[InputRow | BadRow]) -> int:
        """Load, decode, write. Returns the exit status."""
        asked = self.asked
        self.live = (
            not (asked.to_file or asked.stream or asked.tree_format or asked.raw)
            and asked.format == "text"
            and is_terminal(sys.stdout)
        )
        view = self._make_view()
        search = beam_output.Search(asked, self.err, stream=asked.stream, raw=asked.raw, live=self.live)
        with ExitStack() as stack:
            nowhere = self.live or asked.stream
            output = open_output(asked, self._written, self._say_failed, self.tally.kept, nowhere=nowhere)
            self.output: RecordOutput = stack.enter_context(opened(output, lambda: self._cut_short))
            self.trace = stack.enter_context(EventFile(Path(asked.events))) if asked.events else None
            self.view: RunView | Unseen = stack.enter_context(view)  # type: ignore[assignment]
            self.search = stack.enter_context(search)
            self.interrupt.hide = self._hide
            looked = self._look()
            self.session, self.base = self._load()
            self.width = self.session.width(self.base, 1 if self.live else WIDTH)
            self.span = SPAN * self.width if self.width > 1 else 1
            self._begin(looked)
            self._skip(rows)
            if self.output.finished:
                return self._nothing_to_do()
            if self.err is not None and wants_bar(asked, self.err, live=self.live):
                total = len(asked.arguments) or (None if looked is None else looked.rows)
                self.bar = make_bar(self.err, total, self.output.done)
                stack.callback(self.bar.close)
            search.begin(self.session.forward.is_encoder_decoder)
            self.collector = Collector(tokens=asked.with_tokens or asked.format in ("json", "jsonl"))
            self.unfinished = Unfinished(texts=self.session.loaded.tokenizer is not None)
            with self.interrupt.rescued_by(lambda: self._rescue(stack)):
                self._decode(rows)
        return self._status()

    # -- before decoding -----------------------------------------------------------------------------------------------

    def _make_view(self) -> RunView | Unseen:
        asked = self.asked
        self.err: Console | None = None
        if not shows(asked, live=self.live):
            for stream in (sys.stdout, sys.stderr):
                never_fail_to_encode(stream)
            return Unseen()
        from genctl.render.console import make_consoles

        out, self.err = make_consoles(asked.color)  # type: ignore[arg-type]
        several = len(asked.arguments) != 1 or self.early.generation.num_return_sequences > 1
        return make_view(asked, out, self.err, live=self.live, top=self._report().top, several=several)

    def _look(self) -> Looked | None:
        """The input file looked over, where somebody wants to know how many rows it has or what it holds."""
        asked = self.asked
        if asked.input in (None, "-") or not (asked.resume or wants_bar(asked, self.err, live=self.live)):
            return None
        assert asked.input is not None
        return look_over(asked.input, self._input_format)

    @property
    def _input_format(self) -> str:
        return readers.format_of(self.asked.input_format, self.asked.input or "")

    def _load(self) -> tuple[Session, Resolved]:
        """The checkpoint, and the job as all layers say it. What can be checked is checked before weights are read."""
        from genctl.session import Session

        asked = self.asked
        began = time.perf_counter()
        session = Session.load(
            self.early.runtime,
            allow_pickle=asked.allow_pickle,
            trust_remote_code=asked.trust_remote_code,
            allow_plugins=asked.allow_plugins,
            on_event=self._loading,
            layers=self.layers,
            need_tokenizer=are_texts(asked),
        )
        self.load_s = time.perf_counter() - began
        notes.announce_compiling(session, self.say, quiet=asked.quiet, before=self._hide)
        base = session.resolve(self.layers)
        kind = session.check(base)
        if asked.strategy:
            strategy.check(asked.strategy, kind)
        if asked.verbose:
            for note in (*base.notes, *session.loaded.told):
                self.say(f"note: {note}")
        self.reuse = notes.Reuse(base.runtime.prompt_cache)
        for note in () if asked.quiet else notes.cache_notes(session, base):
            self.say(f"note: {note}")
        return session, base

    def _loading(self, event: told.Loading) -> None:
        with self.interrupt.busy():
            if self.bar is not None:
                self.bar.hide()  # a companion of the checkpoint: its bar takes the place of ours
            self.view.feed(event)

    def _begin(self, looked: Looked | None) -> None:
        """The checkpoint is known, and so is the seed: one that nobody asked for is that of the job's beginning."""
        given = self.base.runtime.seed
        self.seed = random_seed() if given is None else given
        if not self.asked.resume:
            return
        session = self.session
        loaded = [session.loaded, *(one for one, _ in session.planner.companions.values())]
        identity = resume.identity(
            self.asked,
            self.base,
            seed=self.seed,
            checkpoints={one.name: one.fingerprint() for one in loaded},
            batch={"width": self.width},
            input=None if looked is None else {**looked.identity(), "format": self._input_format},
            top=self._report().top,
        )
        self.seed = self.output.begin(identity, self.span).seed
        self.tally.go_on(self.output.done, self.output.tally)

    def _skip(self, rows: Iterator[InputRow | BadRow]) -> None:
        """Pass over the rows that need not be decoded, comparing them with what was read before."""
        output = self.output
        if output.finished and output.compared:
            return
        until = output.done if output.finished else output.again
        while self.read < until and (row := next(rows, None)) is not None:
            self.read += 1
            output.consume(row)
        if output.finished:
            self.read += next(rows, None) is not None
        if output.finished or self.read < until:
            output.end_of_input(self.read)

    def _nothing_to_do(self) -> int:
        self.say(f"{self.asked.output} is complete: {self.output.done:,} rows, nothing to do")
        return self._status()

    # -- while decoding ------------------------------------------------------------------------------------------------

    def _decode(self, rows: Iterator[InputRow | BadRow]) -> None:
        """Group by group, each to its end: what a row's neighbours are does not depend on where a run began."""
        for first in rows:
            group = itertools.chain([first], itertools.islice(rows, self.span - 1 - first.index % self.span))
            with closing(self._stream(group)) as stream:
                while (event := next(stream, None)) is not None:
                    with self.interrupt.busy():
                        self._hear(event)
            if self.interrupt.status:
                return
            if self.stop_at is not None:
                self.output.stop(self.stop_at, self.stopper)
                return
        self.output.end_of_input(self.read)

    def _stream(self, group: Iterator[InputRow | BadRow]) -> Generator[told.Event, None, None]:
        requests, report = self._requests(group), self._report()
        if self.asked.check_runtime:
            requests = self._compared(requests)
        if not self.asked.check_batch:
            # in order, what an interrupt leaves is the beginning of the input; and rows that somebody types or pipes
            # are not waited for while others could be decoded
            at_hand = self.asked.unordered and self.asked.input != "-" and (self.asked.input or self.asked.arguments)
            return self.session.stream(
                requests,
                report,
                width=self.width,
                interrupted=self.interrupt,
                on_shortage=self._shortage,
                ahead=AHEAD * self.width if at_hand and self.width > 1 else 0,
            )
        from genctl.inspecting.batches import checked

        return checked(self.session, requests, report, width=self.width, told=self._differs, interrupted=self.interrupt)

    def _compared(self, requests: Iterator[Request]) -> Iterator[Request]:
        """The same requests; the first prompt goes through both runtimes before it is decoded."""
        from genctl.inspecting.runtimes import compare

        for number, request in enumerate(requests):
            if number == 0 and not self.checked:
                self.checked = True
                found = compare(self.session, request)
                self.say(f"check: {found}")
                self.apart = "" if found.close else str(found)
            yield request

    def _differs(self, found: BatchDivergence) -> None:
        self.different += 1
        self.say(f"check: {found}")

    def _shortage(self, width: int) -> None:
        self.say(f"note: not enough memory for {self.width} prompts at once, going on with {width}")
        self.width = width

    def _requests(self, rows: Iterator[InputRow | BadRow]) -> Iterator[Request]:
        from genctl.requests import Request

        for row in rows:
            if self.stop_at is not None or self.interrupt.status:
                return
            self.read += 1
            self.output.consume(row)
            if isinstance(row, BadRow):
                self._failure(row.id, row.index, row.code, row.message)
                continue
            try:
                wanted = {**row.params, **{key: value for key, value in row.extra.items() if key != "reference"}}
                resolved = overlay(self.base, row_layer(wanted, row.where)) if wanted else self.base
            except GenctlError as error:
                self._failure(row.id, row.index, error.code, error.message)
                continue
            self.rows[row.id] = row
            self.unfinished.expect(row.id, resolved.generation.num_return_sequences)
            seed = resolved.runtime.seed if "seed" in row.params else None
            yield Request(
                row.id,
                resolved,
                row_seed(self.seed, row.id, row.index) if seed is None else seed,
                row.prompt,
                row.prompt_ids,
                row.messages,
            )

    def _report(self) -> Report:
        from genctl.requests import Report

        asked = self.asked
        top = asked.top_logprobs
        if top is None:
            top = SHOWN_TOP if asked.scores and asked.format == "text" else 0
        return Report(top, asked.scores or top > 0, asked.explain)

    def _hear(self, event: told.Event) -> None:
        if self.trace is not None:
            self.trace.write(event)
        if self.live or not isinstance(event, told.Failed):
            self.view.feed(event)
        if isinstance(event, told.Began) and (note := self._cut(event)):
            self.say(f"note: {note}")
        self.search.feed(event)
        self.reuse.feed(event)
        self.unfinished.feed(event)
        if self.bar is not None:
            self.bar.feed(event)
        result = self.collector.feed(event)
        if result is not None:
            self._take(result)

    def _cut(self, event: told.Began) -> str:
        return notes.cut_note(event, event.lane, self.rows.get(event.lane), self.base.runtime)

    def _take(self, result: Result) -> None:
        row = self.rows.pop(result.lane)
        if self.interrupt.status and self.asked.resume:
            return  # cut off; the next run makes it whole
        if result.error is not None:
            self._failure(row.id, row.index, result.error.code, result.error.message)
            return
        if self.stop_at is not None and row.index > self.stop_at:
            return
        if row.index >= self.output.done:
            for note in shortfalls(result, f"prompt {row.id}"):
                self._hide()
                self.say(f"warning: {note}")
        texts = self.session.loaded.tokenizer is not None
        self.tally.expect(row.index, ends_to_tell(self.asked.fail_on, row, result, texts=texts))
        records: Sequence[Mapping[str, Any]] = self.search.records(row.id) or records_of(
            self.asked,
            row,
            result,
            load_s=self.load_s,
            encoder_decoder=self.session.forward.is_encoder_decoder,
            saved=self.reuse.path is not None,
            texts=texts,
        )
        self.output.put(row.index, records)

    def _failure(self, id: str, index: int, code: str, message: str) -> None:
        made = error_record(id, code, message)
        if self.asked.strict:
            if self.stop_at is None or index < self.stop_at:
                self.stop_at, self.stopper = index, [made]
            return
        with self.interrupt.busy():
            if self.live or self.asked.stream:
                self._say_failed(made)
            self.output.put(index, [made])

    def _written(self, index: int, records: Sequence[Mapping[str, Any]]) -> None:
        """The records of a row are out."""
        failed = self.tally.written(index, records)
        if self.bar is not None:
            self.bar.row(failed=failed)

    # -- afterwards ----------------------------------------------------------------------------------------------------

    @property
    def _cut_short(self) -> bool:
        return bool(self.interrupt.status) or self.stop_at is not None

    def _rescue(self, stack: ExitStack) -> None:
        """The model does not come back: write what there is, from the thread that noticed."""
        if not self.asked.resume:
            for result in self.unfinished.results():
                self._take(result)
        self.output.hurried = True
        self._status()
        stack.close()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()

    def _status(self) -> int:
        for note in () if self.asked.quiet else self.reuse.notes(self.session, verbose=self.asked.verbose):
            self.say(f"note: {note}")
        if self._cut_short and self.asked.resume:
            self.say(f"{self.tally.rows:,} rows are in {self.asked.output}; the same command goes on after them")
        if self.interrupt.status:
            return self.interrupt.status
        if self.output.differs:
            self.say(
                f"note: rows of {self.asked.output} that were decoded again came out differently (another machine or "
                "number of threads, or a time limit); what was written stays"
            )
        if self.stop_at is not None:
            error = self.stopper[0]["error"]
            before = f"the {self.stop_at:,} rows before it are written" if self.stop_at else "no row is before it"
            self.say(f"error: prompt {self.stopper[0]['id']}: {error['message']}; --strict stops here, {before}")
            return int(Exit.ROWS_FAILED)
        status = self.tally.status()
        if self.apart:
            raise CheckError(f"--check-runtime: {self.apart}")
        if self.different:
            raise CheckError(f"--check-batch: {self.different} sequences differ from those decoded alone")
        return status

    def say(self, line: str) -> None:
        """One line on standard error."""
        from genctl.render.parts import visible

        self._hide()
        print(visible(line), file=sys.stderr, flush=True)

    def _say_failed(self, made: Mapping[str, Any]) -> None:
        if self.asked.strict:
            return  # it is told at the end
        error = made["error"]
        self.say(f"error: prompt {made['id']}: {error['message']}")

    def _hide(self) -> None:
        """Take away what moves on the terminal."""
        if self.bar is not None:
            self.bar.hide()
        self.view.pause()
