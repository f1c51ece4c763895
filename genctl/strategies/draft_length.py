"""How many tokens to draft: a fixed number, or the number that pays.

Drafts pay if the tokens that are accepted outweigh the longer pass that checks them and the passes that draft them
(Leviathan et al. 2023, arXiv:2211.17192, section 3.3). Each drafted token has the rate of its kind: of a model, those
that begin a draft and those that follow a right one; without a model, see `suffixes.Followed`.

Nothing here reads the clock: prices come from a table (`decode.pass_prices`, which also weighs the drafts of a pass).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from genctl.decode.pass_prices import PassPrice

MEMORY = 0.97  # weight of an older trial against the next
PAUSE = 8  # steps before a drafter that does not pay is tried again; doubled each time
LONGEST_PAUSE = 128
PATIENCE = 12  # steps in a row in which a drafter without a model is called although nothing pays
SELDOM = 32  # then it is called once in so many steps, at most: the longer a step takes, the more often
FIRST, LATER = 0.5, 0.7  # guesses of how often a model's first token is right, and the next one after a right one


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


def promise(rates: Sequence[Rate]) -> list[float]:
    """How many tokens of a draft of 1, 2, … tokens are expected to be right."""
    likely, promised, total = 1.0, [], 0.0
    for rate in rates:
        likely *= rate.value
        total += likely
        promised.append(total)
    return promised


def learn(rates: Sequence[Rate], right: int) -> None:
    """The first `right` tokens of a draft with these rates were right, and the one after them was not."""
    for rate in rates[:right]:
        rate.observe(1, 0)
    for rate in rates[right : right + 1]:
        rate.observe(0, 1)


def seldom(price: PassPrice) -> int:
    """Where nothing pays, a drafter without a model is called once in so many steps."""
    return max(1, min(int(100 * price.draft_overhead), SELDOM))


@dataclass
class Pauses:
    """When a drafter that does not pay is called again."""

    seldom: int = 1
    pause: int = PAUSE
    waited: int = 0

    def end(self) -> None:
        """It pays."""
        self.pause, self.waited = PAUSE, 0

    def over(self) -> bool:
        """Whether a drafter that costs something is tried in this step, each time after a longer pause."""
        self.waited += 1
        if self.waited <= self.pause:
            return False
        self.pause, self.waited = min(2 * self.pause, LONGEST_PAUSE), 0
        return True

    def rests(self) -> bool:
        """Whether one that costs nothing but its own work is left alone in this step."""
        self.waited += 1
        return self.waited > PATIENCE and self.waited % self.seldom > 0
