"""How many tokens to draft: a fixed number, or the number that pays.

Drafts pay if the tokens that are accepted outweigh the longer pass that checks them and the passes that draft them
(Leviathan et al. 2023, arXiv:2211.17192, section 3.3). The first token of a draft and those after it are judged apart:
prompt lookup often misses at once, but rarely in the middle of a text that it copies. Drafts after a long match are
judged apart from those after a short one.

Nothing here reads the clock: prices come from a table (`decode.pass_prices`, which also weighs the drafts of a pass).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Schedule: TypeAlias = Literal["price", "constant"]

MEMORY = 0.9  # weight of an older trial against the next
PAUSE = 8  # steps before a drafter that does not pay is tried again; doubled each time
LONGEST_PAUSE = 128
PATIENCE = 12  # steps in a row in which a drafter that costs nothing is asked, though nothing pays,
SELDOM = 8  # and after how many it is asked again then
# The first guesses of how often the first token of a draft is right, and the next one after a right one: of a model,
# and after matches of 1, 2 to 3, 4 to 7, … tokens.
FIRST = (0.5, 0.3, 0.45, 0.6, 0.75, 0.85)
LATER = (0.7, 0.6, 0.7, 0.8, 0.85, 0.9)


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
class Rates:
    """How often drafts are right, by the number of tokens that agree before them; 0 where nothing is compared."""

    first: dict[int, Rate] = field(default_factory=dict)  # first tokens of drafts
    later: dict[int, Rate] = field(default_factory=dict)  # others, after an accepted one

    def _of(self, match: int) -> tuple[Rate, Rate]:
        place = min(match.bit_length(), len(FIRST) - 1)
        if place not in self.first:
            self.first[place], self.later[place] = Rate.guess(FIRST[place]), Rate.guess(LATER[place])
        return self.first[place], self.later[place]

    def observe(self, match: int, drafted: int, accepted: int) -> None:
        """The outcome of a draft of at least one token."""
        first, later = self._of(match)
        first.observe(min(accepted, 1), int(accepted == 0))
        later.observe(max(accepted - 1, 0), int(0 < accepted < drafted))

    def promise(self, match: int, count: int) -> list[float]:
        """How many tokens of a draft of 1, 2, … `count` tokens are expected to be right."""
        first, later = self._of(match)
        likely, following, promised, total = first.value, later.value, [], 0.0
        for _ in range(count):
            total += likely
            likely *= following
            promised.append(total)
        return promised


@dataclass
class Pauses:
    """When a drafter that does not pay is asked again."""

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
        return self.waited > PATIENCE and self.waited % SELDOM > 0
