"""`genctl compare` at work: one checkpoint after another; all runs of a checkpoint decode a prompt together."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from urllib.parse import quote

from genctl import events
from genctl.commands.compare import expectations
from genctl.commands.compare.options import CompareOptions, check_prompt_caches, check_servers, runs_of, settled
from genctl.commands.compare.output import ComparedRuns, ComparisonOutput, SharedWork, heading
from genctl.commands.compare.view import Column, CompareView
from genctl.commands.engine_choice import LOCAL, SERVERS, EngineChoice
from genctl.commands.job import Job, request_of, start_seed
from genctl.commands.options import SHOWN_TOP
from genctl.comparing import metrics
from genctl.comparing.outputs import Cell, ComparedPrompt, Failure, prompts_of
from genctl.config.dry import to_toml
from genctl.config.layers import Resolved
from genctl.config.sides import Side, check, each, loaded_with
from genctl.engines.protocol import Engine, Flow, JobPlan, Report, Request
from genctl.errors import CheckError, Exit, GenctlError, InputError, UsageError, extra, printable
from genctl.events.results import Collector, Result
from genctl.identity import versions
from genctl.io.readers import all_rows
from genctl.io.rows import BadRow, InputRow, row_seed
from genctl.terminal import first_sign
from genctl.terminal.interrupt import Interrupt

LANES = 16  # decoded at once where nothing is live and no batch size is set
TOP = 20  # alternatives kept with --expect, to report how probable an old token is now


class CompareJob(Job[CompareOptions]):
    """One comparison: checkpoints one after another, on each all runs of a prompt at once."""

    def __init__(self, options: CompareOptions, interrupt: Interrupt, choice: EngineChoice = LOCAL) -> None:
        super().__init__(options, interrupt, choice)
        self.recording = None if options.expect is None else expectations.read(options.expect)
        self.saved = SharedWork()
        self.versions = versions("torch", "transformers")
        self.checkpoints: dict[str, str] = {}
        self.records: list[dict[str, Any]] = []  # kept for --save and --expect
        self.lanes: dict[str, tuple[ComparedPrompt, int, int]] = {}  # live ones: prompt, run, repetition
        self.plans: dict[int, JobPlan] = {}  # how the engine does each run

    def prepare(self) -> int | None:
        """The runs, without the settings of their checkpoints; with --dry, print them with those."""
        options = self.options
        self.runs = runs_of(options, self.recording)
        names = [run.name for run in self.runs]
        if options.baseline is not None and options.baseline not in names:
            raise UsageError(f"--baseline {options.baseline}: no run has this name; there are: {', '.join(names)}")
        self.base = options.baseline or names[0]
        check(self.runs)
        check_servers(options, self.runs)
        for run in self.runs:
            self.check_early(run.early)
        if not options.dry:
            return None
        resolved = zip(names, settled(options, self.runs), strict=True)
        sys.stdout.write(
            "\n".join(f"# run {printable(name)}\n\n{to_toml(one, defaults=False)}" for name, one in resolved)
        )
        return int(Exit.DONE)

    def read(self, stack: ExitStack) -> bool:
        """Read the prompts, or take those of the recording."""
        options, recording = self.options, self.recording
        if recording is not None and not options.arguments and options.input is None:
            if options.input_format is not None:
                raise UsageError(f"--input-format {options.input_format}: the prompts come from {options.expect}")
            if options.template is not None:
                raise UsageError(f"--template: the prompts come from {options.expect}, where they are made already")
            self.input = recording.rows(options.expect or "")
        elif not super().read(stack):
            return False
        self.rows = all_rows(self.input)
        bad = next((row for row in self.rows if isinstance(row, BadRow)), None)
        if options.save is not None and bad is not None:
            raise InputError(f"--save records prompts that can be used: {bad.message}")
        self.seeds = options.seeds or (recording.seeds if recording is not None else 1)
        self.resolved = settled(options, self.runs)
        self.seed = start_seed(*self.resolved)
        self.starts = [self.seed if one.runtime.seed is None else one.runtime.seed for one in self.resolved]
        self.prompts = prompts_of(self.rows, options.references, len(self.runs), self.seeds)
        self.lone = len(self.rows) == 1
        self.texts = bool(options.arguments) or len(self.rows) == 1 or options.verbose
        return True

    def open(self, stack: ExitStack) -> None:
        """Open the output, the recording, the event log and the view."""
        options = self.options
        self.open_consoles()
        self.live = options.on_screen and self.recording is None and self.texts
        total = len(self.rows) * len(self.runs) * self.seeds
        sink = saved = None
        if options.output not in (None, "-") or options.format != "text" or not self.out.is_terminal:
            sink = self.sink(stack, options.output)
        if options.save is not None:
            saved = self.sink(stack, options.save, at_once=True)
        compared = ComparedRuns(
            [run.name for run in self.runs], self.base, self.resolved, self.prompts, self.seeds, self.seed, self.texts
        )
        self.report, self.saved_to = ComparisonOutput(self, compared, options, self.out, self.err, sink), saved
        self.listeners += [*self.sign_listeners(), self.note_prompt]
        if self.live and self.lone:
            self.show_prompt(self.rows[0])
        self.open_event_log(stack, options.events)
        view = CompareView(self.out, self.err, live=self.live, quiet=options.quiet, total=total)
        self.view = stack.enter_context(view)

    def deliver(self, stack: ExitStack) -> None:
        """Decode on each checkpoint in turn; write prompts, tables and the recording."""
        several = self.seeds > 1 or any(one.generation.num_return_sequences > 1 for one in self.resolved)
        if several and not metrics.is_installed():
            self.messages.note(f"self-BLEU is left out: it needs sacrebleu ({extra('metrics')})")
        self._decode()
        self.hide()
        if self.page is not None:
            each = zip(self.runs, self.resolved, strict=True)
            settings = "\n".join(f"# run {run.name}\n\n{to_toml(one, defaults=False)}" for run, one in each)
            self.page.settled(settings, seed=self.seed, baseline=self.base)
        self.report.end(self.saved)
        if self.saved_to is not None and not self.interrupt.status:
            self.saved_to.write(self._recording().encode())
            self.saved_to.close()
        if self.recording is not None and not self.interrupt.status:
            self._compare(self.recording)
        self.report.finish()

    # -- decoding ------------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        groups: dict[tuple[Any, ...], list[int]] = {}
        for place, one in enumerate(self.resolved):
            groups.setdefault(loaded_with(one.runtime), []).append(place)
        for number, members in enumerate(groups.values()):
            last = number + 1 == len(groups)
            engine = self._load(members)
            before = engine.done.passes
            usual = max(LANES // (len(members) * self.seeds), 1)
            step = 1 if self.live else min(engine.width(self.resolved[place], usual) for place in members)
            engine.use_threads(sum(self.plans[place].rows for place in members) * step * self.seeds)
            self.messages.detail(*engine.notes())
            if self.live and self.lone:
                first_sign.status("reading the prompt")
            self.interrupt.gentle = True
            for start in range(0, len(self.prompts), step):
                chunk = self.prompts[start : start + step]
                self._stream(engine, members, chunk)
                if last:
                    self._settle(chunk)
                if self.interrupt.status:
                    break
            self.saved.forwards += engine.done.passes - before
            self.messages.note(*self.reuse.notes(engine, verbose=self.options.verbose))
            self.interrupt.gentle = False
            if self.interrupt.status:  # what earlier checkpoints wrote is not lost
                self._settle([prompt for prompt in self.prompts if prompt.begun])
                return
            self.close_engine()
            del engine  # the next checkpoint needs its memory

    def _load(self, members: Sequence[int]) -> Engine:
        """The checkpoint (or the servers) of these runs, each of which is checked on it."""
        runs = [self.runs[place] for place in members]
        engine = self._opened(members, runs[0])
        engine.watched(self.options.watch)  # what is no token of this checkpoint is refused before decoding
        settled = each(runs, lambda run: self.settle(engine, run.layers, run.mode))
        for place, (resolved, plan) in zip(members, settled, strict=True):
            self.resolved[place], self.plans[place] = resolved, plan
            self.describe(resolved, plan, f"run {self.runs[place].name}: ")
        return engine

    def _opened(self, members: Sequence[int], first: Side) -> Engine:
        options, resolved = self.options, self.resolved[members[0]]
        if resolved.runtime.backend is not None:
            return self.load_engine(resolved, choice=SERVERS, live=self.live)
        check_prompt_caches([(self.runs[place].name, self.resolved[place].runtime) for place in members])
        offline = any(self.resolved[place].runtime.offline for place in members)
        engine = self.load_engine(
            dataclasses.replace(resolved, runtime=dataclasses.replace(resolved.runtime, offline=offline)),
            first.layers,
            on_event=self.view.feed,
            live=self.options.on_screen,
            need_tokenizer=not any(isinstance(row, InputRow) and row.prompt_ids is not None for row in self.rows),
        )
        if options.save is not None or options.expect is not None:
            self.checkpoints[engine.about.name] = engine.fingerprints()[engine.about.name]
        return engine

    def _stream(self, engine: Engine, members: Sequence[int], chunk: Sequence[ComparedPrompt]) -> None:
        """Decode these prompts with these runs, all lanes at once, so that each prompt is read once."""
        requests = [request for prompt in chunk for request in self._requests(engine, members, prompt)]
        self._show(chunk)
        collector = Collector()
        watched = engine.watched(self.options.watch)
        top = TOP if self.recording is not None else SHOWN_TOP if self.options.report is not None else 0
        report = Report(top, True, watch=watched)
        began = time.perf_counter()
        lanes = max(len(requests), 1)
        width = lanes  # so that each prompt is read once
        if engine.about.remote:
            width = min(engine.width(self.resolved[place], lanes) for place in members)

        def collect(event: events.Event) -> None:
            if (result := collector.feed(event)) is not None:
                self._take(result)

        flow = Flow(width, interrupted=self.interrupt, on_shortage=partial(self.messages.shortage, "lanes"))
        shared = [self.saved.feed, *self.reuse.listeners] if not engine.about.remote else []
        self.listen(engine.stream(requests, report, flow), [*self.listeners, *shared, self.view.feed, collect])
        self.saved.decode_s += time.perf_counter() - began
        self.lanes.clear()
        self.saved.forget()

    def _take(self, result: Result) -> None:
        prompt, run, repetition = self.lanes.pop(result.lane)
        for note in result.shortfalls(self.of(prompt.row, f"run {self.runs[run].name}")):
            self.messages.say(f"warning: {note}")
        failure = result.error
        prompt.cells[run][repetition] = (
            result if failure is None else Failure(failure.code, failure.message, failure.hint)
        )

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
                failure: Cell = Failure(error.code, error.message)
                prompt.cells[place] = [failure] * self.seeds
                continue
            own = resolved.runtime.seed if "seed" in row.params else None
            for repetition in range(self.seeds):
                start = self.starts[place] if own is None else own
                seed = start if repetition == 0 else row_seed(start, f"seed {repetition}", repetition)
                seed = row_seed(seed, row.id, row.index) if own is None else seed
                lane = f"{name}/{quote(row.id, safe=' ')}/{seed}"
                self.lanes[lane] = prompt, place, repetition
                prompt.lanes.setdefault(place, []).append(lane)
                self.saved.expect(lane, row.id, guided=resolved.generation.guidance_scale not in (None, 1.0))
                requests.append((hidden, dataclasses.replace(request_of(row, resolved, seed, lane), run=place + 1)))
        return [request for _, request in sorted(requests, key=lambda pair: not pair[0])]

    def _show(self, chunk: Sequence[ComparedPrompt]) -> None:
        if len(chunk) == 1:
            prompt = chunk[0]
            several = len(self.prompts) > 1
            text = prompt.row.shown if isinstance(prompt.row, InputRow) and not several else ""
            columns = [Column(run.name, tuple(prompt.lanes.get(place, ()))) for place, run in enumerate(self.runs)]
            self.view.begin(heading(prompt.row, self.out.width) if several else None, columns, text)

    def source_of(self, lane: str) -> tuple[InputRow, Resolved]:
        """The row of a lane that begins, and the settings of its run."""
        prompt, run, _ = self.lanes[lane]
        assert isinstance(prompt.row, InputRow)
        return prompt.row, self.resolved[run]

    def _settle(self, chunk: Sequence[ComparedPrompt]) -> None:
        self.hide()
        for prompt in chunk:
            if isinstance(prompt.row, BadRow) and self.page is not None:
                self.page.failed(prompt.row.id, prompt.row.code, prompt.row.message)
            if isinstance(prompt.row, BadRow) or prompt.begun:
                self.failed += self.report.prompt(prompt)
                if self.options.save is not None or self.recording is not None:
                    self.records += self.report.full(prompt)
                prompt.forget()
        self.view.forget()

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _run_entries(self) -> list[dict[str, Any]]:
        each = zip(self.runs, self.resolved, self.starts, strict=True)
        return [expectations.run_entry(run.name, resolved, seed) for run, resolved, seed in each]

    def _recording(self) -> expectations.Recording:
        prompts = [
            expectations.prompt_entry(prompt.row, prompt.references)
            for prompt in self.prompts
            if isinstance(prompt.row, InputRow)
        ]
        parts = (tuple(self._run_entries()), tuple(prompts), tuple(self.records))
        return expectations.Recording(self.seed, self.seeds, self.versions, self.checkpoints, *parts)

    def _compare(self, recording: expectations.Recording) -> None:
        """Compare with what --expect read, and write the differences."""
        tolerance = expectations.TOLERANCE if self.options.tolerance is None else self.options.tolerance
        outcome = expectations.compare(recording.records, self.records, tolerance)
        changed = [] if not outcome.differences else expectations.changed_settings(recording.runs, self._run_entries())
        notes = expectations.notes(recording, self.checkpoints, self.versions)
        self.report.compared(outcome, [*changed, *notes])
        self.differing, self.compared = len(outcome.differences), outcome.compared

    def status(self) -> int:
        """The exit status. Raises CheckError where --expect is not met."""
        if self.recording is None or self.interrupt.status:
            return super().status()
        if self.differing:
            raise CheckError(
                f"--expect {self.options.expect}: {self.differing} of {self.compared} outputs "
                f"{'is' if self.differing == 1 else 'are'} not as recorded",
                hint="--save FILE --force records them as they are now",
            )
        return int(Exit.DONE)
