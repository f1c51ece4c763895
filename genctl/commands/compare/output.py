"""The output of a comparison: texts and tables, or records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.text import Text

from genctl import events
from genctl.commands.compare import report as shown
from genctl.commands.compare.expectations import Outcome
from genctl.commands.compare.options import CompareOptions
from genctl.commands.job import Job
from genctl.comparing import outputs
from genctl.comparing.outputs import ComparedPrompt, Measured, measured, records
from genctl.comparing.statistics import LEGEND, RunStatistics, Table, tables
from genctl.config.layers import Resolved
from genctl.errors import count
from genctl.io import writers
from genctl.io.rows import BadRow, InputRow
from genctl.terminal import widgets
from genctl.terminal.summary import DOT, put, stop_words

if TYPE_CHECKING:
    from rich.console import Console


# -- what decoding the runs of a comparison together saves -------------------------------------------------------------


@dataclass
class SharedWork:
    """Counts prefills and forward passes: what was spent, and what the lanes would take one by one.

    A listener of events; `expect` comes before those of a lane. `forwards` is counted by whoever runs the model.
    """

    forwards: int = 0  # that were run
    alone: int = 0  # that the texts would take one by one
    prefills: int = 0
    lanes: int = 0
    prefill_s: float = 0.0  # spent
    spared_s: float = 0.0  # that further prefills of the same prompts would take
    decode_s: float = 0.0
    _guided: dict[str, bool] = field(default_factory=dict)  # whether a lane reads a negative prompt, too
    _prompts: dict[str, str] = field(default_factory=dict)  # of each lane
    _shared: set[str] = field(default_factory=set)  # lanes that began from another lane's prefill
    _prefill_of: dict[str, float] = field(default_factory=dict)  # seconds, by prompt

    def expect(self, lane: str, prompt: str, *, guided: bool) -> None:
        """A lane of a prompt follows."""
        self._prompts[lane], self._guided[lane] = prompt, guided

    def feed(self, event: events.Event) -> None:
        """Take in one event."""
        if isinstance(event, events.Prefilled):
            prompt = self._prompts[event.lane]
            self.lanes += 1
            if event.shared:
                self._shared.add(event.lane)
                self.spared_s += self._prefill_of.get(prompt, 0.0)
            else:
                self.prefills += 1
                self.prefill_s += event.seconds
                self._prefill_of[prompt] = event.seconds
        elif isinstance(event, events.Finished):
            passes = event.forwards + (event.lane in self._shared)
            # a negative prompt is read once more at each step, by this lane alone
            self.alone += passes * (2 if self._guided[event.lane] else 1)

    def forget(self) -> None:
        """Forget the lanes: the next prompts follow."""
        for of_lanes in (self._guided, self._prompts, self._shared, self._prefill_of):
            of_lanes.clear()


ByRun = dict[str, list[Measured]]


@dataclass(frozen=True)
class ComparedRuns:
    """What is compared."""

    names: Sequence[str]  # of the runs
    base: str  # the run that the others are compared with
    resolved: Sequence[Resolved]  # the settings of each run, with those of its checkpoint once that is loaded
    prompts: Sequence[ComparedPrompt]
    seeds: int  # repetitions of each run
    seed: int | None
    texts: bool  # the texts of each prompt are written, besides the tables


class ComparisonOutput:
    """Writes each finished prompt, in input order, and at the end tables over all prompts."""

    def __init__(
        self,
        job: Job[CompareOptions],
        comparison: ComparedRuns,
        options: CompareOptions,
        out: Console,
        err: Console,
        sink: Any,
    ) -> None:
        self.job, self.comparison, self.options = job, comparison, options
        self.out, self.err, self.sink = out, err, sink
        self.names = comparison.names
        self.tally = RunStatistics(self.names)
        self.width = out.width if sink is None else None
        self.writer: Any = None
        if options.format in ("json", "jsonl"):
            self.writer = writers.open_writer(options.format, sink, on_error=lambda record: None)
        elif options.format == "tsv":
            self.writer = writers.TsvWriter(sink, outputs.COLUMNS)
        self.silent = options.expect is not None and options.format == "text"
        self._latest: tuple[ComparedPrompt, ByRun] | None = None
        self._begun = False  # something is written; the next part begins with an empty line

    # -- one prompt ----------------------------------------------------------------------------------------------------

    def prompt(self, prompt: ComparedPrompt) -> int:
        """Write one prompt, every run of it. Returns how many runs failed."""
        by_run = measured(prompt, self.names, self.comparison.base, timing=self.options.timing)
        self._latest = prompt, by_run
        alone = RunStatistics(self.names)
        for tally in (self.tally, alone) if isinstance(prompt.row, InputRow) else ():
            tally.take(prompt, by_run)
        failed = self._failures(prompt)
        if self.writer is not None:
            load_s = self.job.load_s if self.options.timing else None
            more: dict[str, Any] = {"baseline": self.options.baseline, "tokens": bool(self.options.watch)}
            for record in records(prompt, self.names, by_run, load_s=load_s, **more):
                self.writer.write(record)
        elif self.comparison.texts and not self.silent and isinstance(row := prompt.row, InputRow):
            self._put(self._parts(prompt, row, by_run, alone))
        return failed

    def full(self, prompt: ComparedPrompt) -> list[dict[str, Any]]:
        """The records of the prompt that was written last, with their tokens."""
        assert self._latest is not None
        assert self._latest[0] is prompt
        return records(prompt, self.names, self._latest[1], baseline=None, tokens=True)

    def _failures(self, prompt: ComparedPrompt) -> int:
        """Say which runs failed, where no record does. Returns how many."""
        row = prompt.row
        failures = [
            (self.job.of(row, f"run {name}"), one.message, one.hint)
            for place, name in enumerate(self.names)
            for one in prompt.failures(place)
        ]
        if isinstance(row, BadRow):
            failures = [(self.job.of(row), row.message, "")]
        for subject, message, hint in failures if self.writer is None and not self.silent else ():
            self.job.messages.error(message, subject, hint)
        return len(failures)

    def _parts(
        self, prompt: ComparedPrompt, row: InputRow, by_run: ByRun, tally: RunStatistics
    ) -> Iterator[list[Text]]:
        """What is written of a prompt, part by part: its texts, where they diverge, watched tokens, numbers."""
        blocks, partings = self._shown(prompt, by_run)
        title = [heading(row, self.width or 80)] if len(self.comparison.prompts) > 1 else []
        if not title and self.sink is None and row.shown:
            yield shown.prompt_lines(row.shown, self.out, self.width or 80)
        yield [*title, *shown.blocks_lines(blocks, self.out, self.width)]
        if lines := shown.partings_lines(partings, self.width):
            yield lines
        for table in (*self._watched(by_run), *tables(tally, self.options.baseline, intervals=False)):
            yield from self._table(table)

    def _shown(self, prompt: ComparedPrompt, by_run: ByRun) -> tuple[list[shown.Block], list[shown.Parting]]:
        blocks, partings = [], []
        models = [sequence.runtime.model for sequence in self.comparison.resolved]
        home = models[self.names.index(self.comparison.base)]
        for place, name in enumerate(self.names):
            failures = prompt.failures(place)
            passages = [_passage(one, self._label(one)) for one in by_run[name]]
            blocks.append(shown.Block(name, tuple(passages), failures[0].message if failures else ""))
            for leaves in [one.leaves for one in by_run[name] if one.leaves is not None][:1]:
                same = models[place] == home
                partings.append(shown.Parting(name, leaves, same))
        return blocks, partings

    def _watched(self, by_run: ByRun) -> Iterator[Table]:
        """The watched tokens of each text, step by step."""
        for name in self.names if self.options.watch else ():
            for one in by_run[name]:
                tokens = one.sequence.tokens
                if not tokens:
                    continue
                label = self._label(one)
                title = f"watched in {name}{f' ({label})' if label else ''}: log-probability and rank at each step"
                heads = [widgets.token_text(id, text) for id, text, _, _ in tokens[0].watched]
                headings = ["step", "token", *(cell for head in heads for cell in (head, "rank"))]
                rows = []
                for step, token in enumerate(tokens, 1):
                    rows.append([str(step), widgets.token_text(token.id, token.text)])
                    for _, _, value, rank in token.watched:
                        rows[-1] += [outputs.number(value, 3), str(rank)]
                yield Table(title, headings, rows)

    def _label(self, one: Measured) -> str:
        """Which of several texts of a run this is."""
        count_of = len(one.result.sequences)
        label = [f"seed {one.result.seed}"] if self.comparison.seeds > 1 and one.result.seed is not None else []
        label += [f"{one.number + 1} of {count_of}"] if count_of > 1 else []
        return DOT.join(label)

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def end(self, saved: SharedWork) -> None:
        """Write tables over all prompts, and say what sharing saved."""
        done = max((len(values) for values in self.tally.prompts.values()), default=0)
        wanted = self.options.format == "text" and not self.silent
        if wanted and (done > 1 or (done and not self.comparison.texts)):
            title = f"over {count(done, 'prompt')}"
            if done > 1:
                title += f" ({LEGEND})"
            parts = [
                part
                for table in tables(self.tally, self.options.baseline, intervals=done > 1)
                for part in self._table(table)
            ]
            parts[0].insert(0, widgets.header(self.width or 80, title))
            self._put(parts)
        if wanted and done and (note := self._penalties()):
            self._put([shown.wrapped(Text(note, style="dim"), self.out, self.width or shown.UNBROKEN)])
        quiet = self.options.quiet or not (self.err.is_terminal or self.out.is_terminal or self.options.verbose)
        if not quiet and saved.decode_s:
            put(self.err, Text(DOT.join(self._summary(saved, done)), style="dim"))

    def _penalties(self) -> str:
        """A note where the column of scores mixes length penalties; else ""."""
        runs: dict[float, list[str]] = {}
        for name, resolved in zip(self.names, self.comparison.resolved, strict=True):
            runs.setdefault(resolved.generation.length_penalty, []).append(name)
        if len(runs) < 2:
            return ""
        each = "; ".join(f"{penalty!r} in {', '.join(names)}" for penalty, names in runs.items())
        return f"scores of different length_penalty do not compare: it is {each}"

    def _summary(self, saved: SharedWork, done: int) -> list[str]:
        tokens = sum(self.tally.tokens.values())
        words = [count(len(self.names), "run"), count(done, "prompt")]
        words += [count(self.comparison.seeds, "seed")] if self.comparison.seeds > 1 else []
        words += [f"{count(tokens, 'token')} in {saved.decode_s:.2f} s"]
        if saved.lanes:
            passes = count(saved.forwards, "forward pass", "forward passes")
            words.append(f"{passes} instead of {saved.alone:,}" if saved.alone != saved.forwards else passes)
            words.append(count(saved.prefills, "prefill"))
        if saved.lanes > saved.prefills:
            words[-1] += f" instead of {saved.lanes:,} ({saved.prefill_s:.2f} s, {saved.spared_s:.2f} s saved)"
        words += [f"{self.job.failed} failed"] if self.job.failed else []
        words += (
            [f"seed {self.comparison.seed}"] if any(one.generation.draws for one in self.comparison.resolved) else []
        )
        return words

    def compared(self, outcome: Outcome, notes: Sequence[str]) -> None:
        """Write what `--expect` found: to the output where it is text, else to standard error."""
        names = {prompt.row.id: "" if self.job.lone else prompt.row.name for prompt in self.comparison.prompts}
        lines = outcome.lines(self.options.expect, notes, names)
        if self.silent:
            self._write([Text(widgets.visible(line)) for line in lines])
        else:
            for line in lines:
                self.job.messages.say(line)

    def finish(self) -> None:
        """Close the output."""
        if self.writer is not None:
            self.writer.close()
        elif self.sink is not None:
            self.sink.close()

    def _put(self, parts: Iterable[list[Text]]) -> None:
        """Write parts with an empty line before each."""
        for part in parts:
            self._write([Text(""), *part] if self._begun else part)
            self._begun = True

    def _write(self, lines: Sequence[Text]) -> None:
        if self.sink is None:
            for line in lines:
                self.out.print(line)
        elif lines:
            self.sink.write("".join(f"{line.plain}\n" for line in lines).encode("utf-8", "backslashreplace"))

    def _table(self, table: Table) -> Iterator[list[Text]]:
        """A table and its title, as one part."""
        room = self.width or shown.UNBROKEN
        title = shown.wrapped(Text(table.title, style="dim"), self.out, room) if table.title else []
        yield [*title, *widgets.table_lines(table.headings, table.rows, self.width)]


def heading(row: InputRow | BadRow, width: int) -> Text:
    """The heading above the texts of one prompt of several."""
    text = row.shown if isinstance(row, InputRow) else ""
    return widgets.header(width, f"prompt {row.name}", widgets.first_words(text, max(width - 24, 16)))


def _passage(one: Measured, label: str) -> shown.Passage:
    state = stop_words(one.sequence.finish_reason, one.sequence.hypothesis.cause)
    character, token = (None, None) if one.leaves is None else (one.leaves.character, one.leaves.token)
    last = one.number + 1 == len(one.result.sequences)
    others = tuple((other.score, other.shown) for other in one.result.others) if last else ()
    return shown.Passage(one.sequence.shown, state, label, character, token, one.sequence.score, others)
