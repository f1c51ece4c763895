"""`genctl compare` at work: one checkpoint after another; all runs of a checkpoint decode a prompt together."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from genctl import events
from genctl.batch.rows import BadRow, InputRow
from genctl.batch.seeds import random_seed, row_seed
from genctl.cli import notes
from genctl.cli.compare_options import CompareOptions, dry, each, naming, rows_of, runs_of, settled
from genctl.cli.inputs import is_terminal
from genctl.cli.interrupt import Interrupt
from genctl.cli.job import Job, request_of
from genctl.cli.shortfall import shortfalls
from genctl.comparing import expectations, references
from genctl.comparing.outputs import Cell, ComparedPrompt, Failure
from genctl.comparing.runs import RunSpec, checkpoint_of
from genctl.config.dry import settings_of
from genctl.config.layers import Resolved
from genctl.errors import CheckError, Exit, GenctlError, InputError, UsageError
from genctl.results import Collector, Result

if TYPE_CHECKING:
    from genctl.requests import Request
    from genctl.session import Session

LANES = 16  # decoded at once where nothing is live and no batch size is set
TOP = 20  # alternatives kept with --expect, to report how probable an old token is now


@dataclass
class Saved:
    """What sharing prefills and forward passes saved."""

    forwards: int = 0  # that were run
    alone: int = 0  # that the texts would take one by one
    prefills: int = 0
    lanes: int = 0
    prefill_s: float = 0.0  # spent
    spared_s: float = 0.0  # that further prefills of the same prompts would take
    decode_s: float = 0.0


def perform(options: CompareOptions) -> int | None:
    """Do what the options say. Returns the exit status, or None if there is no prompt."""
    recording = None if options.expect is None else expectations.read(options.expect)
    runs = runs_of(options, recording)
    if options.baseline is not None and options.baseline not in [run.name for run in runs]:
        names = ", ".join(run.name for run in runs)
        raise UsageError(f"--baseline {options.baseline}: no run has this name; there are: {names}")
    early = each(runs, RunSpec.early)
    if options.dry:
        return dry(options, runs, early)
    rows = rows_of(options, recording)
    if rows is None:
        return None
    with Interrupt() as interrupt:
        return CompareJob(options, runs, early, rows, recording, interrupt).run()


class CompareJob(Job[CompareOptions]):
    """One comparison: checkpoints one after another, on each all runs of a prompt at once."""

    def __init__(
        self,
        options: CompareOptions,
        runs: Sequence[RunSpec],
        early: Sequence[Resolved],
        rows: list[InputRow | BadRow],
        recording: expectations.Recording | None,
        interrupt: Interrupt,
    ) -> None:
        super().__init__(options, interrupt)
        self.runs, self.rows, self.recording = runs, rows, recording
        self.saved = Saved()
        self.checkpoints: dict[str, str] = {}
        self.records: list[dict[str, Any]] = []  # kept for --save and --expect
        self.lanes: dict[str, tuple[ComparedPrompt, int, int]] = {}  # live ones: prompt, run, repetition
        self.guided: set[str] = set()  # lanes that also read a negative prompt
        self.hidden: dict[int, bool] = {}  # whether a run looks at hidden states
        self.shared: set[str] = set()  # lanes that began from another lane's prefill
        self.prefill_of: dict[str, float] = {}  # seconds, by prompt
        self.cuts: set[str] = set()  # notes of prompts that were cut
        self.seeds = options.seeds or (recording.seeds if recording is not None else 1)
        self.resolved = settled(options, runs, early)
        self.base = options.baseline or runs[0].name
        given = next((one.runtime.seed for one in self.resolved if one.runtime.seed is not None), None)
        self.seed = random_seed() if given is None else given
        self.starts = [self.seed if one.runtime.seed is None else one.runtime.seed for one in self.resolved]
        self.prompts = self._prompts()
        self.lone = len(rows) == 1
        self.texts = bool(options.arguments) or len(rows) == 1 or options.verbose

    def open(self, stack: ExitStack) -> None:
        """Open the output, the recording, the event log and the view."""
        from genctl.cli.compare_output import ComparisonOutput
        from genctl.render.compare_view import CompareView

        options = self.options
        self.open_consoles()
        plain = options.format == "text" and self.recording is None
        self.live = plain and options.output is None and self.texts and is_terminal(sys.stdout)
        total = len(self.rows) * len(self.runs) * self.seeds
        sink = saved = None
        if options.output not in (None, "-") or options.format != "text" or not self.out.is_terminal:
            force = options.force and options.output is not None
            sink = self.sink(stack, options.output, force=force, stdout=sys.stdout)
        if options.save is not None:
            saved = self.sink(stack, options.save, force=options.force)
        self.output, self.saved_to = ComparisonOutput(self, options, self.out, self.err, sink), saved
        self.listeners.append(self._note_cut)
        self.open_event_log(stack, options.events, force=options.force)
        view = CompareView(self.out, self.err, live=self.live, quiet=options.quiet, total=total)
        self.view = stack.enter_context(view)

    def deliver(self, stack: ExitStack) -> None:
        """Decode on each checkpoint in turn; write prompts, tables and the recording."""
        self._decode()
        self.hide()
        self.output.end(self.saved)
        if self.saved_to is not None and not self.interrupt.status:
            self.saved_to.write(self._recording().encode())
            self.saved_to.close()
        if self.recording is not None and not self.interrupt.status:
            self._compare(self.recording)
        self.output.finish()

    def _prompts(self) -> list[ComparedPrompt]:
        """The prompts with their references. Raises InputError where references do not fit."""
        given = None
        if self.options.references is not None:
            given = references.read(self.options.references, len(self.rows))
        prompts = []
        for place, row in enumerate(self.rows):
            own: Any = [] if isinstance(row, BadRow) else row.extra.get("reference", [])
            known = [own] if isinstance(own, str) else list(own)
            if given is not None:
                if known:
                    raise InputError(f"{row.where} has a reference, and so has line {place + 1} of --references")
                known = [given[place]]
            prompts.append(ComparedPrompt(row, tuple(known), [[None] * self.seeds for _ in self.runs]))
        return prompts

    # -- decoding ------------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        groups: dict[tuple[Any, ...], list[int]] = {}
        for place, one in enumerate(self.resolved):
            groups.setdefault(checkpoint_of(one), []).append(place)
        for number, members in enumerate(groups.values()):
            last = number + 1 == len(groups)
            session = self._load(members)
            before = session.forward.forwards
            usual = max(LANES // (len(members) * self.seeds), 1)
            step = 1 if self.live else min(session.width(self.resolved[place], usual) for place in members)
            self.interrupt.gentle = True
            for start in range(0, len(self.prompts), step):
                chunk = self.prompts[start : start + step]
                self._stream(session, members, chunk)
                if last:
                    self._settle(chunk)
                if self.interrupt.status:
                    break
            self.saved.forwards += session.forward.forwards - before
            self.note(*self.reuse.notes(session, verbose=self.options.verbose))
            self.interrupt.gentle = False
            if self.interrupt.status:  # what earlier checkpoints wrote is not lost
                self._settle([prompt for prompt in self.prompts if prompt.begun])
                return
            del session  # the next checkpoint needs its memory

    def _load(self, members: Sequence[int]) -> Session:
        """The checkpoint of these runs, each of which is checked on it."""
        options = self.options
        self._check_saved(members)
        offline = any(self.resolved[place].runtime.offline for place in members)
        session = self.load_session(
            dataclasses.replace(self.resolved[members[0]].runtime, offline=offline),
            self.runs[members[0]].layers,
            on_event=self.view.feed,
            need_tokenizer=not any(isinstance(row, InputRow) and row.prompt_ids is not None for row in self.rows),
        )
        if options.save is not None or options.expect is not None:
            self.checkpoints[session.loaded.name] = session.loaded.fingerprint()
        self.detail(*session.loaded.verbose_notes)
        session.watched(options.watch)  # what is no token of this checkpoint is refused before anything is decoded
        for place in members:
            name = self.runs[place].name
            with naming(self.runs[place]):
                self.resolved[place] = resolved = self.settle(session, self.runs[place].layers)
                self.hidden[place] = session.reads_hidden(resolved)
            self.detail(*(f"run {name}: {line}" for line in resolved.notes))
            about = (*resolved.notices, *notes.cache_notes(session, resolved))
            self.note(*(f"run {name}: {line}" for line in about))
        return session

    def _check_saved(self, members: Sequence[int]) -> None:
        """Raises UsageError where runs that read a prompt together name different prompt caches."""
        first = members[0]
        for place in members[1:]:
            mine, other = (self.resolved[one].runtime.prompt_cache for one in (first, place))
            if mine != other:
                raise UsageError(
                    f"run {self.runs[first].name}: prompt_cache = {mine or 'none'}, run {self.runs[place].name}: "
                    f"prompt_cache = {other or 'none'}; runs of one checkpoint read a prompt once, for all of them",
                    hint="give --prompt-cache on the command line: it holds for every run",
                )

    def _stream(self, session: Session, members: Sequence[int], chunk: Sequence[ComparedPrompt]) -> None:
        """Decode these prompts with these runs, all lanes at once, so that each prompt is read once."""
        from genctl.requests import Report

        requests = [request for prompt in chunk for request in self._requests(session, members, prompt)]
        self._show(chunk)
        collector = Collector()
        watched = session.watched(self.options.watch)
        report = Report(TOP if self.recording is not None else 0, True, watch=watched)
        began = time.perf_counter()
        width = max(len(requests), 1)

        def shortage(fewer: int) -> None:
            self.say(f"note: not enough memory for {width} lanes at once, going on with {fewer}")

        def collect(event: events.Event) -> None:
            if (result := collector.feed(event)) is not None:
                self._take(result)

        stream = session.stream(requests, report, width=width, interrupted=self.interrupt, on_shortage=shortage)
        self.listen(stream, [*self.listeners, self._count, self.reuse.feed, self.view.feed, collect])
        self.saved.decode_s += time.perf_counter() - began
        for of_chunk in (self.lanes, self.guided, self.shared, self.prefill_of):
            of_chunk.clear()

    def _take(self, result: Result) -> None:
        prompt, run, repetition = self.lanes.pop(result.lane)
        for note in shortfalls(result, self.of(prompt.row, f"run {self.runs[run].name}")):
            self.say(f"warning: {note}")
        failure = result.error
        prompt.cells[run][repetition] = result if failure is None else Failure(failure.code, failure.message)

    def _requests(self, session: Session, members: Sequence[int], prompt: ComparedPrompt) -> list[Request]:
        """The lanes of one prompt. Those that look at hidden states come first: their prefill serves all others."""
        row = prompt.row
        if isinstance(row, BadRow):
            return []
        requests: list[tuple[bool, Request]] = []
        for place in members:
            base, name = self.resolved[place], self.runs[place].name
            try:
                resolved = self.settings_of(row, base)
                hidden = self.hidden[place] if resolved is base else session.reads_hidden(resolved)
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
                if resolved.generation.guidance_scale not in (None, 1.0):
                    self.guided.add(lane)
                requests.append((hidden, request_of(row, resolved, seed, lane)))
        return [request for _, request in sorted(requests, key=lambda pair: not pair[0])]

    def _show(self, chunk: Sequence[ComparedPrompt]) -> None:
        from genctl.cli.compare_output import heading
        from genctl.render.compare_view import Column

        if len(chunk) == 1:
            prompt = chunk[0]
            several = len(self.prompts) > 1
            columns = [Column(run.name, tuple(prompt.lanes.get(place, ()))) for place, run in enumerate(self.runs)]
            self.view.begin(heading(prompt.row, self.out.width) if several else None, columns)

    def _count(self, event: events.Event) -> None:
        """Count what was spent, and what the lanes would have taken one by one."""
        if isinstance(event, events.Prefilled):
            key = self.lanes[event.lane][0].row.id
            self.saved.lanes += 1
            if event.shared:
                self.shared.add(event.lane)
                self.saved.spared_s += self.prefill_of.get(key, 0.0)
            else:
                self.saved.prefills += 1
                self.saved.prefill_s += event.seconds
                self.prefill_of[key] = event.seconds
        elif isinstance(event, events.Finished):
            passes = event.forwards + (event.lane in self.shared)
            # a negative prompt is read once more at each step, by this lane alone
            self.saved.alone += passes * (2 if event.lane in self.guided else 1)

    def _note_cut(self, event: events.Event) -> None:
        """Note a prompt that was cut, once for all runs that read it alike."""
        if not isinstance(event, events.Began):
            return
        prompt, run, _ = self.lanes[event.lane]
        assert isinstance(prompt.row, InputRow)
        note = notes.cut_note(event, prompt.row, self.resolved[run].runtime)
        line = f"note: {self.of(prompt.row)}{note}"
        if note and line not in self.cuts:
            self.cuts.add(line)
            self.say(line)

    def _settle(self, chunk: Sequence[ComparedPrompt]) -> None:
        self.hide()
        for prompt in chunk:
            if isinstance(prompt.row, BadRow) or prompt.begun:
                self.failed += self.output.prompt(prompt)
                if self.options.save is not None or self.recording is not None:
                    self.records += self.output.full(prompt)
                prompt.forget()
        self.view.forget()

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _recording(self) -> expectations.Recording:
        runs = [
            {
                "name": run.name,
                "settings": expectations.settings_given(resolved, seed),
                "resolved": {**settings_of(resolved), "seed": seed},
            }
            for run, resolved, seed in zip(self.runs, self.resolved, self.starts, strict=True)
        ]
        prompts = [
            expectations.prompt_entry(prompt.row, prompt.references)
            for prompt in self.prompts
            if isinstance(prompt.row, InputRow)
        ]
        return expectations.Recording(
            self.seed,
            self.seeds,
            expectations.versions(),
            self.checkpoints,
            tuple(runs),
            tuple(prompts),
            tuple(self.records),
        )

    def _compare(self, recording: expectations.Recording) -> None:
        """Compare with what --expect read, and write the differences."""
        tolerance = expectations.TOLERANCE if self.options.tolerance is None else self.options.tolerance
        outcome = expectations.compare(recording.records, self.records, tolerance)
        self.output.compared(outcome, expectations.notes(recording, self.checkpoints, expectations.versions()))
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
