"""How many tokens to draft: a fixed number, or the number that pays.

Drafts pay if the tokens that are accepted outweigh the longer pass that checks them and the passes that draft them
(Leviathan et al. 2023, arXiv:2211.17192, section 3.3). The first token of a draft and those after it are judged apart:
prompt lookup often misses at once, but rarely in the middle of a text that it copies.

No schedule reads the clock: prices come from a table (`decode.pass_prices`), so equal runs draft equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

Schedule: TypeAlias = Literal["price", "constant"]

MEMORY = 0.9  # weight of an older trial against the next
GAIN = 1.02  # tokens for the time of one token that a draft must promise: less is lost beside the passes
PAUSE = 8  # steps before a drafter that does not pay is tried again; doubled each time
LONGEST_PAUSE = 128


class DraftLength(Protocol):
    """The numbers of drafted tokens of one lane."""

    def next(self) -> int:
        """How many tokens to draft now, 0 for none. Called once for each pass."""
        ...

    def observe(self, drafted: int, accepted: int) -> None:
        """The outcome of a draft of at least one token."""
        ...


@dataclass
class Constant:
    """Always the same number."""

    count: int

    def next(self) -> int:
        return self.count

    def observe(self, drafted: int, accepted: int) -> None:
        pass


@dataclass
class Rate:
    """A share of trials that succeed. Newer trials weigh more; the first guess counts as one trial."""

    successes: float
    failures: float

    @classmethod
    def guess(cls, rate: float) -> Rate:
        return cls(rate, 1.0 - rate)

    @property
    def value(self) -> float:
        return self.successes / (self.successes + self.failures)

    def observe(self, successes: int, failures: int) -> None:
        """`successes` trials that succeed, then `failures` that do not."""
        for success in (True,) * successes + (False,) * failures:
            self.successes = self.successes * MEMORY + success
            self.failures = self.failures * MEMORY + (not success)


@dataclass
class Priced:
    """As many tokens as pay, at most `most`; none while drafts do not pay.

    A drafter that costs nothing shows without being checked whether it would be right again (`Assisted` observes what
    it proposes). Any other drafts one token now and then, each time after a longer pause.
    """

    most: int
    check: Callable[[int], float]  # the price of a pass that checks so many drafts, in steps of one token
    draft: float = 0.0  # the price of drafting a token, in the same unit
    first: Rate = field(default_factory=lambda: Rate.guess(0.5))  # first tokens of drafts that are accepted
    later: Rate = field(default_factory=lambda: Rate.guess(0.7))  # others, after an accepted one
    pause: int = PAUSE
    waited: int = 0

    def __post_init__(self) -> None:
        self.prices = [self.check(count) + count * self.draft for count in range(1, self.most + 1)]

    def next(self) -> int:
        gains = self.gains()
        best = max(gains)
        if best > GAIN:
            self.pause, self.waited = PAUSE, 0
            return gains.index(best) + 1
        self.waited += 1
        if not self.draft or self.waited <= self.pause:
            return 0
        self.pause, self.waited = min(2 * self.pause, LONGEST_PAUSE), 0
        return 1

    def gains(self) -> list[float]:
        """Expected tokens of a pass with 1, 2, … drafts, for the time of one token without."""
        likely, later, tokens = self.first.value, self.later.value, 1.0
        gains = []
        for price in self.prices:
            tokens += likely
            likely *= later
            gains.append(tokens / price)
        return gains

    def observe(self, drafted: int, accepted: int) -> None:
        self.first.observe(min(accepted, 1), int(accepted == 0))
        self.later.observe(max(accepted - 1, 0), int(0 < accepted < drafted))
