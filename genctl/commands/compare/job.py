"""`genctl compare`: checkpoints are loaded one after another; all runs of a checkpoint share the batch of a prompt."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

from genctl import events
from genctl.commands.compare.options import CompareOptions, check_prompt_caches, runs_of, settled
from genctl.commands.compare.output import ComparisonOutput, SharedWork, heading
from genctl.commands.compare.view import Column, CompareView
from genctl.commands.engine_choice import SERVERS
from genctl.commands.job import Job, check_early, end_loading_line, request_of, settings_of, settle, start_seed, started
from genctl.commands.options import SHOWN_TOP
from genctl.comparing import metrics
from genctl.comparing.outputs import ComparedPrompt, Failure, prompts_of
from genctl.config.layers import Resolved
from genctl.config.settings import to_toml
from genctl.config.sides import Side, check, each, loaded_with
from genctl.engines.protocol import Engine, Flow, JobPlan, Report, Request
from genctl.errors import Exit, GenctlError, UsageError, extra, printable
from genctl.events.results import Collector, Result
from genctl.io.readers import all_rows
from genctl.io.rows import BadRow, InputRow, row_seed
from genctl.terminal import loading_line
from genctl.terminal.console import make_consoles

LANES = 16  # decoded at once if there is no live view and no batch size is set


class RunLane(NamedTuple):
    """A lane: its prompt, its run, and the number of its seed."""

    prompt: ComparedPrompt
    run: int
    repetition: int
    reads: int  # prompts read at each step: 2 with guidance (the negative prompt), else 1


def compare(options: CompareOptions) -> int | None:
    """`genctl compare`."""
    with started(options) as job:
        runs = runs_of(options)
        names = [run.name for run in runs]
        if options.baseline is not None and options.baseline not in names:
            raise UsageError(f"--baseline {options.baseline}: no run has this name; there are: {', '.join(names)}")
        base = options.baseline or names[0]
        check(runs)
        for run in runs:
            check_early(run.early)
        if options.dry:
            sys.stdout.write(_settings(runs, settled(options, runs)))
            return int(Exit.DONE)

        input = job.read()
        if input is None:
            return None
        rows = all_rows(input)
        resolved = settled(options, runs)
        seed, seeds = start_seed(*resolved), options.seeds or 1
        prompts = prompts_of(rows, options.references, len(runs), seeds)
        job.single_prompt = len(rows) == 1

        with job.outputs() as stack:
            out, err = make_consoles(options.color)
            texts = bool(options.arguments) or job.single_prompt or options.verbose
            job.live = options.on_screen and texts
            on_terminal = not options.to_file and options.format == "text" and out.is_terminal
            sink = None if on_terminal else job.sink(stack, options.output)
            report = ComparisonOutput(job, options, names, base, resolved, seed, texts, out, err, sink)
            decoder = RunsDecoder(job, options, runs, resolved, prompts, seeds, seed)
            job.listeners += [*end_loading_line(), job.prompt_notes(decoder.source_of)]
            job.open_event_log(stack, options.events)
            total = len(rows) * len(runs) * seeds
            job.view = stack.enter_context(CompareView(out, err, live=job.live, quiet=options.quiet, total=total))

            several = seeds > 1 or any(one.generation.num_return_sequences > 1 for one in resolved)
            if several and not metrics.is_installed():
                job.messages.note(f"self-BLEU is left out: it needs sacrebleu ({extra('metrics')})")
            sharing: dict[tuple[Any, ...], list[int]] = {}  # checkpoint -> its runs
            for place, one in enumerate(resolved):
                sharing.setdefault(loaded_with(one.runtime), []).append(place)
            for number, members in enumerate(sharing.values(), 1):
                for chunk in decoder.chunks(members):
                    if number == len(sharing):  # all runs of these prompts are done
                        _write(job, report, chunk)
                if job.interrupt.status:  # interrupted: keep the texts of earlier checkpoints
                    _write(job, report, [prompt for prompt in prompts if prompt.begun])
                    break
                job.close_engine()  # free its memory for the next checkpoint
            job.hide()
            if job.page is not None:
                job.page.settled(_settings(runs, resolved), seed=seed, baseline=base)
            report.end(decoder.work)
        return job.status()


def _settings(runs: Sequence[Side], resolved: Sequence[Resolved]) -> str:
    """The settings of all runs as TOML; a comment line names each run."""
    each_run = zip(runs, resolved, strict=True)
    return "\n".join(f"# run {printable(run.name)}\n\n{to_toml(one, defaults=False)}" for run, one in each_run)


def _write(job: Job, report: ComparisonOutput, prompts: Sequence[ComparedPrompt]) -> None:
    """Write these prompts and free their results."""
    job.hide()
    for prompt in prompts:
        if isinstance(prompt.row, BadRow) and job.page is not None:
            job.page.failed(prompt.row.id, prompt.row.code, prompt.row.message)
        if isinstance(prompt.row, BadRow) or prompt.begun:
            job.failed += report.prompt(prompt)
            prompt.forget()
    job.view.forget()


@dataclass
class RunsDecoder:
    """Decodes prompts with the runs of one checkpoint after another."""

    job: Job
    options: CompareOptions
    runs: Sequence[Side]
    resolved: list[Resolved]  # updated with a checkpoint's own settings when it is loaded
    prompts: Sequence[ComparedPrompt]
    seeds: int  # repetitions of each run
    seed: int  # of the comparison
    work: SharedWork = field(default_factory=SharedWork)
    lanes: dict[str, RunLane] = field(default_factory=dict)  # lanes being decoded, by name
    plans: dict[int, JobPlan] = field(default_factory=dict)  # the engine's plan for each run

    def source_of(self, lane: str) -> tuple[InputRow, Resolved]:
        """The row of a lane, and the settings of its run."""
        row = self.lanes[lane].prompt.row
        assert isinstance(row, InputRow)
        return row, self.resolved[self.lanes[lane].run]

    def chunks(self, members: Sequence[int]) -> Iterator[Sequence[ComparedPrompt]]:
        """Decode all prompts with the runs of one checkpoint, several at a time; yields them when done."""
        options, live = self.options, self.job.live
        engine = self._load(members)
        before = engine.done.passes
        usual = max(LANES // (len(members) * self.seeds), 1)
        step = 1 if live else min(engine.width(self.resolved[place], usual) for place in members)
        engine.use_threads(sum(self.plans[place].rows for place in members) * step * self.seeds)
        self.job.messages.detail(*engine.notes())
        if live and self.job.single_prompt:
            loading_line.status("reading the prompt")
        self.job.interrupt.gentle = True
        top = SHOWN_TOP if options.report is not None else 0
        report = Report(top, True, watch=engine.watched(options.watch))
        for start in range(0, len(self.prompts), step):
            chunk = self.prompts[start : start + step]
            requests = [request for prompt in chunk for request in self._requests(engine, members, prompt)]
            if len(chunk) == 1:
                title = heading(chunk[0].row, self.job.view.out.width) if len(self.prompts) > 1 else None
                lanes = [tuple(chunk[0].lanes.get(place, ())) for place in range(len(self.runs))]
                self.job.view.begin(title, [Column(run.name, own) for run, own in zip(self.runs, lanes, strict=True)])
            self._stream(engine, members, requests, report)
            yield chunk
            if self.job.interrupt.status:
                break
        self.work.forwards += engine.done.passes - before
        self.job.messages.note(*self.job.reuse.notes(engine, verbose=options.verbose))
        self.job.interrupt.gentle = False

    def _load(self, members: Sequence[int]) -> Engine:
        """Load the checkpoint (or connect to the servers) of these runs, and check each run against it."""
        runs, resolved = [self.runs[place] for place in members], self.resolved[members[0]]
        if resolved.runtime.backend is not None:
            engine = self.job.load_engine(resolved, choice=SERVERS, live=self.job.live)
        else:
            check_prompt_caches([(self.runs[place].name, self.resolved[place].runtime) for place in members])
            offline = any(self.resolved[place].runtime.offline for place in members)
            rows = [prompt.row for prompt in self.prompts]
            engine = self.job.load_engine(
                replace(resolved, runtime=replace(resolved.runtime, offline=offline)),
                runs[0].layers,
                on_event=self.job.view.feed,
                live=self.options.on_screen,
                need_tokenizer=not any(isinstance(row, InputRow) and row.prompt_ids is not None for row in rows),
            )
        engine.watched(self.options.watch)  # refuse, before decoding, texts that are no token of this checkpoint
        checked = each(runs, lambda run: settle(engine, run.layers, run.mode))
        for place, (own, plan) in zip(members, checked, strict=True):
            self.resolved[place], self.plans[place] = own, plan
            self.job.describe(own, plan, f"run {self.runs[place].name}: ")
        return engine

    def _requests(self, engine: Engine, members: Sequence[int], prompt: ComparedPrompt) -> list[Request]:
        """The lanes of one prompt. Those that use hidden states come first: their prefill serves all others."""
        row = prompt.row
        if isinstance(row, BadRow):
            return []
        requests: list[tuple[bool, Request]] = []
        for place in members:
            base, name = self.resolved[place], self.runs[place].name
            try:
                resolved = settings_of(row, base)
                known = resolved is base or engine.about.remote
                hidden = (self.plans[place] if known else engine.plan(resolved)).reads_hidden
            except GenctlError as error:
                prompt.cells[place] = [Failure(error.code, error.message) for _ in range(self.seeds)]
                continue
            own = resolved.runtime.seed if "seed" in row.params else None
            start = next(one for one in (own, base.runtime.seed, self.seed) if one is not None)
            for repetition in range(self.seeds):
                seed = start if repetition == 0 else row_seed(start, f"seed {repetition}", repetition)
                seed = row_seed(seed, row.id, row.index) if own is None else seed
                lane = f"{name}/{quote(row.id, safe=' ')}/{seed}"
                reads = 1 if resolved.generation.guidance_scale in (None, 1.0) else 2
                self.lanes[lane] = RunLane(prompt, place, repetition, reads)
                prompt.lanes.setdefault(place, []).append(lane)
                requests.append((hidden, replace(request_of(row, resolved, seed, lane), run=place + 1)))
        return [request for _, request in sorted(requests, key=lambda pair: not pair[0])]

    def _stream(self, engine: Engine, members: Sequence[int], requests: Sequence[Request], report: Report) -> None:
        """Decode these requests, all lanes at once, so each prompt is read once."""
        collector = Collector()

        def collect(event: events.Event) -> None:
            if not isinstance(result := collector.feed(event), Result):
                return
            lane, error = self.lanes[result.lane], result.error
            for note in result.shortfalls(self.job.row_label(lane.prompt.row, f"run {self.runs[lane.run].name}")):
                self.job.messages.print(f"warning: {note}")
            cell = result if error is None else Failure(error.code, error.message, error.hint)
            lane.prompt.cells[lane.run][lane.repetition] = cell

        def count_work(event: events.Event) -> None:
            if isinstance(event, events.Finished):
                self.work.alone += event.forwards * self.lanes[event.lane].reads
            elif isinstance(event, events.Prefilled):
                self.work.lanes += 1
                self.work.prefills += not event.shared
                self.work.alone += self.lanes[event.lane].reads * event.shared

        width = lanes = max(len(requests), 1)
        if engine.about.remote:
            width = min(engine.width(self.resolved[place], lanes) for place in members)
        counting = [] if engine.about.remote else [count_work, *self.job.reuse.listeners]
        flow = Flow(width, interrupted=self.job.interrupt, on_shortage=partial(self.job.messages.shortage, "lanes"))
        began = time.perf_counter()
        listeners = [*self.job.listeners, *counting, self.job.view.feed, collect]
        self.job.listen(engine.stream(requests, report, flow), listeners, self.source_of)
        self.work.decode_s += time.perf_counter() - began
        self.lanes.clear()
