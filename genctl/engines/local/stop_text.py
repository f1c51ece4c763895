"""Cut texts at stops: only the text before a stop string, token or pattern is shown."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from genctl import events
from genctl.decode.stopping.build import NamedCriterion, cut, visible
from genctl.decode.stopping.marks import Marks
from genctl.decode.stopping.trim import HoldBack


@dataclass(frozen=True)
class StopTrimmer:
    """The stops of one lane."""

    criteria: tuple[NamedCriterion, ...]
    keep: bool
    decode: Callable[[Sequence[int]], str]

    @property
    def needed(self) -> bool:
        """Whether any criterion cuts text."""
        return any(criterion.stops or criterion.ids or criterion.pattern is not None for criterion in self.criteria)

    @cached_property
    def stops(self) -> tuple[str, ...]:
        return tuple(stop for criterion in self.criteria for stop in criterion.stops)

    @cached_property
    def beginnings(self) -> frozenset[str]:
        """The first characters of the stop strings."""
        return frozenset(stop[0] for stop in self.stops if stop)

    @cached_property
    def ids(self) -> frozenset[int]:
        """The tokens that stop."""
        return frozenset().union(*(criterion.ids for criterion in self.criteria))

    @cached_property
    def late(self) -> bool:
        """Whether nothing may be shown before the end: the beginning of a pattern's match is unknown until then."""
        return not self.keep and any(criterion.pattern is not None for criterion in self.criteria)

    @cached_property
    def marks(self) -> Marks:
        """The special tokens that stops name; equal for all criteria of a lane."""
        return next((criterion.marks for criterion in self.criteria if criterion.marks.ids), Marks())

    def held(self) -> HeldText:
        """The text of a new row."""
        return HeldText(self)

    def text(self, hypothesis: events.Hypothesis) -> str:
        """The text of a finished sequence."""
        if hypothesis.reason != "stop":
            return hypothesis.text
        tokens = visible(hypothesis.tokens, self.criteria, self.keep)
        known = len(tokens) == len(hypothesis.tokens) and not self.marks.ids
        text = hypothesis.text if known else self.marks.read(self.decode, tokens)
        return self.marks.clean(cut(text, self.criteria, self.keep)[0])


class HeldText:
    """The text of one row. Holds back the end as long as a stop could still remove it."""

    def __init__(self, trimmer: StopTrimmer) -> None:
        self.trimmer = trimmer
        self.hold = HoldBack(trimmer.stops, trimmer.keep)
        self.pushed = self.released = 0  # characters so far

    def fork(self) -> HeldText:
        """A second row in the same state."""
        twin = copy.copy(self)
        twin.hold = self.hold.fork()
        return twin

    def release(self, token: int, text: str) -> str:
        """Add a token and its text. Returns the text that no stop can remove any more."""
        trimmer, marks = self.trimmer, self.trimmer.marks
        if trimmer.late or (not trimmer.keep and token in trimmer.ids):
            return ""
        if marks.ids:
            text = marks.clean(self.hold.push(text + marks.ids.get(token, "")))
        elif self.pushed > self.released or self.hold.stopped or not trimmer.beginnings.isdisjoint(text):
            self.pushed += len(text)
            text = self.hold.push(text)
        else:  # nothing is held back and no stop string begins here
            self.pushed += len(text)
        self.released += len(text)
        return text
