"""`genctl run` and `genctl beam` at work: rows are loaded, decoded in groups, shown and written."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias

from genctl import events
from genctl.commands import job
from genctl.commands.engine_choice import LOCAL, EngineChoice
from genctl.commands.options import shown_top
from genctl.commands.run.options import RunOptions, check_search
from genctl.commands.run.output import FirstFailure, open_records, records_of
from genctl.commands.run.row_source import Grouping, RowSource
from genctl.commands.run.screen import Screen
from genctl.config.chat_settings import check_is_chat
from genctl.config.layers import Resolved
from genctl.engines.protocol import Flow
from genctl.errors import Exit, count
from genctl.io.record_output import RecordOutput, RowTally
from genctl.io.records import error_record
from genctl.io.rows import BadRow, InputRow
from genctl.io.writers import FORMATS
from genctl.params import Runtime
from genctl.results import Collector, Result
from genctl.terminal import first_sign
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.standard_streams import is_terminal

if TYPE_CHECKING:
    from genctl.engines.protocol import Report, Request, Skipped
    from genctl.io.readers import InputScan

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
        self.stopped: FirstFailure | None = None
        self.said_full = False  # that a text ended because the context was full

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
        several = self.early.generation.num_return_sequences > 1
        self.source = RowSource(self.input)
        self.view = self.screen = Screen(options, self.interrupt, live=self.live, lone=self.lone, several=several)
        self.shown = self.live or options.stream
        self.output: RecordOutput = open_records(options, self.tally, self.say_failed, shown=self.shown)
        stack.push(lambda kind, *_: self.output.abandon() if kind else self.output.close(cut_short=self._cut_short))
        self.open_event_log(stack, options.events, force=options.force)
        self.screen.open(stack)
        for watcher in self.watchers:
            watcher.draw(self.screen.drawn)
        self.looked = self._look()
        self._show_prompt()

    def load(self) -> None:
        """Load the checkpoint; begin or continue the output."""
        options, early = self.options, self.early
        self.engine = engine = self.load_engine(
            early.runtime,
            self.layers,
            on_event=self.screen.loading,
            named=early.names_model,
            live=self.shown,
            waits=self.waits,
        )
        self.screen.view.load_s = self.load_s
        self.base, plan = self.settle(engine, self.layers, options.strategy)
        if options.with_tokens:
            plan.require_logprobs("--scores" if options.scores else "--top-logprobs")
        self.texts, self.encoder_decoder = engine.about.has_texts, engine.about.is_encoder_decoder
        self.watched = engine.watched(options.watch)
        width = engine.width(self.base, 1 if self.live else job.WIDTH)
        shared = self.choice.batches
        self.grouping = Grouping.of(engine, plan, self.output, width=width, lone=self.lone, shared=shared)
        if options.verbose:
            self.detail(*engine.notes())
        self.describe(self.base, plan)
        self._begin()
        if self.live and self.lone:
            first_sign.status("reading the prompt")

    def deliver(self, stack: ExitStack) -> None:
        """Decode the rows that are not done."""
        options, output = self.options, self.output
        self.source.skip(output)
        if output.finished:
            self.say(f"{options.output} is complete: {count(output.done, 'row')}, nothing to do")
            return
        total = len(options.arguments) or (None if self.looked is None else self.looked.rows)
        self.screen.open_bar(stack, total, done=output.done)
        self.collector = Collector()
        self.listeners += [self.end_sign, self.screen.feed, self.note_prompt]
        self.listeners += [*self.screen.beside(counts=self.choice.live), self.reuse.feed, self._collect]
        with self.interrupt.rescued_by(lambda: self._rescue(stack)):
            self._decode()

    # -- before decoding -----------------------------------------------------------------------------------------------

    def _look(self) -> InputScan | None:
        """Look the input file over, where the number of its rows or its content is needed."""
        options = self.options
        if options.input in (None, "-") or not (options.resume or self.screen.wants_bar):
            return None
        from genctl.io.readers import scan

        assert options.input is not None
        return scan(options.input, options.input_kind)

    def _show_prompt(self) -> None:
        """Show a single prompt at once, in the line that says that the checkpoint is loaded."""
        if not (self.live and self.lone) or self.options.echo is False:
            return
        row = self.source.first()
        if row is not None:
            self.show_prompt(row)

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
        if changed := self.grouping.changed(self.options.output):
            self.remark(changed)
        from genctl.commands.run.resume import identity

        header = identity(
            self.options,
            self.base,
            seed=self.seed,
            checkpoints=self.engine.fingerprints(),
            grouping=self.grouping,
            input=None if looked is None else {**looked.identity(), "format": self.options.input_kind},
            top=self._report().top,
            watch=self.watched,
        )
        given = self.base.runtime.seed is not None
        self.seed = self.output.begin(header, self.grouping.again, self.base.origins, seed_given=given)

    # -- while decoding ------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Decode all rows. Where a row's numbers depend on its neighbours, in groups that do not depend on where a run
        began (`requests.grouped`).
        """
        if not self.choice.live:
            self.screen.view.begin()
        self.listen(self._stream(), self.listeners)
        if self.interrupt.status:
            return
        if self.stopped is not None:
            self.output.stop(self.stopped.index, [self.stopped.record])
        else:
            self.output.end_of_input(self.source.taken)

    def _stream(self) -> Generator[events.Event, None, None]:
        options, grouping = self.options, self.grouping
        flow = Flow(
            grouping.width,
            grouping.span,
            continuous=bool(grouping.invariant_by),
            threads=grouping.threads,
            ahead=self.ahead,
            ordered=not options.unordered or options.strict,
            interrupted=self.interrupt,
            enough=lambda last: self.stopped is not None and last >= self.stopped.index,
            on_shortage=self._shortage,
            on_progress=self.screen.progress,
        )
        return self.engine.stream(self._requests(), self._report(), flow)

    @property
    def ahead(self) -> int:
        """How many rows are read ahead: only with --unordered, so that an interrupt leaves the beginning of the input;
        and never from a pipe or a keyboard, which would keep other rows waiting.
        """
        at_hand = self.options.unordered and not self.waits
        return AHEAD * self.grouping.width if at_hand and self.grouping.width > 1 else 0

    def _shortage(self, width: int, fewer: int) -> None:
        self.say_shortage("prompts", width, fewer)

    def _requests(self) -> Rows:
        """A request for each row, or what stands for it where there is none (`Engine.stream`)."""
        from genctl.engines.protocol import Skipped

        idle = self._idle if self._reads_beside else None
        for row in self.source.take(self.output, lambda: self._cut_short, idle):
            if row is None:
                yield None
                continue
            usable = list(self.usable(iter([row]), lambda row: self.settings_of(row, self.base)))
            for row, resolved in usable:
                self.rows[row.id] = row
                yield job.request_of(row, resolved, job.seed_of(row, resolved, self.seed))
            if not usable:
                yield Skipped(row.index)

    @property
    def _cut_short(self) -> bool:
        """Whether the run ends before the input does."""
        return bool(self.interrupt.status) or self.stopped is not None

    @property
    def _reads_beside(self) -> bool:
        """Whether rows are read beside decoding: those that are there need not wait for a slow pipe."""
        if not self.waits or self.choice.ranks:
            return False
        return not self.choice.live or (bool(self.grouping.invariant_by) and self.grouping.width > 1)

    def _idle(self) -> bool:
        """Whether nothing is decoded in this process until the next row comes."""
        return self.choice.live and not self.rows

    def _report(self) -> Report:
        from genctl.engines.protocol import Report

        options, top = self.options, shown_top(self.options)
        listened = options.events or options.report or options.svg or options.with_tokens
        listened = listened or self.base.runtime.processed_logprobs
        steps = self.choice.live or bool(listened or options.tree or options.tree_format)
        return Report(top, options.scores or top > 0, options.explain, self.watched, steps, options.format in PARENTS)

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
        if self.stopped is not None and row.index > self.stopped.index:
            return
        if row.index >= self.output.done:
            for note in result.shortfalls(self.of(row)):
                self.say(f"warning: {note}")
            self._say_full(row, result)
        self.tally.look(row.index, self.of(row), result, self.options.fail_on, texts=self.texts)
        trees = [] if self.screen.search is None else self.screen.search.records(row.id)
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
        self._count(row)

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
            self._count(row, failed=True)
        elif self.stopped is None or row.index < self.stopped.index:
            self.stopped = FirstFailure(self.of(row), row.index, error_record(row.id, code, message))

    def _count(self, row: InputRow | BadRow, *, failed: bool = False) -> None:
        if row.index >= self.output.done:
            self.screen.row_done(failed=failed)

    # -- afterwards ----------------------------------------------------------------------------------------------------

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
        if self.stopped is not None:
            self.say(self.stopped.sentence())
            return int(Exit.ROWS_FAILED)
        return self.tally.status()

    def closing_notes(self) -> None:
        """Print notes on what was found while decoding."""
        self.note(*self.reuse.notes(self.engine, verbose=self.options.verbose))
        self.detail(*self.engine.done.shares)

    def say_failed(self, record: Mapping[str, Any]) -> None:
        """Print why a row failed; with --strict `status` does."""
        if not self.options.strict:
            super().say_failed(record)
