"""Statistics of runs over many prompts: means with confidence intervals, and win counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from genctl.comparing.metrics import Values, mean_of, perplexity
from genctl.comparing.outputs import ComparedPrompt, Measured

RESAMPLES = 1000
CONFIDENCE = 0.95
TIE = 1e-5  # nats per token: the rounding of another batch shape
_AT_ONCE = 4_000_000  # numbers drawn at a time


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval (`CONFIDENCE`); both ends equal the mean for a single value."""

    mean: float
    low: float
    high: float
    count: int


def bootstrap(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The percentile bootstrap of the mean (Efron 1979): `resamples` samples with replacement, repeatable by `seed`.

    Raises ValueError for no values.
    """
    if not values:
        raise ValueError("there is no mean of nothing")
    import numpy

    data = numpy.asarray(values, dtype=numpy.float64)
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
            return Interval(perplexity(mean.mean), perplexity(mean.high), perplexity(mean.low), mean.count)
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
