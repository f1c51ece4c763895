"""What a stop takes away: texts are cut where a stop string, token or pattern begins, and never shown beyond it."""

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

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(stop for named in self.criteria for stop in named.stops)

    @property
    def late(self) -> bool:
        """Whether nothing may be shown before the end: where a pattern will begin cannot be known."""
        return not self.keep and any(named.pattern is not None for named in self.criteria)

    @cached_property
    def marks(self) -> Marks:
        """The special tokens that stops name; all criteria of a lane have the same."""
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
    """What of a row's text has been released."""

    def __init__(self, guard: StopTrimmer) -> None:
        self.guard = guard
        self.hold = HoldBack(guard.stops, guard.keep)
        self.released = 0

    def fork(self) -> _Row:
        new = _Row.__new__(_Row)
        new.guard, new.hold, new.released = self.guard, self.hold.fork(), self.released
        return new

    def push(self, tokens: Iterable[events.Token]) -> tuple[events.Token, ...]:
        """The tokens with only that text which no stop can take away any more."""
        made = []
        for token in tokens:
            hide = self.guard.late or (not self.guard.keep and self._stops(token.id))
            marks = self.guard.marks
            text = "" if hide else marks.clean(self.hold.push(token.text + marks.ids.get(token.id, "")))
            self.released += len(text)
            made.append(token if text == token.text else dataclasses.replace(token, text=text))
        return tuple(made)

    def _stops(self, token: int) -> bool:
        return any(token in named.ids for named in self.guard.criteria)

    def end(self, tokens: tuple[events.Token, ...], text: str) -> tuple[events.Token, ...]:
        """The last tokens of a row whose text is `text`: the last one carries what was still held back."""
        made = self.push(tokens)
        rest = text[self.released :]
        if made and rest:
            made = (*made[:-1], dataclasses.replace(made[-1], text=made[-1].text + rest))
        return made


def trimmed(stream: Iterable[events.Event], guards: Mapping[str, StopTrimmer]) -> Iterator[events.Event]:
    """The same events, texts cut at stops. `guards` has the lanes whose stops cut text; it may grow meanwhile."""
    lanes: dict[str, list[_Row]] = {}
    for event in stream:
        guard = guards.get(event.lane) if not isinstance(event, events.Loading) else None
        if guard is None:
            yield event
        elif isinstance(event, events.Stepped):
            before = lanes.get(event.lane) or [_Row(guard)]
            yield _stepped(event, before, lanes, guard)
        elif isinstance(event, events.Finished):
            lanes.pop(event.lane, None)
            cleaned = (dataclasses.replace(one, text=guard.text(one)) for one in event.hypotheses)
            yield dataclasses.replace(event, hypotheses=tuple(cleaned))
        else:
            yield event


def _stepped(
    event: events.Stepped, before: list[_Row], lanes: dict[str, list[_Row]], guard: StopTrimmer
) -> events.Stepped:
    children: dict[int, int] = {}
    for parent in (*(row.parent for row in event.rows), *(one.parent for one in event.ended)):
        children[parent] = children.get(parent, 0) + 1

    def follow(parent: int) -> _Row:
        return before[parent] if children[parent] == 1 else before[parent].fork()

    ended = []
    for one in event.ended:
        text = guard.text(one.hypothesis)
        last = follow(one.parent).end(one.written, text)
        hypothesis = dataclasses.replace(one.hypothesis, text=text)
        ended.append(dataclasses.replace(one, written=last, hypothesis=hypothesis))
    rows, live = [], []
    for row in event.rows:
        held = follow(row.parent)
        live.append(held)
        # spelled out: `dataclasses.replace` takes three times as long, for every token
        written = held.push(row.written)
        rows.append(events.Row(row.lane, row.parent, written, row.logprob, row.total, row.slot, row.note))
    lanes[event.lane] = live
    return dataclasses.replace(event, rows=tuple(rows), ended=tuple(ended))
