"""`genctl compare` at work: one checkpoint after another; all runs of a checkpoint decode a prompt together."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

from genctl import events
from genctl.commands.compare.options import CompareOptions, check_prompt_caches, runs_of, settled
from genctl.commands.compare.output import ComparedRuns, ComparisonOutput, SharedWork, heading
from genctl.commands.compare.view import Column, CompareView
from genctl.commands.engine_choice import LOCAL, SERVERS, EngineChoice
from genctl.commands.job import request_of, start_seed
from genctl.commands.old_job import OldJob as Job
from genctl.commands.options import SHOWN_TOP
from genctl.comparing import metrics
from genctl.comparing.outputs import ComparedPrompt, Failure, prompts_of
from genctl.config.dry import to_toml
from genctl.config.layers import Resolved
from genctl.config.sides import check, each, loaded_with
from genctl.engines.protocol import Engine, Flow, JobPlan, Report, Request
from genctl.errors import Exit, GenctlError, UsageError, extra, printable
from genctl.events.results import Collector, Result
from genctl.io.readers import all_rows
from genctl.io.rows import BadRow, InputRow, row_seed
from genctl.terminal import loading_line
from genctl.terminal.interrupt import Interrupt

LANES = 16  # decoded at once where nothing is live and no batch size is set


class RunLane(NamedTuple):
    """A lane: which run continues which prompt, and with which of its seeds."""

    prompt: ComparedPrompt
    run: int
    repetition: int
    guided: bool  # it reads a negative prompt, too


class CompareJob(Job[CompareOptions]):
    """One comparison: checkpoints one after another, on each all runs of a prompt at once."""

    def __init__(self, options: CompareOptions, interrupt: Interrupt, choice: EngineChoice = LOCAL) -> None:
        super().__init__(options, interrupt, choice)
        self.work = SharedWork()
        self.lanes: dict[str, RunLane] = {}  # those that are decoded now
        self.plans: dict[int, JobPlan] = {}  # how the engine does each run

    def prepare(self) -> int | None:
        """The runs, without the settings of their checkpoints; with --dry, print them with those."""
        options = self.options
        self.runs = runs_of(options)
        names = [run.name for run in self.runs]
        if options.baseline is not None and options.baseline not in names:
            raise UsageError(f"--baseline {options.baseline}: no run has this name; there are: {', '.join(names)}")
        self.base = options.baseline or names[0]
        check(self.runs)
        for run in self.runs:
            self.check_early(run.early)
        if not options.dry:
            return None
        self.resolved = settled(options, self.runs)
        sys.stdout.write(self._settings())
        return int(Exit.DONE)

    def _settings(self) -> str:
        """The settings of all runs as TOML, in which lines that begin with # name them."""
        each_run = zip(self.runs, self.resolved, strict=True)
        return "\n".join(f"# run {printable(run.name)}\n\n{to_toml(one, defaults=False)}" for run, one in each_run)

    def read_input(self, stack: ExitStack) -> bool:
        """Read the prompts and the settings of the checkpoints."""
        options = self.options
        if not super().read_input(stack):
            return False
        self.rows = all_rows(self.input)
        self.seeds = options.seeds or 1
        self.resolved = settled(options, self.runs)
        self.seed = start_seed(*self.resolved)
        self.starts = [self.seed if one.runtime.seed is None else one.runtime.seed for one in self.resolved]
        self.prompts = prompts_of(self.rows, options.references, len(self.runs), self.seeds)
        self.lone = len(self.rows) == 1
        self.texts = bool(options.arguments) or self.lone or options.verbose
        return True

    def open(self, stack: ExitStack) -> None:
        """Open the output, the event log and the view."""
        options = self.options
        self.open_consoles()
        self.live = options.on_screen and self.texts
        on_terminal = not options.to_file and options.format == "text" and self.out.is_terminal
        compared = ComparedRuns(
            [run.name for run in self.runs], self.base, self.resolved, self.prompts, self.seeds, self.seed, self.texts
        )
        sink = None if on_terminal else self.sink(stack, options.output)
        self.report = ComparisonOutput(self, compared, options, self.out, self.err, sink)
        self.listeners += [*self.sign_listeners(), self.note_prompt]
        if self.live and self.lone:
            self.show_prompt(self.rows[0])
        self.open_event_log(stack, options.events)
        total = len(self.rows) * len(self.runs) * self.seeds
        self.view = stack.enter_context(
            CompareView(self.out, self.err, live=self.live, quiet=options.quiet, total=total)
        )

    def deliver(self, stack: ExitStack) -> None:
        """Decode on each checkpoint in turn; write prompts and tables."""
        several = self.seeds > 1 or any(one.generation.num_return_sequences > 1 for one in self.resolved)
        if several and not metrics.is_installed():
            self.messages.note(f"self-BLEU is left out: it needs sacrebleu ({extra('metrics')})")
        sharing: dict[tuple[Any, ...], list[int]] = {}  # runs by the checkpoint that they share
        for place, one in enumerate(self.resolved):
            sharing.setdefault(loaded_with(one.runtime), []).append(place)
        for number, members in enumerate(sharing.values()):
            self._decode(members, last=number + 1 == len(sharing))
            if self.interrupt.status:  # what earlier checkpoints wrote is not lost
                self._write([prompt for prompt in self.prompts if prompt.begun])
                break
            self.close_engine()  # the next checkpoint needs its memory
        self.hide()
        if self.page is not None:
            self.page.settled(self._settings(), seed=self.seed, baseline=self.base)
        self.report.end(self.work)

    def _decode(self, members: Sequence[int], *, last: bool) -> None:
        """Decode all prompts with the runs of one checkpoint; after the last one, write them as they are done."""
        options = self.options
        engine = self._load(members)
        before = engine.done.passes
        usual = max(LANES // (len(members) * self.seeds), 1)
        step = 1 if self.live else min(engine.width(self.resolved[place], usual) for place in members)
        engine.use_threads(sum(self.plans[place].rows for place in members) * step * self.seeds)
        self.messages.detail(*engine.notes())
        if self.live and self.lone:
            loading_line.status("reading the prompt")
        self.interrupt.gentle = True
        top = SHOWN_TOP if options.report is not None else 0
        report = Report(top, True, watch=engine.watched(options.watch))
        for start in range(0, len(self.prompts), step):
            chunk = self.prompts[start : start + step]
            requests = [request for prompt in chunk for request in self._requests(engine, members, prompt)]
            self._show(chunk)
            self._stream(engine, members, requests, report)
            if last:
                self._write(chunk)
            if self.interrupt.status:
                break
        self.work.forwards += engine.done.passes - before
        self.messages.note(*self.reuse.notes(engine, verbose=options.verbose))
        self.interrupt.gentle = False

    def _load(self, members: Sequence[int]) -> Engine:
        """The checkpoint (or the servers) of these runs, each of which is checked on it."""
        runs, resolved = [self.runs[place] for place in members], self.resolved[members[0]]
        if resolved.runtime.backend is not None:
            engine = self.load_engine(resolved, choice=SERVERS, live=self.live)
        else:
            check_prompt_caches([(self.runs[place].name, self.resolved[place].runtime) for place in members])
            offline = any(self.resolved[place].runtime.offline for place in members)
            engine = self.load_engine(
                dataclasses.replace(resolved, runtime=dataclasses.replace(resolved.runtime, offline=offline)),
                runs[0].layers,
                on_event=self.view.feed,
                live=self.options.on_screen,
                need_tokenizer=not any(isinstance(row, InputRow) and row.prompt_ids is not None for row in self.rows),
            )
        engine.watched(self.options.watch)  # what is no token of this checkpoint is refused before decoding
        checked = each(runs, lambda run: self.settle(engine, run.layers, run.mode))
        for place, (own, plan) in zip(members, checked, strict=True):
            self.resolved[place], self.plans[place] = own, plan
            self.describe(own, plan, f"run {self.runs[place].name}: ")
        return engine

    def _requests(self, engine: Engine, members: Sequence[int], prompt: ComparedPrompt) -> list[Request]:
        """The lanes of one prompt. Those that look at hidden states come first: their prefill serves all others."""
        row = prompt.row
        if isinstance(row, BadRow):
            return []
        requests: list[tuple[bool, Request]] = []
        for place in members:
            base, name = self.resolved[place], self.runs[place].name
            try:
                resolved = self.settings_of(row, base)
                known = resolved is base or engine.about.remote
                hidden = (self.plans[place] if known else engine.plan(resolved)).reads_hidden
            except GenctlError as error:
                prompt.cells[place] = [Failure(error.code, error.message) for _ in range(self.seeds)]
                continue
            own = resolved.runtime.seed if "seed" in row.params else None
            for repetition in range(self.seeds):
                start = self.starts[place] if own is None else own
                seed = start if repetition == 0 else row_seed(start, f"seed {repetition}", repetition)
                seed = row_seed(seed, row.id, row.index) if own is None else seed
                lane = f"{name}/{quote(row.id, safe=' ')}/{seed}"
                guided = resolved.generation.guidance_scale not in (None, 1.0)
                self.lanes[lane] = RunLane(prompt, place, repetition, guided)
                prompt.lanes.setdefault(place, []).append(lane)
                requests.append((hidden, dataclasses.replace(request_of(row, resolved, seed, lane), run=place + 1)))
        return [request for _, request in sorted(requests, key=lambda pair: not pair[0])]

    def _stream(self, engine: Engine, members: Sequence[int], requests: Sequence[Request], report: Report) -> None:
        """Decode these requests, all lanes at once, so that each prompt is read once."""
        collector = Collector()

        def collect(event: events.Event) -> None:
            if isinstance(result := collector.feed(event), Result):
                self._take(result)

        def count_work(event: events.Event) -> None:
            if isinstance(event, (events.Prefilled, events.Finished)):
                lane = self.lanes[event.lane]
                self.work.feed(event, lane.prompt, guided=lane.guided)

        width = lanes = max(len(requests), 1)
        if engine.about.remote:
            width = min(engine.width(self.resolved[place], lanes) for place in members)
        counting = [] if engine.about.remote else [count_work, *self.reuse.listeners]
        flow = Flow(width, interrupted=self.interrupt, on_shortage=partial(self.messages.shortage, "lanes"))
        began = time.perf_counter()
        self.listen(engine.stream(requests, report, flow), [*self.listeners, *counting, self.view.feed, collect])
        self.work.decode_s += time.perf_counter() - began
        self.lanes.clear()

    def _take(self, result: Result) -> None:
        """Put a result into the cell of its lane."""
        lane = self.lanes[result.lane]
        for note in result.shortfalls(self.of(lane.prompt.row, f"run {self.runs[lane.run].name}")):
            self.messages.print(f"warning: {note}")
        error = result.error
        cell = result if error is None else Failure(error.code, error.message, error.hint)
        lane.prompt.cells[lane.run][lane.repetition] = cell

    def _show(self, chunk: Sequence[ComparedPrompt]) -> None:
        """Begin the columns of a prompt that is decoded alone."""
        if len(chunk) == 1:
            prompt, several = chunk[0], len(self.prompts) > 1
            text = prompt.row.shown if isinstance(prompt.row, InputRow) and not several else ""
            columns = [Column(run.name, tuple(prompt.lanes.get(place, ()))) for place, run in enumerate(self.runs)]
            self.view.begin(heading(prompt.row, self.out.width) if several else None, columns, text)

    def source_of(self, lane: str) -> tuple[InputRow, Resolved]:
        """The row of a lane that begins, and the settings of its run."""
        row = self.lanes[lane].prompt.row
        assert isinstance(row, InputRow)
        return row, self.resolved[self.lanes[lane].run]

    def _write(self, chunk: Sequence[ComparedPrompt]) -> None:
        """Write these prompts and forget their texts."""
        self.hide()
        for prompt in chunk:
            if isinstance(prompt.row, BadRow) and self.page is not None:
                self.page.failed(prompt.row.id, prompt.row.code, prompt.row.message)
            if isinstance(prompt.row, BadRow) or prompt.begun:
                self.failed += self.report.prompt(prompt)
                prompt.forget()
        self.view.forget()
