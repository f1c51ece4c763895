"""A comparison at work: checkpoints one after another, all runs of a checkpoint decoded together, prompt by prompt."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from genctl import events as told
from genctl.batch import writers
from genctl.batch.rows import BadRow, InputRow
from genctl.batch.seeds import random_seed, row_seed
from genctl.cli import notes
from genctl.cli.compare_options import CompareOptions, Naming, dry, each, rows_of, runs_of, settled
from genctl.cli.event_log import EventFile
from genctl.cli.inputs import is_terminal
from genctl.cli.interrupt import Interrupt
from genctl.cli.shortfall import shortfalls
from genctl.comparing import expectations, references
from genctl.comparing.outputs import Cell, ComparedPrompt, Failure
from genctl.comparing.runs import RunSpec, checkpoint_of
from genctl.config.dry import settings_of
from genctl.config.layers import Resolved, overlay, row_layer
from genctl.errors import CheckError, Exit, GenctlError, InputError, UsageError
from genctl.results import Collector

if TYPE_CHECKING:
    from genctl.cli.compare_output import ComparisonOutput
    from genctl.render.compare import CompareView
    from genctl.requests import Request
    from genctl.session import Session

LANES = 16  # decoded at once where nobody watches and no batch size is given
TOP = 20  # alternatives looked at with --expect, to say how probable an old token is now


@dataclass
class Saved:
    """What sharing saved, counted while it happens."""

    forwards: int = 0  # made
    alone: int = 0  # that the texts would have taken one by one
    prefills: int = 0
    lanes: int = 0
    prefill_s: float = 0.0  # spent
    spared_s: float = 0.0  # that further prefills of the same prompts would have taken
    decode_s: float = 0.0


def perform(asked: CompareOptions) -> int | None:
    """Do what was asked. Returns the exit status, or None if there is no prompt to be had."""
    recording = None if asked.expect is None else expectations.read(asked.expect)
    runs = runs_of(asked, recording)
    if asked.baseline is not None and asked.baseline not in [run.name for run in runs]:
        names = ", ".join(run.name for run in runs)
        raise UsageError(f"--baseline {asked.baseline}: no run has this name; there are: {names}")
    early = each(runs, RunSpec.early)
    if asked.dry:
        return dry(asked, runs, early)
    rows = rows_of(asked, recording)
    if rows is None:
        return None
    with Interrupt() as interrupt:
        return CompareJob(asked, runs, early, rows, recording, interrupt).run()


@dataclass
class CompareJob:
    """One comparison: checkpoints one after another, on each all runs of a prompt at once."""

    asked: CompareOptions
    runs: Sequence[RunSpec]
    early: Sequence[Resolved]
    rows: list[InputRow | BadRow]
    recording: expectations.Recording | None
    interrupt: Interrupt
    saved: Saved = field(default_factory=Saved)
    checkpoints: dict[str, str] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)  # kept for --save and --expect
    lanes: dict[str, tuple[ComparedPrompt, int, int]] = field(
        default_factory=dict
    )  # under way: prompt, run, repetition
    guided: set[str] = field(default_factory=set)  # lanes that also read a negative prompt
    hidden: dict[int, bool] = field(default_factory=dict)  # runs that look at hidden states
    shared: set[str] = field(default_factory=set)  # lanes that began from another lane's prefill
    prefill_of: dict[str, float] = field(default_factory=dict)  # seconds, by prompt
    cuts: set[str] = field(default_factory=set)  # what was said of prompts that were cut
    load_s: float = 0.0
    failed: int = 0

    def run(self) -> int:
        """Check, load, decode, write. Returns the exit status. Raises CheckError where --expect is not met."""
        from genctl.cli.compare_output import open_outputs
        from genctl.render.compare import CompareView
        from genctl.render.console import make_consoles

        asked = self.asked
        recording = self.recording
        self.seeds = asked.seeds or (recording.seeds if recording is not None else 1)
        self.resolved = settled(asked, self.runs, self.early)
        self.base = asked.baseline or self.runs[0].name
        given = next((one.runtime.seed for one in self.resolved if one.runtime.seed is not None), None)
        self.seed = random_seed() if given is None else given
        self.starts = [self.seed if one.runtime.seed is None else one.runtime.seed for one in self.resolved]
        self.prompts = self._prompts()
        self.out, self.err = make_consoles(asked.color)  # type: ignore[arg-type]
        plain = asked.format == "text" and recording is None
        self.texts = bool(asked.arguments) or len(self.rows) == 1 or asked.verbose
        live = plain and asked.output is None and self.texts and is_terminal(sys.stdout)
        lanes = len(self.rows) * len(self.runs) * self.seeds
        with ExitStack() as stack:
            output = stack.enter_context(open_outputs(self, asked, self.out, self.err))
            sink = None
            if asked.save is not None:
                sink = writers.open_output(asked.save, None, force=asked.force)
                stack.callback(sink.abandon)
            trace = stack.enter_context(EventFile(Path(asked.events))) if asked.events else None
            view = stack.enter_context(CompareView(self.out, self.err, live=live, quiet=asked.quiet, total=lanes))
            self._decode(view, output, trace, per=1 if live else 0)
            view.hide()
            output.end(self.saved)
            if sink is not None and not self.interrupt.status:
                sink.write(self._recording().encode())
                sink.close()
        return self._status(output)

    def _prompts(self) -> list[ComparedPrompt]:
        """The prompts with their references. Raises InputError where references do not fit."""
        given = None
        if self.asked.references is not None:
            given = references.read(self.asked.references, len(self.rows))
        found = []
        for place, row in enumerate(self.rows):
            own: Any = [] if isinstance(row, BadRow) else row.extra.get("reference", [])
            known = [own] if isinstance(own, str) else list(own)
            if given is not None:
                if known:
                    raise InputError(f"{row.where} has a reference, and so has line {place + 1} of --references")
                known = [given[place]]
            found.append(ComparedPrompt(row, tuple(known), [[None] * self.seeds for _ in self.runs]))
        return found

    # -- decoding ------------------------------------------------------------------------------------------------------

    def _decode(self, view: CompareView, output: ComparisonOutput, trace: EventFile | None, *, per: int) -> None:
        groups: dict[tuple[Any, ...], list[int]] = {}
        for place, one in enumerate(self.resolved):
            groups.setdefault(checkpoint_of(one), []).append(place)
        for number, members in enumerate(groups.values()):
            last = number + 1 == len(groups)
            session = self._load(members, view)
            before = session.forward.forwards
            lanes = len(members) * self.seeds
            usual = max(LANES // lanes, 1)
            step = per or min(session.width(self.resolved[place], usual) for place in members)
            self.interrupt.gentle = True
            for start in range(0, len(self.prompts), step):
                chunk = self.prompts[start : start + step]
                self._stream(session, members, chunk, view, trace)
                if last:
                    self._settle(chunk, view, output)
                if self.interrupt.status:
                    break
            self.saved.forwards += session.forward.forwards - before
            for note in () if self.asked.quiet else self.reuse.notes(session, verbose=self.asked.verbose):
                self.say(f"note: {note}")
            self.interrupt.gentle = False
            if self.interrupt.status:  # what earlier checkpoints wrote is not lost
                self._settle([prompt for prompt in self.prompts if prompt.begun], view, output)
                return
            del session  # the next checkpoint needs its memory

    def _load(self, members: Sequence[int], view: CompareView) -> Session:
        """The checkpoint of these runs, each of which is checked on it."""
        from genctl.session import Session

        asked = self.asked
        began = time.perf_counter()
        runtime = self.resolved[members[0]].runtime
        self._check_saved(members)
        offline = any(self.resolved[place].runtime.offline for place in members)
        session = Session.load(
            dataclasses.replace(runtime, offline=offline),
            allow_pickle=asked.allow_pickle,
            trust_remote_code=asked.trust_remote_code,
            allow_plugins=asked.allow_plugins,
            on_event=view.feed,
            layers=self.runs[members[0]].layers,
            need_tokenizer=not any(isinstance(row, InputRow) and row.prompt_ids is not None for row in self.rows),
        )
        view.hide()
        notes.announce_compiling(session, self.say, quiet=asked.quiet, before=view.hide)
        self.load_s += time.perf_counter() - began
        name = session.loaded.name
        if asked.save is not None or asked.expect is not None:
            self.checkpoints[name] = session.loaded.fingerprint()
        for place in members:
            with Naming(self.runs[place]):
                self.resolved[place] = session.resolve(self.runs[place].layers)
                session.check(self.resolved[place])
                self.hidden[place] = session.reads_hidden(self.resolved[place])
        if asked.verbose:
            for note in session.loaded.told:
                self.say(f"note: {note}")
            for place in members:
                for note in self.resolved[place].notes:
                    self.say(f"note: run {self.runs[place].name}: {note}")
        self.reuse = notes.Reuse(runtime.prompt_cache)
        for place in () if asked.quiet else members:
            for note in notes.cache_notes(session, self.resolved[place]):
                self.say(f"note: run {self.runs[place].name}: {note}")
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

    def _stream(
        self,
        session: Session,
        members: Sequence[int],
        chunk: Sequence[ComparedPrompt],
        view: CompareView,
        trace: EventFile | None,
    ) -> None:
        """Decode these prompts with these runs, all lanes at once, so that each prompt is read once."""
        from genctl.requests import Report

        requests = [request for prompt in chunk for request in self._requests(session, members, prompt)]
        self._show(chunk, view)
        collector = Collector()
        report = Report(TOP if self.recording is not None else 0, True)
        began = time.perf_counter()
        width = max(len(requests), 1)

        def shortage(fewer: int) -> None:
            view.hide()
            self.say(f"note: not enough memory for {width} lanes at once, going on with {fewer}")

        stream = session.stream(requests, report, width=width, interrupted=self.interrupt, on_shortage=shortage)
        with closing(stream):
            for event in stream:
                self._say_cut(event, view)
                if trace is not None:
                    trace.write(event)
                self._count(event)
                self.reuse.feed(event)
                view.feed(event)
                result = collector.feed(event)
                if result is not None:
                    prompt, run, repetition = self.lanes.pop(result.lane)
                    for note in shortfalls(result, f"prompt {prompt.row.id}, run {self.runs[run].name}"):
                        view.hide()
                        self.say(f"warning: {note}")
                    prompt.cells[run][repetition] = (
                        result if result.error is None else Failure(result.error.code, result.error.message)
                    )
        self.saved.decode_s += time.perf_counter() - began
        self.lanes.clear()
        self.guided.clear()
        self.shared.clear()
        self.prefill_of.clear()

    def _requests(self, session: Session, members: Sequence[int], prompt: ComparedPrompt) -> list[Request]:
        """The lanes of one prompt. Those that look at hidden states come first: their prefill serves all others."""
        from genctl.requests import Request

        row = prompt.row
        if isinstance(row, BadRow):
            return []
        found: list[tuple[bool, Request]] = []
        wanted = {**row.params, **{key: value for key, value in row.extra.items() if key != "reference"}}
        for place in members:
            base, name = self.resolved[place], self.runs[place].name
            try:
                resolved = overlay(base, row_layer(wanted, row.where)) if wanted else base
                hidden = self.hidden[place] if resolved is base else session.reads_hidden(resolved)
            except GenctlError as error:
                failure: Cell = Failure(error.code, error.message)
                prompt.cells[place] = [failure] * self.seeds
                continue
            own = resolved.runtime.seed if "seed" in row.params else None
            scale = resolved.generation.guidance_scale
            for repetition in range(self.seeds):
                start = self.starts[place] if own is None else own
                seed = start if repetition == 0 else row_seed(start, f"seed {repetition}", repetition)
                seed = row_seed(seed, row.id, row.index) if own is None else seed
                lane = f"{name}/{quote(row.id, safe=' ')}/{seed}"
                self.lanes[lane] = prompt, place, repetition
                prompt.lanes.setdefault(place, []).append(lane)
                if scale not in (None, 1.0):
                    self.guided.add(lane)
                made = Request(lane, resolved, seed, row.prompt, row.prompt_ids, row.messages)
                found.append((hidden, made))
        return [request for _, request in sorted(found, key=lambda pair: not pair[0])]

    def _show(self, chunk: Sequence[ComparedPrompt], view: CompareView) -> None:
        from genctl.cli.compare_output import heading
        from genctl.render.compare import Column

        if len(chunk) == 1:
            prompt = chunk[0]
            several = len(self.prompts) > 1
            columns = [Column(run.name, tuple(prompt.lanes.get(place, ()))) for place, run in enumerate(self.runs)]
            view.begin(heading(prompt.row, self.out.width) if several else None, columns)

    def _count(self, event: told.Event) -> None:
        """What was spent and what it would have taken one by one."""
        if isinstance(event, told.Prefilled):
            key = self.lanes[event.lane][0].row.id
            self.saved.lanes += 1
            if event.shared:
                self.shared.add(event.lane)
                self.saved.spared_s += self.prefill_of.get(key, 0.0)
            else:
                self.saved.prefills += 1
                self.saved.prefill_s += event.seconds
                self.prefill_of[key] = event.seconds
        elif isinstance(event, told.Finished):
            passes = event.forwards + (event.lane in self.shared)
            # a negative prompt is read once more at each step, by this lane alone
            self.saved.alone += passes * (2 if event.lane in self.guided else 1)

    def _say_cut(self, event: told.Event, view: CompareView) -> None:
        """A prompt that was cut, once for all runs that read it alike."""
        if not isinstance(event, told.Began):
            return
        prompt, run, _ = self.lanes[event.lane]
        assert isinstance(prompt.row, InputRow)
        note = notes.cut_note(event, prompt.row.id, prompt.row, self.resolved[run].runtime)
        if note and note not in self.cuts:
            self.cuts.add(note)
            view.hide()
            self.say(f"note: {note}")

    def _settle(self, chunk: Sequence[ComparedPrompt], view: CompareView, output: ComparisonOutput) -> None:
        view.hide()
        for prompt in chunk:
            if isinstance(prompt.row, BadRow) or prompt.begun:
                self.failed += output.prompt(prompt)
                if self.asked.save is not None or self.recording is not None:
                    self.records += output.full(prompt)
                prompt.forget()
        view.forget()

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

    def _status(self, output: ComparisonOutput) -> int:
        if self.interrupt.status:
            return self.interrupt.status
        if self.recording is None:
            return int(Exit.ROWS_FAILED if self.failed else Exit.DONE)
        tolerance = expectations.TOLERANCE if self.asked.tolerance is None else self.asked.tolerance
        outcome = expectations.compare(self.recording.records, self.records, tolerance)
        output.compared(outcome, expectations.notes(self.recording, self.checkpoints, expectations.versions()))
        if outcome.differences:
            count = len(outcome.differences)
            raise CheckError(
                f"--expect {self.asked.expect}: {count} of {outcome.compared} outputs "
                f"{'is' if count == 1 else 'are'} not as recorded",
                hint="--save FILE --force records them as they are now",
            )
        return int(Exit.DONE)

    def say(self, line: str) -> None:
        """One line on standard error."""
        from genctl.render.parts import visible

        print(visible(line), file=sys.stderr, flush=True)
