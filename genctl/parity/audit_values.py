"""What an audit of a trace finds, as values. Imports no torch."""

from __future__ import annotations

import math
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
    candidates: tuple[TriedCause, ...] = ()  # that cannot be told apart
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


# -- numbers that no model gives ---------------------------------------------------------------------------------------

LEAST = -9999.0  # servers write this, or less, for the logarithm of 0
WHOLE = 0.99  # what listed probabilities add up to, at least, where others in the list are 0


@dataclass
class _Seen:
    """Numbers of a kind: how many, the first, and whether all are equal."""

    first: str
    value: float
    count: int = 0
    is_constant: bool = True


@dataclass
class Impossible:
    """Finds what no model gives: a chosen token of probability 0, NaN, an id beyond the vocabulary.

    Of such a number the rest of an audit knows nothing. A log-probability above 0 counts where no cause explains it
    (a probability is one), and probabilities of 0 in a list where the others do not add up to 1, as they do behind a
    filter.
    """

    vocabulary: int
    tokens: int = 0  # chosen, so far
    untold: int = 0  # chosen, of which OpenAI says that they are not in the list
    zeros: int = 0  # listed
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def _add(self, kind: str, row: str, index: int | None, value: float) -> None:
        place = f"row {row}, its prompt" if index is None else f"row {row}, token {index + 1}"
        seen = self._seen.setdefault(kind, _Seen(place, value))
        seen.count += 1
        seen.is_constant &= seen.value == value

    def known(self, row: str, index: int | None, ids: Sequence[int]) -> int:
        """How many ids from the beginning are in the vocabulary; `index` is that of the first, None in a prompt."""
        for place, id in enumerate(ids):
            if id >= self.vocabulary:
                self._add("ids", row, None if index is None else index + place, id)
                return place
        return len(ids)

    def number(self, row: str, index: int, number: float | None, *, untold: bool) -> float:
        """A number of a chosen token, as far as a model can give it, else NaN. `untold`: its list lacks it."""
        self.tokens += 1
        if number is None:
            return math.nan
        if number == LEAST and untold:
            self.untold += 1
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
        zeros = len(numbers) - len(found) - len(wrong)
        self.zeros += zeros
        if zeros and math.fsum(math.exp(min(number, 0.0)) for number in found.values()) < WHOLE:
            self._add("masked", row, index, -math.inf)
        return found

    def judge(self, one: Audit) -> Audit:
        """An audit with this evidence: what no model gives is explained by nothing."""
        notes = [
            *one.notes,
            *([f"{self.untold} chosen tokens have {LEAST:g}, which OpenAI writes for a token that is not in the list: "
               "they are left out"] if self.untold else []),
            *([f"{self.zeros} listed tokens have probability 0: they are left out"] if self.zeros else []),
        ]  # fmt: skip
        words = [self._words(kind) for kind in ("zero", "nan", "ids") if kind in self._seen]
        if one.verdict != "explained":
            words += [self._words("above")] if "above" in self._seen and (words or one.verdict != "same") else []
            words += [self._words("masked")] if "masked" in self._seen else []
        if not words:
            return replace(one, notes=tuple(notes))
        rest = f"; without these: {one.verdict}, {one.reason}" if one.reason else ""
        return replace(one, verdict="unexplained", reason="; ".join(words) + rest, causes=(), explained=0.0,
                       notes=tuple(notes))  # fmt: skip

    def _words(self, kind: str) -> str:
        seen = self._seen[kind]
        what = {
            "zero": f"{seen.count} of {self.tokens} chosen tokens have probability 0",
            "nan": f"{seen.count} of {self.tokens} tokens have a number that is none (NaN or infinite)",
            "ids": f"{seen.count} ids are beyond the vocabulary, which ends at {self.vocabulary - 1}",
            "above": f"{seen.count} of {self.tokens} chosen tokens have a log-probability above 0",
            "masked": f"{seen.count} lists have tokens of probability 0, and the others do not add up to 1",
        }[kind]
        if kind == "zero" and seen.is_constant and seen.count > 1 and math.isfinite(seen.value):
            what += f", always written as {seen.value:g}, as some servers write the logarithm of 0"
        value = f", {seen.value:g}" if kind != "masked" else ""
        return f"{what} ({'first ' if seen.count > 1 else ''}{seen.first}{value})"
