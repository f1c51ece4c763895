"""Statistics of runs over many prompts: means with confidence intervals and win counts, and tables of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from genctl.comparing import metrics
from genctl.comparing.metrics import Values, mean_of, perplexity
from genctl.comparing.outputs import Measured, number, signed
from genctl.errors import percent

RESAMPLES = 1000
CONFIDENCE = 0.95
LEAST = 10  # values for an interval: the bootstrap of two or three is the range from the smallest to the largest
LEGEND = f"{percent(CONFIDENCE, 0)} intervals from {LEAST} prompts on"
SPEED = "tok/s"  # the heading of measured speeds, which are equal only by chance
TIE = 1e-5  # nats per token: differences by rounding in another batch shape
_AT_ONCE = 4_000_000  # numbers drawn at a time


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval (`CONFIDENCE`); no interval for fewer than `LEAST` values."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @property
    def ends(self) -> tuple[float, ...]:
        """Both ends, if there is an interval."""
        return () if self.low is None or self.high is None else (self.low, self.high)


def bootstrap(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The percentile bootstrap of the mean (Efron 1979): `resamples` samples with replacement, reproducible by `seed`.

    Raises ValueError if there are no values.
    """
    if not values:
        raise ValueError("there is no mean of nothing")
    import numpy

    data = numpy.asarray(values, dtype=numpy.float64)
    if len(data) < LEAST:
        return Interval(float(data.mean()), None, None, len(data))
    random = numpy.random.default_rng(seed)
    means = numpy.empty(resamples)
    block = max(_AT_ONCE // len(data), 1)
    for start in range(0, resamples, block):
        count = min(block, resamples - start)
        means[start : start + count] = data[random.integers(0, len(data), (count, len(data)))].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(means, [tail, 1 - tail])
    return Interval(float(data.mean()), float(low), float(high), len(data))


@dataclass
class RunNumbers:
    """The numbers of one run by prompt: means over the sequences and seeds of each prompt."""

    prompts: list[Values | None] = field(default_factory=list)  # None if the run failed on the prompt
    reasons: Counter[str] = field(default_factory=Counter)  # why sequences ended
    tokens: int = 0
    seconds: float = 0.0  # decode time of its lanes
    corpus: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)  # texts with their references

    def add(self, texts: Sequence[Values]) -> None:
        """Add a prompt: the numbers of its sequences, empty if it failed."""
        self.prompts.append(mean_of(texts) if texts else None)

    def take(self, texts: Sequence[Measured], seconds: float, references: tuple[str, ...]) -> None:
        """Add a prompt with all measurements of its texts, and the seconds in which they were decoded."""
        self.add([text.values for text in texts])
        self.reasons.update(text.sequence.finish_reason for text in texts)
        self.tokens += sum(text.sequence.hypothesis.length for text in texts)
        self.seconds += seconds
        self.corpus += [(text.sequence.text, references) for text in texts if references]

    def column(self, key: str) -> list[float | None]:
        """The values of one metric, by prompt."""
        return [None if values is None else values.get(key) for values in self.prompts]

    def interval(self, key: str) -> Interval | None:
        """The mean of one metric over the prompts, with its interval; perplexity is computed on its logarithm."""
        if key == "perplexity":
            mean = self.interval("mean_logprob")
            if mean is None:
                return None
            low, high = map(perplexity, reversed(mean.ends)) if mean.ends else (None, None)
            return Interval(perplexity(mean.mean), low, high, mean.count)
        values = [value for value in self.column(key) if value is not None]
        return bootstrap(values) if values else None

    def differences(self, other: RunNumbers, key: str) -> list[float]:
        """One metric minus the other run's, for each prompt where both have it."""
        pairs = zip(self.column(key), other.column(key), strict=True)
        return [one - base for one, base in pairs if one is not None and base is not None]

    def wins(self, other: RunNumbers) -> tuple[int, int, int]:
        """The numbers of prompts, of those that both have, on which the mean log-probability is higher, tied, lower."""
        ahead = self.differences(other, "mean_logprob")
        won, tied = sum(value > TIE for value in ahead), sum(abs(value) <= TIE for value in ahead)
        return won, tied, len(ahead) - tied - won


# key -> heading, digits, whether the column is omitted if no run has a value
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
    """A table; the first column has the row labels."""

    title: str
    headings: list[str]
    rows: list[list[str]]


def tables(runs: Mapping[str, RunNumbers], baseline: str | None, *, several: bool) -> Iterator[Table]:
    """Tables over the prompts of all runs: means with their intervals, and differences to the run `baseline`.

    With `several` prompts there are more tables: scores of all texts as one corpus, and wins.
    """
    keys = [
        key
        for key, (_, _, optional) in COLUMNS.items()
        if not optional or any(value is not None for run in runs.values() for value in run.column(key))
    ]
    heads = [COLUMNS[key][0] for key in keys]
    rows = []
    for name, run in runs.items():
        cells = [_interval(run.interval(key), key) for key in keys]
        alone = run.reasons.total() == 1
        ended = ", ".join(reason if alone else f"{count} {reason}" for reason, count in run.reasons.items())
        speed = run.tokens / run.seconds if run.seconds > 0 else None
        rows.append([name, *cells, number(speed, 0), ended or "–"])
    yield Table("", ["run", *heads, SPEED, "ended by"], rows)
    if baseline is not None and len(runs) > 1:
        rows = []
        for name, run in runs.items():
            if name == baseline:
                continue
            found = [(key, run.differences(runs[baseline], key)) for key in keys]
            rows.append([name, *(_interval(bootstrap(each) if each else None, key, sign=True) for key, each in found)])
        yield Table(f"minus {baseline}", ["run", *heads], rows)
    if several and any(run.corpus for run in runs.values()):
        wanted = ("chrf", "bleu", "ter")
        rows = []
        for name, run in runs.items():
            if run.corpus:
                scores = metrics.corpus(*zip(*run.corpus, strict=True))
                rows.append([name, *(number(scores[key], 1) for key in wanted)])
        heads = ["run", *(COLUMNS[key][0] for key in wanted)]
        yield Table("against the references, all texts as one corpus", heads, rows)
    if several and len(runs) > 1:
        rows = []
        for name, run in runs.items():
            others = ["·" if run is other else "/".join(map(str, run.wins(other))) for other in runs.values()]
            rows.append([name, *others])
        yield Table("prompts won/tied/lost by mean log-probability, line against column", ["run", *runs], rows)


def _interval(interval: Interval | None, key: str, *, sign: bool = False) -> str:
    """The cell for a mean with its interval. Counts have no decimals if all values are whole numbers."""
    if interval is None:
        return "–"
    is_count = key in ("tokens", "longest_repeat")
    is_whole = is_count and all(value == round(value) for value in (interval.mean, *interval.ends))
    digits = 0 if is_whole else COLUMNS[key][1]
    text = signed(interval.mean, digits) if sign else number(interval.mean, digits)
    return f"{text} [{', '.join(number(end, digits) for end in interval.ends)}]" if interval.ends else text
