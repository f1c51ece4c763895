"""The tables of a comparison as cells: the numbers of each run, differences, the corpus, and who is ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from genctl.comparing import references
from genctl.comparing.outputs import number, signed
from genctl.comparing.statistics import Interval, RunStatistics

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


class Table(NamedTuple):
    """A table whose first column names its rows."""

    title: str
    headings: list[str]
    rows: list[list[str]]


def tables(statistics: RunStatistics, baseline: str | None, *, intervals: bool) -> Iterator[Table]:
    """The tables over the prompts of `statistics`; with `intervals` means have theirs, and there are more tables."""
    runs = statistics.runs
    means = {run: statistics.means(run) for run in runs}
    keys = [
        key
        for key, (_, _, optional) in COLUMNS.items()
        if not optional or any(mean.get(key) is not None for mean in means.values())
    ]
    heads = [COLUMNS[key][0] for key in keys]
    rows = []
    for run in runs:
        cells = [_cell(statistics, run, key, means[run].get(key), intervals=intervals) for key in keys]
        reasons = statistics.reasons[run]
        alone = sum(reasons.values()) == 1
        ended = ", ".join(reason if alone else f"{count} {reason}" for reason, count in reasons.items())
        rows.append([run, *cells, number(statistics.speed(run), 0), ended or "–"])
    yield Table("", ["run", *heads, "tok/s", "ended by"], rows)
    if baseline is not None and len(runs) > 1:
        rows = []
        for run in runs:
            differences = [statistics.difference(run, baseline, key) for key in keys] if run != baseline else []
            cells = [
                _interval(difference, key, intervals=intervals, sign=True)
                for key, difference in zip(keys, differences, strict=False)
            ]
            rows += [[run, *cells]] if cells else []
        yield Table(f"minus {baseline}", ["run", *heads], rows)
    if intervals and any(statistics.corpus.values()):
        wanted = ("chrf", "bleu", "ter")
        rows = []
        for run, texts in statistics.corpus.items():
            if texts:
                scores = references.corpus([text for text, _ in texts], [expected for _, expected in texts])
                rows.append([run, *(number(scores[key], 1) for key in wanted)])
        heads = ["run", *(COLUMNS[key][0] for key in wanted)]
        yield Table("against the references, all texts as one corpus", heads, rows)
    if intervals and len(runs) > 1:
        rows = []
        for run in runs:
            others = [None if run == other else statistics.wins(run, other) for other in runs]
            rows.append([run, *("·" if record is None else "/".join(map(str, record)) for record in others)])
        title = "prompts won/tied/lost by mean log-probability, line against column"
        yield Table(title, ["run", *runs], rows)


def _cell(statistics: RunStatistics, run: str, key: str, mean: float | None, *, intervals: bool) -> str:
    if intervals:
        return _interval(statistics.interval(run, key), key, intervals=True)
    return number(mean, _digits(key, mean))


def _digits(key: str, *values: float | None) -> int:
    """The decimals of a cell: none where every count is a whole number."""
    whole = all(value is None or value == round(value) for value in values)
    return 0 if whole and key in ("tokens", "longest_repeat") else COLUMNS[key][1]


def _interval(interval: Interval | None, key: str, *, intervals: bool, sign: bool = False) -> str:
    if interval is None:
        return "–"
    ends = (interval.low, interval.high) if intervals else ()
    digits = _digits(key, interval.mean, *ends)
    text = signed(interval.mean, digits) if sign else number(interval.mean, digits)
    return f"{text} [{number(interval.low, digits)}, {number(interval.high, digits)}]" if intervals else text
