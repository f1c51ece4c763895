"""The output of a comparison: texts and tables, or records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.text import Text

from genctl.commands.compare import view
from genctl.commands.compare.options import CompareOptions
from genctl.commands.job import Job
from genctl.comparing import outputs
from genctl.comparing.outputs import ComparedPrompt, Measured, measured, records
from genctl.comparing.statistics import LEGEND, SPEED, RunNumbers, Table, tables
from genctl.config.layers import Resolved
from genctl.errors import count
from genctl.io import writers
from genctl.io.rows import BadRow, InputRow
from genctl.terminal import widgets
from genctl.terminal.run_history import DOT, put
from genctl.terminal.run_history import lines as lines_of_items

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class SharedWork:
    """The savings of decoding runs together: prefills and passes done, and passes needed without sharing."""

    forwards: int = 0  # passes done
    alone: int = 0  # passes that the texts would take one by one
    prefills: int = 0
    lanes: int = 0
    decode_s: float = 0.0


@dataclass
class ComparisonOutput:
    """Writes each finished prompt in input order, and finally tables over all prompts."""

    job: Job
    options: CompareOptions
    names: Sequence[str]  # of the runs
    base: str  # the run that the others are compared with
    resolved: Sequence[Resolved]  # the settings of each run, with its checkpoint's once that is loaded
    seed: int
    texts: bool  # whether the texts of each prompt are written, besides the tables
    out: Console
    err: Console
    sink: Any
    writer: Any = None  # of records
    tally: dict[str, RunNumbers] = field(default_factory=dict)
    _begun: bool = False  # whether something was written: the next part then begins with an empty line

    def __post_init__(self) -> None:
        self.tally = {name: RunNumbers() for name in self.names}
        self.seeds = self.options.seeds or 1
        self.width = self.out.width if self.sink is None else None
        if self.options.format in ("json", "jsonl"):
            self.writer = writers.open_writer(self.options.format, self.sink, on_error=lambda record: None)
        elif self.options.format == "tsv":
            self.writer = writers.TsvWriter(self.sink, outputs.COLUMNS)

    # -- one prompt ----------------------------------------------------------------------------------------------------

    def prompt(self, prompt: ComparedPrompt) -> int:
        """Write one prompt with all runs. Returns the number of failures."""
        by_run = measured(prompt, self.names, self.base, timing=self.options.timing)
        alone = {name: RunNumbers() for name in self.names}
        for tally in (self.tally, alone) if isinstance(prompt.row, InputRow) else ():
            for place, name in enumerate(self.names):
                seconds = sum(result.decode_s for result in prompt.results(place))
                tally[name].take(by_run[name], seconds, prompt.references)
        row = prompt.row
        failures = [
            (self.job.row_label(row, f"run {name}"), one.message, one.hint)
            for place, name in enumerate(self.names)
            for one in prompt.failures(place)
        ]
        if isinstance(row, BadRow):
            failures = [(self.job.row_label(row), row.message, "")]
        for subject, message, hint in failures if self.writer is None else ():  # else it is in a record
            self.job.messages.error(message, subject, hint)
        if self.writer is not None:
            load_s = self.job.load_s if self.options.timing else None
            more: dict[str, Any] = {"baseline": self.options.baseline, "tokens": bool(self.options.watch)}
            for record in records(prompt, self.names, by_run, load_s=load_s, **more):
                self.writer.write(record)
        elif self.texts and isinstance(row, InputRow):
            self._put(self._parts(prompt, row, by_run, alone))
        return len(failures)

    def _parts(
        self, prompt: ComparedPrompt, row: InputRow, by_run: dict[str, list[Measured]], tally: dict[str, RunNumbers]
    ) -> Iterator[list[Text]]:
        """The parts of a prompt's output: its texts, where they diverge, watched tokens, numbers."""
        room = self.width or view.UNBROKEN
        models = dict(zip(self.names, (one.runtime.model for one in self.resolved), strict=True))
        blocks, leaves = [], []
        for place, name in enumerate(self.names):
            failure = next((one.message for one in prompt.failures(place)), "")
            blocks.append(view.Block(name, [(one, self._label(one)) for one in by_run[name]], failure))
            point = next((one.divergence for one in by_run[name] if one.divergence is not None), None)
            if point is not None:
                line = view.divergence_line(name, point, one_model=models[name] == models[self.base])
                leaves += view.wrapped(line, self.out, room)
        title = [] if self.job.single_prompt else [heading(row, self.width or 80)]
        if not title and self.sink is None and row.shown:
            yield view.wrapped(Text(widgets.visible(row.shown), style="dim"), self.out, room)
        yield [*title, *view.blocks_lines(blocks, self.out, self.width)]
        if leaves:
            yield leaves
        for table in (*self._watched(by_run), *tables(tally, self.options.baseline, several=False)):
            yield self._table(table)

    def _watched(self, by_run: dict[str, list[Measured]]) -> Iterator[Table]:
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
        """A label for one of several texts of a run: its seed and its number."""
        count_of = len(one.result.sequences)
        label = [f"seed {one.result.seed}"] if self.seeds > 1 and one.result.seed is not None else []
        label += [f"{one.number + 1} of {count_of}"] if count_of > 1 else []
        return DOT.join(label)

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def end(self, work: SharedWork) -> None:
        """Write tables over all prompts, report the savings of sharing, and close the output."""
        done = len(self.tally[self.names[0]].prompts)
        if self.writer is None and (done > 1 or (done and not self.texts)):
            title = f"over {count(done, 'prompt')}" + (f" ({LEGEND})" if done > 1 else "")
            parts = [self._table(one) for one in tables(self.tally, self.options.baseline, several=done > 1)]
            parts[0].insert(0, widgets.header(self.width or 80, title))
            self._put(parts)
        if self.writer is None and done and (note := self._penalties()):
            self._put([view.wrapped(Text(note, style="dim"), self.out, self.width or view.UNBROKEN)])
        quiet = self.options.quiet or not (self.err.is_terminal or self.out.is_terminal or self.options.verbose)
        if not quiet and work.decode_s:
            put(self.err, Text(DOT.join(self._summary(work, done)), style="dim"))
        if self.writer is not None:
            self.writer.close()
        elif self.sink is not None:
            self.sink.close()

    def _penalties(self) -> str:
        """A note if the column of scores mixes length penalties; else ""."""
        runs: dict[float, list[str]] = {}
        for name, resolved in zip(self.names, self.resolved, strict=True):
            runs.setdefault(resolved.generation.length_penalty, []).append(name)
        if len(runs) < 2:
            return ""
        each = "; ".join(f"{penalty!r} in {', '.join(names)}" for penalty, names in runs.items())
        return f"scores of different length_penalty do not compare: it is {each}"

    def _summary(self, work: SharedWork, done: int) -> list[str]:
        tokens = sum(run.tokens for run in self.tally.values())
        words = [count(len(self.names), "run"), count(done, "prompt")]
        words += [count(self.seeds, "seed")] if self.seeds > 1 else []
        words += [f"{count(tokens, 'token')} in {work.decode_s:.2f} s"]
        if work.lanes:
            passes = count(work.forwards, "forward pass", "forward passes")
            words.append(f"{passes} instead of {work.alone:,}" if work.alone != work.forwards else passes)
            prefills = count(work.prefills, "prefill")
            words.append(f"{prefills} instead of {work.lanes:,}" if work.lanes > work.prefills else prefills)
        words += [f"{self.job.failed} failed"] if self.job.failed else []
        words += [f"seed {self.seed}"] if any(one.generation.draws for one in self.resolved) else []
        return words

    def _put(self, parts: Iterable[list[Text]]) -> None:
        """Write parts with an empty line before each."""
        for part in parts:
            lines = [Text(""), *part] if self._begun else part
            self._begun = True
            if self.sink is not None:
                self.sink.write("".join(f"{line.plain}\n" for line in lines).encode("utf-8", "backslashreplace"))
                continue
            for line in lines:
                self.out.print(line)

    def _table(self, table: Table) -> list[Text]:
        """A table and its title, as one part. Columns with equal values for all runs become a line above the table."""
        room = self.width or view.UNBROKEN
        lines = view.wrapped(Text(table.title, style="dim"), self.out, room) if table.title else []
        columns = list(zip(table.headings, *table.rows, strict=True))
        if table.headings[0] == "run" and len(table.rows) > 1:
            common = [column for column in columns[1:] if len(set(column[1:])) == 1 and column[0] != SPEED]
            columns = [column for column in columns if column not in common]
            if common:
                words = DOT.join(f"{heading} {cell}" for heading, cell, *_ in common)
                lines += lines_of_items(Text(f"all runs: {words}", style="dim"), room)
        if len(columns) > 1:
            headings, *rows = zip(*columns, strict=True)
            lines += widgets.table_lines(headings, rows, self.width)
        return lines


def heading(row: InputRow | BadRow, width: int) -> Text:
    """The heading above the texts of a prompt, if there are several prompts."""
    text = row.shown if isinstance(row, InputRow) else ""
    return widgets.header(width, f"prompt {row.name}", widgets.first_words(text, max(width - 24, 16)))
