"""What an audit of a trace finds, as values, and numbers that no model gives. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from genctl.parity.causes import Cause
from genctl.parity.values import Text


@dataclass(frozen=True)
class AuditPosition:
    """A token before and after the explanation, in nats and in units of the noise."""

    id: str
    index: int
    token: int
    number: float  # as written
    reference: float  # the log-probability in the reference
    before: float
    after: float
    ratio: float  # of `before` to noise
    ratio_after: float


@dataclass(frozen=True)
class TriedCause:
    """A line of the report."""

    causes: tuple[str, ...]
    words: str
    explained: float
    log_likelihood: float  # over that of no cause
    ratio: float


@dataclass(frozen=True)
class Audit:
    """All that is found about a trace."""

    trace: str
    reference: str
    verdict: str  # same, explained, unexplained
    reason: str
    causes: tuple[Cause, ...] = ()
    candidates: tuple[TriedCause, ...] = ()  # between which the numbers do not decide
    tried: tuple[TriedCause, ...] = ()
    positions: tuple[AuditPosition, ...] = ()
    texts: tuple[Text, ...] = ()
    explained: float = 0.0
    rows_left: int = 0
    first: tuple[str, int] | None = None  # the first position with a difference
    ratio: float = math.nan  # median of the difference to noise, before an explanation
    allowed: float = math.nan
    noise: float = math.nan  # nats, median
    notes: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{self.trace} against {self.reference}: {self.verdict}>"


# -- numbers that no model gives ---------------------------------------------------------------------------------------

LEAST = -9999.0  # servers write this, or less, for the logarithm of 0


@dataclass
class Impossible:
    """Finds what no model gives: a chosen token of probability 0, NaN, an id beyond the vocabulary.

    A log-probability above 0 counts where no cause explains it: a probability is one.
    """

    vocabulary: int
    tokens: int = 0  # chosen, so far
    missing: int = 0  # of these, without a number
    unlisted: int = 0  # chosen, of which OpenAI says that they are not in the list
    zeros: int = 0  # listed
    _firsts: dict[str, str] = field(default_factory=dict)  # the first of each kind
    _counts: Counter[str] = field(default_factory=Counter)

    def _add(self, kind: str, row: str, index: int | None, value: float) -> None:
        place = "its prompt" if index is None else f"token {index + 1}"
        self._firsts.setdefault(kind, f"row {row}, {place}, {value:g}")
        self._counts[kind] += 1

    def known(self, row: str, index: int | None, ids: Sequence[int]) -> int:
        """How many ids from the beginning are in the vocabulary; `index` is that of the first, None in a prompt."""
        for place, id in enumerate(ids):
            if id >= self.vocabulary:
                self._add("ids", row, None if index is None else index + place, id)
                return place
        return len(ids)

    def number(self, row: str, index: int, number: float | None, *, unlisted: bool) -> float:
        """A number of a chosen token, as far as a model can give it, else NaN. `unlisted`: its list lacks it."""
        self.tokens += 1
        if number is None:
            self.missing += 1
        elif number == LEAST and unlisted:
            self.unlisted += 1
        elif not LEAST < number < math.inf:
            self._add("zero" if number <= LEAST else "nan", row, index, number)
        else:
            if number > 0:
                self._add("above", row, index, number)
            return number
        return math.nan

    def listed(self, row: str, index: int, numbers: Mapping[int, float]) -> dict[int, float]:
        """The numbers of a list, and of the chosen token, that a model can give."""
        wrong = [number for number in numbers.values() if math.isnan(number) or number == math.inf]
        if wrong:
            self._add("nan", row, index, wrong[0])
        found = {other: number for other, number in numbers.items() if LEAST < number < math.inf}
        self.zeros += len(numbers) - len(found) - len(wrong)
        return found

    def judge(self, one: Audit) -> Audit:
        """An audit with this evidence: no cause explains it."""
        notes = {
            f"{self.missing} of {self.tokens} tokens have no number": self.missing,
            f"{self.unlisted} chosen tokens have {LEAST:g}, OpenAI's number of a token that its list lacks": (
                self.unlisted
            ),
            f"{self.zeros} listed tokens have probability 0: they are left out": self.zeros,
        }
        one = replace(one, notes=(*one.notes, *(note for note, count in notes.items() if count)))
        words = {
            "zero": "probability 0 for {} of {} chosen tokens",
            "nan": "NaN or infinity for {} of {} tokens",
            "ids": f"ids beyond the vocabulary (0 to {self.vocabulary - 1}), {{}}",
            "above": "a log-probability above 0 for {} of {} chosen tokens",
        }
        if one.verdict != "unexplained":
            del words["above"]
        found = [
            f"{sentence.format(self._counts[kind], self.tokens)} (the first: {self._firsts[kind]})"
            for kind, sentence in words.items()
            if kind in self._firsts
        ]
        if not found:
            return one
        if one.reason:
            found.append((f"all else is {one.verdict}: " if self._firsts.keys() - {"above"} else "") + one.reason)
        return replace(one, verdict="unexplained", reason="; ".join(found), causes=(), explained=0.0)
