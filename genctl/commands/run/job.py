"""`genctl run` and `genctl beam`: rows are decoded in groups, shown and written."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from genctl.commands.engine_choice import LOCAL, SERVERS, EngineChoice, engine_of, shared
from genctl.commands.job import (
    WIDTH,
    Job,
    Row,
    end_loading_line,
    request_of,
    seed_of,
    settings_of,
    settle,
    start_seed,
    started,
    usable,
)
from genctl.commands.options import shown_top
from genctl.commands.run.options import RunOptions, check_backend, check_search
from genctl.commands.run.output import Results
from genctl.commands.run.resume import Grouping, identity
from genctl.commands.run.row_source import RowSource
from genctl.commands.run.screen import Screen
from genctl.config.conflicts import check_is_chat
from genctl.config.layers import Resolved, resolve
from genctl.engines.protocol import Flow, Report, Request, Skipped
from genctl.errors import Exit, UsageError, count
from genctl.events import Event
from genctl.events.results import Collector, Result
from genctl.io.rows import InputRow
from genctl.io.writers import FORMATS
from genctl.params import DEFAULT_NEW_TOKENS
from genctl.terminal import loading_line
from genctl.terminal.standard_streams import is_terminal

# Formats with records that have the parent row of each token of a beam.
PARENTS = tuple(name for name, format in FORMATS.items() if format.nested)


def run(options: RunOptions) -> int | None:
    """`genctl run` and `genctl beam`, with an engine in this process, on servers, in workers, or in ranks."""
    with started(options, _choice_of(options)) as job:
        choice, interrupt, messages = job.choice, job.interrupt, job.messages
        _ = options.prompt_template  # report a mistake in it now, with --dry too
        layers, early = job.early_settings()
        if options.view == "beam":
            check_search(early)
        if options.are_texts:
            check_is_chat(early.runtime)
        if options.dry:
            from genctl.config.settings import to_toml

            if early.runtime.backend is None:  # a server does not report its settings
                from genctl.engines.session import checkpoint_layer

                layers.insert(0, checkpoint_layer(early.runtime, **options.trust))
            planned = resolve(layers)
            sys.stdout.write(to_toml(planned, defaults=options.verbose, always=("model", "max_new_tokens")))
            if not options.verbose:
                length = planned.generation.max_new_tokens or planned.generation.max_length
                default = f"# max_new_tokens: {DEFAULT_NEW_TOKENS}, or what fits the context (default)\n"
                sys.stdout.write(
                    f"\n{'' if length else default}# all other settings have their defaults: -v lists them\n"
                )
            return int(Exit.DONE)

        choice.meet(job.stack)
        rows = None if choice.follows else job.read()
        if not choice.agree(rows is not None):
            return None
        if rows is None:  # another rank reads and writes
            follower = job.load_engine(early, layers, waits=job.waits)
            settle(follower, layers)
            return int(follower.follow())  # type: ignore[attr-defined]

        with job.outputs() as stack:
            plain = options.to_file or options.stream or options.tree_format
            job.live = live = not plain and choice.live and options.format == "text" and is_terminal(sys.stdout)
            job.shown = live or options.stream
            watched_alone = live and job.single_prompt
            several = early.generation.num_return_sequences > 1
            screen = job.view = Screen(job, options, several=several)
            results = Results(job, options, screen)
            output = job.output = results.output
            stack.push(lambda kind, *_: output.abandon() if kind else output.close(cut_short=results.cut_short))
            job.open_event_log(stack, options.events)
            screen.open(stack)
            source = RowSource(rows)

            engine = job.load_engine(early, layers, on_event=screen.loading, live=job.shown, waits=job.waits)
            if screen.view is not None:
                before = engine.done.passes
                screen.view.load_s = job.load_s
                if choice.live:
                    screen.view.passes = lambda: engine.done.passes - before
            base, plan = settle(engine, layers, options.strategy)
            if options.with_tokens:
                plan.require_logprobs("--scores" if options.scores else "--top-logprobs")
            results.about, results.reused = engine.about, job.reuse.path is not None
            report = _report_of(options, base, engine.watched(options.watch), live=choice.live)
            width = engine.width(base, 1 if live else WIDTH)
            grouping = Grouping.of(
                engine, plan, output, width=width, single_prompt=job.single_prompt, shared=choice.batches
            )
            if options.verbose:
                messages.detail(*engine.notes())
            job.describe(base, plan)

            seed = start_seed(base)
            if job.page is not None:
                from genctl.config.settings import to_toml

                job.page.settled(to_toml(base, defaults=False), seed=seed)
            if options.resume:  # compare the job with the one that began the output
                if changed := grouping.changed(options.output):
                    messages.remark(changed)
                header = identity(
                    options,
                    base,
                    seed=seed,
                    checkpoints=engine.fingerprints(),
                    grouping=grouping,
                    top=report.top,
                    watch=report.watch,
                )
                seed = output.begin(header, grouping.again, base.origins, seed_given=base.runtime.seed is not None)
            if screen.view is not None and not job.single_prompt:
                screen.view.seed = seed
            if watched_alone:
                loading_line.status("reading the prompt")

            decoding = Decoding(job, results, base, seed)

            def print_end() -> None:
                messages.note(*job.reuse.notes(engine, verbose=options.verbose))
                if results.cut_short and options.resume:
                    done = count(results.tally.rows, "row is", "rows are")
                    messages.print(f"{done} in {options.output}; rerun the same command to continue")

            def rescue() -> None:
                """Write the unfinished rows as they are; with --resume the next run decodes them again."""
                if not options.resume and choice.live:
                    for result in decoding.collector.unfinished(texts=engine.about.has_texts):
                        decoding.take(result)
                output.hurried = True
                print_end()
                job.rescue(stack)

            source.skip(output)
            if output.finished:
                messages.print(f"{options.output} is complete: {count(output.done, 'row')}, nothing to do")
            else:
                total = len(options.arguments) or None
                if options.input not in (None, "-") and screen.wants_bar:
                    from genctl.io.readers import count_rows

                    total = count_rows(str(options.input), options.input_kind)
                screen.open_bar(stack, total, done=output.done)
                slow = job.waits and not choice.ranks  # decode available rows without waiting for more from a slow pipe
                beside = slow and (not choice.live or (bool(grouping.invariant_by) and grouping.width > 1))
                idle = (lambda: choice.live and not decoding.rows) if beside else None
                taken = source.take(output, lambda: results.cut_short, idle)
                flow = Flow(
                    grouping.width,
                    grouping.span,
                    continuous=bool(grouping.invariant_by),
                    threads=grouping.threads,
                    ahead=grouping.ahead(at_hand=options.unordered and not job.waits),
                    ordered=not options.unordered or options.strict,
                    interrupted=interrupt,
                    enough=lambda last: results.stopped is not None and last >= results.stopped.row,
                    on_shortage=partial(messages.shortage, "prompts"),
                )
                job.listeners += [*end_loading_line(), screen.feed, job.prompt_notes(decoding.source_of)]
                job.listeners += [*job.reuse.listeners, decoding.feed]
                with interrupt.rescued_by(rescue):
                    if screen.view is not None and not choice.live:
                        screen.view.begin()
                    stream = engine.stream(decoding.requests(taken), report, flow)
                    job.listen(stream, job.listeners, decoding.source_of)
                    if not interrupt.status:
                        results.end(source.taken)
        print_end()
        return interrupt.status or results.status()


class Decoding:
    """Rows that become requests, and results that become records."""

    def __init__(self, job: Job, results: Results, base: Resolved, seed: int) -> None:
        self.job, self.results, self.base, self.seed = job, results, base, seed
        self.rows: dict[str, InputRow] = {}  # rows being decoded, by lane
        self.collector = Collector()

    def source_of(self, lane: str) -> tuple[InputRow, Resolved]:
        """The row of a lane, and the settings of the run without the row's own."""
        return self.rows[lane], self.base

    def requests(self, rows: Iterator[Row | None]) -> Iterator[Request | Skipped | None]:
        """A request for each row; Skipped or None in place of rows without one (see `Engine.stream`)."""
        for row in rows:
            if row is None:
                yield None
                continue
            settled = next(usable([row], lambda row: settings_of(row, self.base), self.results.fail), None)
            if settled is None:
                yield Skipped(row.index)
                continue
            row, resolved = settled
            self.rows[row.id] = row
            yield request_of(row, resolved, seed_of(row, resolved, self.seed))

    def feed(self, event: Event) -> None:
        """A listener: write each result."""
        if (result := self.collector.feed(event)) is not None:
            self.take(result)

    def take(self, result: Result) -> None:
        """Write a result."""
        row, error = self.rows.pop(result.lane), result.error
        if self.job.interrupt.status and self.results.options.resume:
            return  # incomplete: the next run decodes it again
        if error is not None:
            self.results.fail(row, error.code, error.message, already_shown=self.job.live, hint=error.hint)
        else:
            self.results.take(row, result)


def _report_of(options: RunOptions, base: Resolved, watched: tuple[int, ...], *, live: bool) -> Report:
    """What events report about tokens. `live`: a user may be watching."""
    top = shown_top(options)
    listened = options.events or options.report or options.with_tokens or base.runtime.processed_logprobs
    steps = live or bool(listened or options.tree or options.tree_format)
    return Report(top, options.scores or top > 0, options.explain, watched, steps, options.format in PARENTS)


def _choice_of(options: RunOptions) -> EngineChoice:
    """The engine, with a check for options of a run that it does not support."""
    choice = engine_of(options)
    if choice is SERVERS:
        return replace(SERVERS, check=check_backend)
    if choice is LOCAL and os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        return EngineChoice(shared, _check_ranks, ranks=True)
    return choice


def _check_ranks(options: RunOptions, early: Resolved) -> None:
    if options.resume:
        raise UsageError("--tensor-parallel and --resume: only one process can do that")
