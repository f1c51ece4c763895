"""The output of a comparison: texts and tables, records, or Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from genctl.batch import writers
from genctl.batch.rows import BadRow, InputRow
from genctl.comparing import formats, references
from genctl.comparing.expectations import Outcome
from genctl.comparing.outputs import ComparedPrompt, Measured, measured, records
from genctl.comparing.statistics import Interval, RunStatistics
from genctl.plural import count
from genctl.render import compare_report as shown
from genctl.render import widgets
from genctl.render.summary import DOT, put, stop_words

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.cli.compare_job import CompareJob, Saved
    from genctl.cli.compare_options import CompareOptions

# key -> heading, digits, whether the column is left out where no run has a value
COLUMNS: dict[str, tuple[str, int, bool]] = {
    "tokens": ("tokens", 1, False),
    "mean_logprob": ("logprob/token", 3, False),
    "perplexity": ("perplexity", 2, False),
    "score": ("score", 3, False),
    "entropy": ("entropy", 2, False),
    "distinct_1": ("distinct-1", 2, False),
    "distinct_2": ("distinct-2", 2, False),
    "longest_repeat": ("repeat", 1, False),
    "self_bleu": ("self-BLEU", 1, True),
    "exact_match": ("exact", 2, True),
    "chrf": ("chrF", 1, True),
    "bleu": ("BLEU", 1, True),
    "ter": ("TER", 1, True),
}
SPEED, ENDED = "tok/s", "ended by"


class ComparisonOutput:
    """Writes each finished prompt, in input order, and at the end tables over all prompts."""

    def __init__(self, job: CompareJob, options: CompareOptions, out: Console, err: Console, sink: Any) -> None:
        self.job, self.options, self.out, self.err, self.sink = job, options, out, err, sink
        self.names = [run.name for run in job.runs]
        self.tally = RunStatistics(self.names)
        self.corpus: dict[str, tuple[list[str], list[tuple[str, ...]]]] = {name: ([], []) for name in self.names}
        self.width = out.width if sink is None else None
        self.writer: Any = None
        if options.format in ("json", "jsonl"):
            self.writer = writers.open_writer(options.format, sink, on_error=lambda record: None)
        elif options.format == "tsv":
            self.writer = writers.TsvWriter(sink, formats.COLUMNS)
        self.silent = options.expect is not None and options.format == "text"
        self._found: tuple[ComparedPrompt, dict[str, list[Measured]]] | None = None
        self._blocks = 0

    # -- one prompt ----------------------------------------------------------------------------------------------------

    def prompt(self, prompt: ComparedPrompt) -> int:
        """Write one prompt, every run of it. Returns how many runs failed."""
        by_run = measured(prompt, self.names, self.job.base, timing=self.options.timing)
        self._found = prompt, by_run
        failed = self._failures(prompt)
        alone = RunStatistics(self.names)
        for tally in (self.tally, alone):
            _add(tally, prompt, by_run, self.names)
        if prompt.references:
            for name in self.names:
                for one in by_run[name]:
                    self.corpus[name][0].append(one.sequence.text)
                    self.corpus[name][1].append(prompt.references)
        if self.writer is not None:
            load_s = self.job.load_s if self.options.timing else None
            told: dict[str, Any] = {"baseline": self.options.baseline, "tokens": bool(self.options.watch)}
            for record in records(prompt, self.names, by_run, load_s=load_s, **told):
                self.writer.write(record)
        elif self.options.format == "md":
            self._markdown(prompt, by_run, alone)
        elif self.job.texts and not self.silent and isinstance(prompt.row, InputRow):
            self._text(prompt, by_run, alone)
        return failed

    def full(self, prompt: ComparedPrompt) -> list[dict[str, Any]]:
        """The records of the prompt that was written last, with their tokens."""
        assert self._found is not None
        assert self._found[0] is prompt
        return records(prompt, self.names, self._found[1], baseline=None, tokens=True)

    def _failures(self, prompt: ComparedPrompt) -> int:
        report = self.writer is None and not self.silent
        if isinstance(prompt.row, BadRow):
            if report:
                self.job.say(f"error: {self.job.of(prompt.row)}{prompt.row.message}")
            return 1
        failed = 0
        for place, name in enumerate(self.names):
            for failure in prompt.failures(place):
                failed += 1
                if report:
                    self.job.say(f"error: {self.job.of(prompt.row, f'run {name}')}{failure.message}")
        return failed

    def _text(self, prompt: ComparedPrompt, by_run: dict[str, list[Measured]], tally: RunStatistics) -> None:
        several = len(self.job.prompts) > 1
        blocks, partings = self._shown(prompt, by_run)
        if several:
            self._write([*([Text("")] if self._blocks else []), heading(prompt.row, self.width or 80)])
        self._blocks += 1
        self._write(shown.blocks_lines(blocks, self.out, self.width))
        if partings:
            self._write([Text(""), *shown.partings_lines(partings, self.width)])
        self._write([Text("")])
        for title, headings, rows in self._watched(by_run):
            heading_lines = shown.wrapped(Text(title, style="dim"), self.out, self.width or shown.UNBROKEN)
            self._write([*heading_lines, *shown.table_lines(headings, rows, self.width), Text("")])
        self._tables(tally)

    def _shown(
        self, prompt: ComparedPrompt, by_run: dict[str, list[Measured]]
    ) -> tuple[list[shown.Block], list[shown.Parting]]:
        blocks, partings = [], []
        models = [sequence.runtime.model for sequence in self.job.resolved]
        home = models[self.names.index(self.job.base)]
        for place, name in enumerate(self.names):
            failures = prompt.failures(place)
            passages = [_passage(one, self._label(one)) for one in by_run[name]]
            blocks.append(shown.Block(name, tuple(passages), failures[0].message if failures else ""))
            first = next((one for one in by_run[name] if one.leaves is not None), None)
            if first is not None and first.leaves is not None:
                leaves = first.leaves
                same = models[place] == home
                parting = shown.Parting(name, leaves.against, leaves.position, leaves.token, leaves.other, same)
                partings.append(parting)
        return blocks, partings

    def _watched(self, by_run: dict[str, list[Measured]]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """Title, headings and cells of the watched tokens of each text, step by step."""
        for name in self.names if self.options.watch else ():
            for one in by_run[name]:
                tokens = one.sequence.tokens
                if not tokens:
                    continue
                label = self._label(one)
                title = f"watched in {name}{f' ({label})' if label else ''}: log-probability and rank at each step"
                heads = [widgets.token_text(id, text) for id, text, _, _ in tokens[0].watched]
                headings = ["step", "token", *(cell for head in heads for cell in (head, "rank"))]
                rows = [
                    [
                        str(step),
                        widgets.token_text(token.id, token.text),
                        *(cell for _, _, value, rank in token.watched for cell in (shown.number(value, 3), str(rank))),
                    ]
                    for step, token in enumerate(tokens, 1)
                ]
                yield title, headings, rows

    def _label(self, one: Measured) -> str:
        """Which of several texts of a run this is."""
        count_of = len(one.result.sequences)
        label = [f"seed {one.result.seed}"] if self.job.seeds > 1 else []
        label += [f"{one.number + 1} of {count_of}"] if count_of > 1 else []
        return DOT.join(label)

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def end(self, saved: Saved) -> None:
        """Write tables over all prompts, and say what sharing saved."""
        done = max((len(values) for values in self.tally.prompts.values()), default=0)
        if self.options.format == "md" and done > 1:
            self._markdown_end(done)
        if self.options.format == "md" and (note := self._penalties()):
            self._write_markdown([formats.markdown_text(note)])
        elif self.options.format == "text" and not self.silent and (done > 1 or (done and not self.job.texts)):
            if self._blocks:
                self._write([Text("")])
            self._write([widgets.header(self.width or 80, f"over {count(done, 'prompt')}")])
            self._tables(self.tally, intervals=done > 1)
        if self.options.format == "text" and not self.silent and done and (note := self._penalties()):
            room = self.width or shown.UNBROKEN
            self._write([Text(""), *shown.wrapped(Text(note, style="dim"), self.out, room)])
        quiet = self.options.quiet or not (self.err.is_terminal or self.out.is_terminal or self.options.verbose)
        if not quiet and saved.lanes:
            put(self.err, Text(DOT.join(self._summary(saved, done)), style="dim"))

    def _penalties(self) -> str:
        """A note where the column of scores mixes length penalties; else ""."""
        runs: dict[float, list[str]] = {}
        for name, resolved in zip(self.names, self.job.resolved, strict=True):
            runs.setdefault(resolved.generation.length_penalty, []).append(name)
        if len(runs) < 2:
            return ""
        each = "; ".join(f"{penalty!r} in {', '.join(names)}" for penalty, names in runs.items())
        return f"scores of different length_penalty do not compare: it is {each}"

    def _summary(self, saved: Saved, done: int) -> list[str]:
        tokens = sum(self.tally.tokens.values())
        words = [count(len(self.names), "run"), count(done, "prompt")]
        words += [count(self.job.seeds, "seed")] if self.job.seeds > 1 else []
        words += [f"{count(tokens, 'token')} in {saved.decode_s:.2f} s"]
        passes = count(saved.forwards, "forward pass", "forward passes")
        words.append(f"{passes} instead of {saved.alone:,}" if saved.alone != saved.forwards else passes)
        if saved.lanes > saved.prefills:
            words.append(
                f"{count(saved.prefills, 'prefill')} instead of {saved.lanes:,} ({saved.prefill_s:.2f} s, "
                f"{saved.spared_s:.2f} s saved)"
            )
        else:
            words.append(count(saved.prefills, "prefill"))
        words += [f"{self.job.failed} failed"] if self.job.failed else []
        words.append(f"seed {self.job.seed}")
        return words

    def compared(self, outcome: Outcome, notes: Sequence[str]) -> None:
        """Write what `--expect` found: to the output where it is text, else to standard error."""
        lines: list[str] = []
        names = {prompt.row.id: "" if self.job.lone else prompt.row.name for prompt in self.job.prompts}
        for difference in outcome.differences:
            lines += [
                difference.heading(names.get(difference.id, difference.id)),
                *(f"  {line}" for line in difference.lines),
                "",
            ]
        lines += [f"note: {note}" for note in notes]
        if not outcome.differences:
            lines.append(f"{count(outcome.compared, 'output')} as recorded in {self.options.expect}")
        if self.silent:
            self._write([Text(widgets.visible(line)) for line in lines])
        else:
            for line in lines:
                self.job.say(line)

    def finish(self) -> None:
        """Close the output."""
        if self.writer is not None:
            self.writer.close()
        elif self.sink is not None:
            self.sink.close()

    def _write(self, lines: Sequence[Text]) -> None:
        if self.sink is None:
            for line in lines:
                self.out.print(line)
        elif lines:
            self.sink.write("".join(f"{line.plain}\n" for line in lines).encode("utf-8", "backslashreplace"))

    # -- tables --------------------------------------------------------------------------------------------------------

    def _tables(self, tally: RunStatistics, *, intervals: bool = False) -> None:
        for title, headings, rows in self._all_tables(tally, intervals=intervals):
            if title:
                self._write(
                    [Text(""), *shown.wrapped(Text(title, style="dim"), self.out, self.width or shown.UNBROKEN)]
                )
            self._write(shown.table_lines(headings, rows, self.width))

    def _all_tables(self, tally: RunStatistics, *, intervals: bool) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """Titles, headings and cells: the numbers, differences to the baseline, the corpus, and who is ahead."""
        base = self.options.baseline
        means = {name: tally.means(name) for name in self.names}
        keys = [
            key
            for key, (_, _, optional) in COLUMNS.items()
            if not optional or any(one.get(key) is not None for one in means.values())
        ]
        headings = ["run", *(COLUMNS[key][0] for key in keys), SPEED, ENDED]
        rows = []
        for name in self.names:
            cells = [_cell(tally, name, key, means[name].get(key), intervals=intervals) for key in keys]
            reasons = tally.reasons[name]
            alone = sum(reasons.values()) == 1
            ended = ", ".join(reason if alone else f"{number} {reason}" for reason, number in reasons.items())
            rows.append([name, *cells, shown.number(tally.speed(name), 0), ended or "–"])
        yield "", headings, rows
        if base is not None and len(self.names) > 1:
            differing = [
                [
                    name,
                    *(
                        _interval(tally.difference(name, base, key), key, intervals=intervals, sign=True)
                        for key in keys
                    ),
                ]
                for name in self.names
                if name != base
            ]
            yield f"minus {base}", ["run", *(COLUMNS[key][0] for key in keys)], differing
        if intervals:
            texts = {name: one for name, one in self.corpus.items() if one[0]}
            if texts:
                scores = {name: references.corpus(*one) for name, one in texts.items()}
                wanted = ("chrf", "bleu", "ter")
                yield (
                    "against the references, all texts as one corpus",
                    ["run", *(COLUMNS[key][0] for key in wanted)],
                    [[name, *(shown.number(one[key], 1) for key in wanted)] for name, one in scores.items()],
                )
            rows = []
            for name in self.names if len(self.names) > 1 else ():
                others = [None if name == other else tally.wins(name, other) for other in self.names]
                rows.append([name, *("·" if one is None else f"{one.won}/{one.tied}/{one.lost}" for one in others)])
            if rows:
                yield "prompts won/tied/lost by mean log-probability, line against column", ["run", *self.names], rows

    # -- Markdown ------------------------------------------------------------------------------------------------------

    def _markdown(self, prompt: ComparedPrompt, by_run: dict[str, list[Measured]], tally: RunStatistics) -> None:
        row = prompt.row
        pieces = [] if self.job.lone else [f"## Prompt {formats.markdown_text(row.name)}"]
        if isinstance(row, BadRow):
            self._write_markdown([*pieces, formats.markdown_text(f"failed: {row.message}")])
            return
        text = next((one.result.prompt for name in self.names for one in by_run[name]), row.prompt or "")
        pieces.append(formats.markdown_block(text))
        blocks, partings = self._shown(prompt, by_run)
        for block in blocks:
            for passage in block.passages:
                words = [f"**{formats.markdown_text(block.run)}**", passage.label, passage.state]
                pieces += [DOT.join(word for word in words if word), formats.markdown_block(passage.text)]
            if block.failure:
                pieces.append(f"**{formats.markdown_text(block.run)}** failed: {formats.markdown_text(block.failure)}")
        if partings:
            notes = [line.plain.removeprefix(f"{shown.MARK} ") for line in shown.partings_lines(partings, None)]
            pieces.append("\n".join(f"- {formats.markdown_text(line)}" for line in notes))
        for title, headings, rows in self._watched(by_run):
            pieces += [formats.markdown_text(title[:1].upper() + title[1:]), formats.markdown_table(headings, rows)]
        self._write_markdown([*pieces, *self._markdown_tables(tally, intervals=False)])

    def _markdown_end(self, done: int) -> None:
        self._write_markdown([f"## Over {count(done, 'prompt')}", *self._markdown_tables(self.tally, intervals=True)])

    def _markdown_tables(self, tally: RunStatistics, *, intervals: bool) -> Iterator[str]:
        for title, headings, rows in self._all_tables(tally, intervals=intervals):
            if title:
                yield formats.markdown_text(title[:1].upper() + title[1:])
            yield formats.markdown_table(headings, rows)

    def _write_markdown(self, pieces: Sequence[str]) -> None:
        between = "\n" if self._blocks else ""
        self._blocks += 1
        self.sink.write((between + "\n\n".join(pieces) + "\n").encode("utf-8", "backslashreplace"))


def heading(row: InputRow | BadRow, width: int) -> Text:
    """The heading above the texts of one prompt of several."""
    text = row.prompt or "" if isinstance(row, InputRow) else ""
    return widgets.header(width, f"prompt {row.name}", widgets.first_words(text, max(width - 24, 16)))


def _passage(one: Measured, label: str) -> shown.Passage:
    hypothesis = one.sequence.hypothesis
    state = stop_words(hypothesis.reason, hypothesis.cause)
    if one.leaves is None:
        return shown.Passage(one.sequence.shown, state, label)
    return shown.Passage(one.sequence.shown, state, label, one.leaves.character, one.leaves.token)


def _add(tally: RunStatistics, prompt: ComparedPrompt, by_run: dict[str, list[Measured]], names: Sequence[str]) -> None:
    if isinstance(prompt.row, BadRow):
        return
    tally.add({name: [one.values for one in by_run[name]] for name in names})
    for place, name in enumerate(names):
        for one in by_run[name]:
            tally.count(name, one.sequence.hypothesis.reason, len(one.sequence.token_ids))
        tally.seconds[name] += sum(result.decode_s for result in prompt.results(place))


def _cell(tally: RunStatistics, name: str, key: str, mean: float | None, *, intervals: bool) -> str:
    if intervals:
        return _interval(tally.interval(name, key), key, intervals=True)
    return shown.number(mean, _digits(key, mean))


def _digits(key: str, *values: float | None) -> int:
    """The decimals of a cell: none where what is counted came out whole."""
    whole = all(value is None or value == round(value) for value in values)
    return 0 if whole and key in ("tokens", "longest_repeat") else COLUMNS[key][1]


def _interval(interval: Interval | None, key: str, *, intervals: bool, sign: bool = False) -> str:
    if interval is None:
        return "–"
    ends = (interval.low, interval.high) if intervals else ()
    digits = _digits(key, interval.mean, *ends)
    text = shown.signed(interval.mean, digits) if sign else shown.number(interval.mean, digits)
    if not intervals:
        return text
    low, high = shown.number(interval.low, digits), shown.number(interval.high, digits)
    return f"{text} [{low}, {high}]"
