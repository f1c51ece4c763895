"""Cut texts at stops: nothing from a stop string, token or pattern on is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        return any(named.stops or named.ids or named.pattern is not None for named in self.criteria)

    @cached_property
    def stops(self) -> tuple[str, ...]:
        return tuple(stop for named in self.criteria for stop in named.stops)

    @cached_property
    def beginnings(self) -> frozenset[str]:
        """The first characters of the stop strings."""
        return frozenset(stop[0] for stop in self.stops if stop)

    @cached_property
    def ids(self) -> frozenset[int]:
        """The tokens that stop."""
        return frozenset().union(*(named.ids for named in self.criteria))

    @cached_property
    def late(self) -> bool:
        """Whether nothing may be shown before the end: the beginning of a pattern's match is unknown until then."""
        return not self.keep and any(named.pattern is not None for named in self.criteria)

    @cached_property
    def marks(self) -> Marks:
        """The special tokens that stops name; equal for all criteria of a lane."""
        return next((named.marks for named in self.criteria if named.marks.ids), Marks())

    def text(self, hypothesis: events.Hypothesis) -> str:
        """The text of a finished sequence."""
        if hypothesis.reason != "stop":
            return hypothesis.text
        tokens = visible(hypothesis.tokens, self.criteria, self.keep)
        known = len(tokens) == len(hypothesis.tokens) and not self.marks.ids
        text = hypothesis.text if known else self.marks.read(self.decode, tokens)
        return self.marks.clean(cut(text, self.criteria, self.keep)[0])


class _Row:
    """The part of a row's text that was released."""

    def __init__(self, guard: StopTrimmer) -> None:
        self.guard = guard
        self.hold = HoldBack(guard.stops, guard.keep)
        self.pushed = self.released = 0  # characters
        self.written: tuple[events.Token, ...] = ()  # the newest tokens, as they are shown

    def fork(self) -> _Row:
        new = _Row.__new__(_Row)
        new.guard, new.hold, new.written = self.guard, self.hold.fork(), ()
        new.pushed, new.released = self.pushed, self.released
        return new

    def grow(self, row: events.Row | events.Ended) -> _Row:
        """Take a row's new tokens: `written` has them with the text that no stop can remove any more."""
        tokens, same = [], True
        for token in row.written:
            text = self._release(token)
            if text != token.text:
                token, same = dataclasses.replace(token, text=text), False
            tokens.append(token)
        self.written = row.written if same else tuple(tokens)
        return self

    def _release(self, token: events.Token) -> str:
        guard, marks, text = self.guard, self.guard.marks, token.text
        if guard.late or (not guard.keep and token.id in guard.ids):
            return ""
        if marks.ids:
            text = marks.clean(self.hold.push(text + marks.ids.get(token.id, "")))
        elif self.pushed > self.released or self.hold.stopped or not guard.beginnings.isdisjoint(text):
            self.pushed += len(text)
            text = self.hold.push(text)
        else:  # nothing is held back and no stop string begins here
            self.pushed += len(text)
        self.released += len(text)
        return text

    def end(self, row: events.Ended) -> events.Ended:
        """The ended row: its last token gets the text that was held back."""
        text = self.guard.text(row.hypothesis)
        written, rest = self.written, text[self.released :]
        if written and rest:
            written = (*written[:-1], dataclasses.replace(written[-1], text=written[-1].text + rest))
        return dataclasses.replace(row, written=written, hypothesis=dataclasses.replace(row.hypothesis, text=text))


def trimmed(stream: Iterable[events.Event], guards: Mapping[str, StopTrimmer]) -> Iterator[events.Event]:
    """The same events, with texts cut at stops. `guards` are the lanes whose stops cut text; it may grow meanwhile."""
    states = events.RowStates(lambda lane: _Row(guards[lane]), _Row.grow, _Row.fork)

    def finish(lane: str, whole: events.Hypothesis) -> events.Hypothesis:
        return dataclasses.replace(whole, text=guards[lane].text(whole))

    return events.reworded(stream, states, lambda row: row.written, lambda end, row: row.end(end), finish, guards)
