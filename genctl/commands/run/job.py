"""`genctl run` and `genctl beam` at work: rows are loaded, decoded in groups, shown and written."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from genctl import events
from genctl.commands import job
from genctl.commands.engine_choice import LOCAL, SERVERS, EngineChoice, engine_of, shared
from genctl.commands.options import shown_top
from genctl.commands.run.options import RunOptions, check_backend, check_search
from genctl.commands.run.output import FirstFailure, Results
from genctl.commands.run.resume import Grouping, identity
from genctl.commands.run.row_source import RowSource
from genctl.commands.run.screen import Screen
from genctl.config.chat_settings import check_is_chat
from genctl.config.layers import Resolved
from genctl.engines.protocol import Flow, Report, Request, Skipped
from genctl.errors import Exit, UsageError, count
from genctl.events.results import Collector, Result
from genctl.io.record_output import RecordOutput
from genctl.io.records import error_record
from genctl.io.rows import BadRow, InputRow
from genctl.io.writers import FORMATS
from genctl.params import DEFAULT_NEW_TOKENS
from genctl.terminal import loading_line
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.standard_streams import is_terminal

if TYPE_CHECKING:
    from genctl.io.readers import InputScan

# Formats whose records say which row each token of a beam continued.
PARENTS = tuple(name for name, format in FORMATS.items() if format.nested)


class RunJob(job.Job[RunOptions]):
    """One run of a generating command."""

    def __init__(self, options: RunOptions, interrupt: Interrupt, choice: EngineChoice = LOCAL) -> None:
        super().__init__(options, interrupt, choice)
        self.watched: tuple[int, ...] = ()  # ids, known once there is a tokenizer
        self.rows: dict[str, InputRow] = {}  # those that are being decoded

    def prepare(self) -> int | None:
        """Settings without those of the checkpoint; with --dry, print the whole job."""
        _ = self.options.prompt_template  # a mistake in it is an error now, with --dry as well
        super().prepare()
        if self.options.view == "beam":
            check_search(self.early)
        if self.options.are_texts:
            check_is_chat(self.early.runtime)
        if not self.options.dry:
            return None
        from genctl.config.dry import to_toml

        planned = self.choice.planned(self.early.runtime, self.layers, self.options.trust)
        sys.stdout.write(to_toml(planned, defaults=self.options.verbose, always=("model", "max_new_tokens")))
        if not self.options.verbose:
            length = planned.generation.max_new_tokens or planned.generation.max_length
            default = "" if length else f"# max_new_tokens: {DEFAULT_NEW_TOKENS}, or what fits the context (default)\n"
            sys.stdout.write(f"\n{default}# all other settings have their defaults: -v lists them\n")
        return int(Exit.DONE)

    def open(self, stack: ExitStack) -> None:
        """Open the output, the event log and the view; look the input file over."""
        options = self.options
        plain = options.to_file or options.stream or options.tree_format
        self.live = not plain and self.choice.live and options.format == "text" and is_terminal(sys.stdout)
        several = self.early.generation.num_return_sequences > 1
        self.source = RowSource(self.input)
        self.view = self.screen = Screen(
            options,
            self.interrupt,
            live=self.live,
            single_prompt=self.lone,
            several=several,
            counts=self.choice.live,
        )
        self.shown = self.live or options.stream
        self.results = Results(options, self.messages, self.print_failure, live=self.live, shown=self.shown)
        self.output: RecordOutput = self.results.output
        stack.push(lambda kind, *_: self.output.abandon() if kind else self.output.close(cut_short=self._cut_short))
        self.open_event_log(stack, options.events)
        self.screen.open(stack)
        self.scan: InputScan | None = None  # of an input file, where its content or the number of its rows is needed
        if options.input not in (None, "-") and (options.resume or self.screen.wants_bar):
            from genctl.io.readers import scan

            self.scan = scan(str(options.input), options.input_kind)
        if self.live and self.lone and options.echo is not False:
            self.show_prompt(self.source.first())

    def load(self) -> None:
        """Load the checkpoint; begin or continue the output."""
        options, early = self.options, self.early
        self.engine = engine = self.load_engine(
            early, self.layers, on_event=self.screen.loading, live=self.shown, waits=self.waits
        )
        if self.screen.view is not None:
            before = engine.done.passes
            self.screen.view.load_s = self.load_s
            if self.choice.live:
                self.screen.view.passes = lambda: engine.done.passes - before
        self.base, plan = self.settle(engine, self.layers, options.strategy)
        if options.with_tokens:
            plan.require_logprobs("--scores" if options.scores else "--top-logprobs")
        self.results.about, self.results.load_s = engine.about, self.load_s
        self.results.reused = self.reuse.path is not None
        self.watched = engine.watched(options.watch)
        width = engine.width(self.base, 1 if self.live else job.WIDTH)
        shared = self.choice.batches
        self.grouping = Grouping.of(engine, plan, self.output, width=width, single_prompt=self.lone, shared=shared)
        if options.verbose:
            self.messages.detail(*engine.notes())
        self.describe(self.base, plan)
        self._begin()
        if self.screen.view is not None and not self.lone:
            self.screen.view.seed = self.seed
        if self.live and self.lone:
            loading_line.status("reading the prompt")

    def deliver(self, stack: ExitStack) -> None:
        """Decode the rows that are not done."""
        options, output = self.options, self.output
        self.source.skip(output)
        if output.finished:
            self.messages.print(f"{options.output} is complete: {count(output.done, 'row')}, nothing to do")
            return
        total = len(options.arguments) or (None if self.scan is None else self.scan.rows)
        self.screen.open_bar(stack, total, done=output.done)
        self.collector = Collector()
        self.listeners += [*self.sign_listeners(), self.screen.feed, self.note_prompt]
        self.listeners += [*self.reuse.listeners, self._collect]
        with self.interrupt.rescued_by(lambda: self._rescue(stack)):
            self._decode()

    # -- before decoding -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Choose the seed, and with --resume compare the job with the one that began the output."""
        self.seed = job.start_seed(self.base)
        if self.page is not None:
            from genctl.config.dry import to_toml

            self.page.settled(to_toml(self.base, defaults=False), seed=self.seed)
        if not self.options.resume:
            return
        if changed := self.grouping.changed(self.options.output):
            self.messages.remark(changed)
        header = identity(
            self.options,
            self.base,
            seed=self.seed,
            checkpoints=self.engine.fingerprints(),
            grouping=self.grouping,
            input=None if self.scan is None else {**self.scan.identity(), "format": self.options.input_kind},
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
        if self.screen.view is not None and not self.choice.live:
            self.screen.view.begin()
        self.listen(self._stream(), self.listeners)
        if not self.interrupt.status:
            self.results.end(self.source.taken)

    def _stream(self) -> Generator[events.Event, None, None]:
        options, grouping, results = self.options, self.grouping, self.results
        flow = Flow(
            grouping.width,
            grouping.span,
            continuous=bool(grouping.invariant_by),
            threads=grouping.threads,
            ahead=grouping.ahead(at_hand=options.unordered and not self.waits),
            ordered=not options.unordered or options.strict,
            interrupted=self.interrupt,
            enough=lambda last: results.stopped is not None and last >= results.stopped.row,
            on_shortage=partial(self.messages.shortage, "prompts"),
            on_progress=self.screen.progress,
        )
        return self.engine.stream(self._requests(), self._report(), flow)

    def _requests(self) -> Iterator[Request | Skipped | None]:
        """A request for each row, or what stands for it where there is none (`Engine.stream`)."""
        # nothing is decoded in this process until the next row comes
        idle = (lambda: self.choice.live and not self.rows) if self._reads_beside else None
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
        return bool(self.interrupt.status) or self.results.stopped is not None

    @property
    def _reads_beside(self) -> bool:
        """Whether rows are read beside decoding: those that are there need not wait for a slow pipe."""
        if not self.waits or self.choice.ranks:
            return False
        return not self.choice.live or (bool(self.grouping.invariant_by) and self.grouping.width > 1)

    def _report(self) -> Report:
        options, top = self.options, shown_top(self.options)
        listened = options.events or options.report or options.with_tokens
        listened = listened or self.base.runtime.processed_logprobs
        steps = self.choice.live or bool(listened or options.tree or options.tree_format)
        return Report(top, options.scores or top > 0, options.explain, self.watched, steps, options.format in PARENTS)

    def source_of(self, lane: str) -> tuple[InputRow, Resolved]:
        """The row of a lane that begins, and the settings of its run."""
        return self.rows[lane], self.base

    def _collect(self, event: events.Event) -> None:
        if (result := self.collector.feed(event)) is not None:
            self._take(result)

    def _take(self, result: Result) -> None:
        """Write a result."""
        row = self.rows.pop(result.lane)
        if self.interrupt.status and self.options.resume:
            return  # incomplete: the next run decodes it again
        if result.error is not None:
            self.fail(row, result.error.code, result.error.message, already_shown=self.live, hint=result.error.hint)
            return
        if self.results.take(row, self.of(row), result, self.screen.tree_records(row.id)):
            self._count(row)

    def fail(
        self, row: InputRow | BadRow, code: str, message: str, *, already_shown: bool = False, hint: str = ""
    ) -> None:
        """Write the record of a row that failed; with --strict it is the last one."""
        if not self.options.strict:
            super().fail(row, code, message, already_shown=already_shown, hint=hint)
            self._count(row, failed=True)
        else:
            self.results.stop(FirstFailure(self.of(row), row.index, error_record(row.id, code, message, row.columns)))

    def _count(self, row: InputRow | BadRow, *, failed: bool = False) -> None:
        if row.index >= self.output.done:
            self.screen.row_done(failed=failed)

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def keep_partial(self) -> None:
        """Write what the unfinished rows have so far; with --resume the next run decodes them again."""
        if not self.options.resume and self.choice.live:
            for result in self.collector.unfinished(texts=self.engine.about.has_texts):
                self._take(result)
        self.output.hurried = True
        self.status()

    def status(self) -> int:
        """The exit status. Raises CheckError where a requested check failed."""
        self.messages.note(*self.reuse.notes(self.engine, verbose=self.options.verbose))
        self.messages.detail(*self.engine.done.shares)
        if self._cut_short and self.options.resume:
            written = self.results.tally.rows
            done = count(written, "row is", "rows are")
            self.messages.print(f"{done} in {self.options.output}; rerun the same command to continue")
        return self.interrupt.status or self.results.status()

    def print_failure(self, record: Mapping[str, Any]) -> None:
        """Print why a row failed; with --strict `status` does."""
        if not self.options.strict:
            super().print_failure(record)


def run(options: RunOptions) -> int | None:
    """`genctl run` and `genctl beam`: by this process, servers, workers, or ranks that share a model."""
    choice = engine_of(options)
    if choice is SERVERS:
        choice = replace(SERVERS, check=check_backend)
    elif choice is LOCAL and os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        choice = EngineChoice(shared, _check_ranks, ranks=True)
    return RunJob.perform(options, choice)


def _check_ranks(options: RunOptions, early: Resolved) -> None:
    if options.resume:
        raise UsageError("--tensor-parallel and --resume: only one process can do that")
