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
WHOLE = 0.99  # what listed probabilities add up to, at least, where others in the list are 0


@dataclass
class _Kind:
    """Numbers of a kind: how many there are, the first, and whether all are equal."""

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
    missing: int = 0  # of these, without a number
    unlisted: int = 0  # chosen, of which OpenAI says that they are not in the list
    zeros: int = 0  # listed
    _kinds: dict[str, _Kind] = field(default_factory=dict)

    def _add(self, kind: str, row: str, index: int | None, value: float) -> None:
        place = f"row {row}, its prompt" if index is None else f"row {row}, token {index + 1}"
        found = self._kinds.setdefault(kind, _Kind(place, value))
        found.count += 1
        found.is_constant &= found.value == value

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
        zeros = len(numbers) - len(found) - len(wrong)
        self.zeros += zeros
        if zeros and math.fsum(math.exp(min(number, 0.0)) for number in found.values()) < WHOLE:
            self._add("masked", row, index, -math.inf)
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
        counts = {
            "zero": True, "nan": True, "ids": True, "above": one.verdict == "unexplained",
            "masked": one.verdict != "explained",
        }  # fmt: skip
        kinds = [kind for kind, does in counts.items() if does and kind in self._kinds]
        if not kinds:
            return one
        found = [*map(self._words, kinds)]
        if one.reason:
            is_sure = not {"zero", "nan", "ids"}.isdisjoint(kinds)
            found.append((f"all else is {one.verdict}: " if is_sure else "") + one.reason)
        return replace(one, verdict="unexplained", reason="; ".join(found), causes=(), explained=0.0)

    def _words(self, kind: str) -> str:
        own = self._kinds[kind]
        of = f"{own.count} of {self.tokens}"
        what = {
            "zero": f"probability 0 for {of} chosen tokens",
            "nan": f"NaN or infinity for {of} tokens",
            "ids": f"ids beyond the vocabulary (0 to {self.vocabulary - 1}), {own.count}",
            "above": f"a log-probability above 0 for {of} chosen tokens",
            "masked": f"lists with probabilities of 0 whose others do not add up to 1, for {of} tokens",
        }[kind]
        if kind == "zero" and own.is_constant and own.count > 1 and math.isfinite(own.value):
            what += f", always {own.value:g}, as some servers write the logarithm of 0"
        value = f", {own.value:g}" if kind != "masked" else ""
        return f"{what} (the first: {own.first}{value})"
