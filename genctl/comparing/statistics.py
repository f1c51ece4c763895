"""Statistics of runs over many prompts: means with confidence intervals, and win counts; and as tables of cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from genctl.comparing import metrics
from genctl.comparing.metrics import Values, mean_of, perplexity
from genctl.comparing.outputs import ComparedPrompt, Measured, number, signed
from genctl.errors import percent

RESAMPLES = 1000
CONFIDENCE = 0.95
LEAST = 10  # values for an interval: the bootstrap of two or three is the range from the smallest to the largest
LEGEND = f"{percent(CONFIDENCE, 0)} intervals from {LEAST} prompts on"
TIE = 1e-5  # nats per token: the rounding of another batch shape
_AT_ONCE = 4_000_000  # numbers drawn at a time


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval (`CONFIDENCE`), which fewer than `LEAST` values do not have."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @property
    def ends(self) -> tuple[float, ...]:
        """Both ends, if there is an interval."""
        return () if self.low is None or self.high is None else (self.low, self.high)


def bootstrap(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The percentile bootstrap of the mean (Efron 1979): `resamples` samples with replacement, repeatable by `seed`.

    Raises ValueError for no values.
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
class RunStatistics:
    """The numbers of each run, prompt by prompt: means over the sequences and seeds of a prompt."""

    runs: Sequence[str]
    prompts: dict[str, list[Values | None]] = field(default_factory=dict)
    reasons: dict[str, dict[str, int]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    corpus: dict[str, list[tuple[str, tuple[str, ...]]]] = field(default_factory=dict)  # texts with their references

    def __post_init__(self) -> None:
        for run in self.runs:
            self.prompts[run], self.reasons[run], self.corpus[run] = [], {}, []
            self.tokens[run], self.seconds[run] = 0, 0.0

    def take(self, prompt: ComparedPrompt, by_run: Mapping[str, Sequence[Measured]]) -> None:
        """One prompt with all that is measured of its texts."""
        self.add({run: [text.values for text in by_run[run]] for run in self.runs})
        for place, run in enumerate(self.runs):
            for text in by_run[run]:
                self.count(run, text.sequence.finish_reason, text.sequence.hypothesis.length)
                if prompt.references:
                    self.corpus[run].append((text.sequence.text, prompt.references))
            self.seconds[run] += sum(result.decode_s for result in prompt.results(place))

    def add(self, measured: Mapping[str, Sequence[Values]]) -> None:
        """One prompt: for each run the numbers of its sequences, none if it failed."""
        for run in self.runs:
            values = measured.get(run, ())
            self.prompts[run].append(mean_of(values) if values else None)

    def count(self, run: str, reason: str, tokens: int) -> None:
        """One sequence and why it ended."""
        self.reasons[run][reason] = self.reasons[run].get(reason, 0) + 1
        self.tokens[run] += tokens

    def means(self, run: str) -> Values:
        """The means over all prompts."""
        return mean_of([values for values in self.prompts[run] if values is not None])

    def speed(self, run: str) -> float | None:
        """Tokens per second while the run's lanes were decoded; None without a time."""
        return self.tokens[run] / self.seconds[run] if self.seconds[run] > 0 else None

    def column(self, run: str, key: str) -> list[float | None]:
        """One number, prompt by prompt."""
        return [None if values is None else values.get(key) for values in self.prompts[run]]

    def interval(self, run: str, key: str) -> Interval | None:
        """The mean of one number over the prompts, with its interval; the perplexity through its logarithm."""
        if key == "perplexity":
            mean = self.interval(run, "mean_logprob")
            if mean is None:
                return None
            low, high = map(perplexity, reversed(mean.ends)) if mean.ends else (None, None)
            return Interval(perplexity(mean.mean), low, high, mean.count)
        values = [value for value in self.column(run, key) if value is not None]
        return bootstrap(values) if values else None

    def difference(self, run: str, base: str, key: str) -> Interval | None:
        """The mean paired difference to another run, with its interval."""
        pairs = zip(self.column(run, key), self.column(base, key), strict=True)
        differences = [a - b for a, b in pairs if a is not None and b is not None]
        return bootstrap(differences) if differences else None

    def wins(self, run: str, other: str) -> tuple[int, int, int]:
        """How often `run` has the higher mean log-probability, the same and a lower one, by the prompts of both."""
        pairs = zip(self.column(run, "mean_logprob"), self.column(other, "mean_logprob"), strict=True)
        ahead = [a - b for a, b in pairs if a is not None and b is not None]
        won, tied = sum(value > TIE for value in ahead), sum(abs(value) <= TIE for value in ahead)
        return won, tied, len(ahead) - tied - won


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
                scores = metrics.corpus([text for text, _ in texts], [expected for _, expected in texts])
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
    ends = interval.ends if intervals else ()
    digits = _digits(key, interval.mean, *ends)
    text = signed(interval.mean, digits) if sign else number(interval.mean, digits)
    return f"{text} [{', '.join(number(end, digits) for end in ends)}]" if ends else text
