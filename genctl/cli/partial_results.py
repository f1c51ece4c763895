"""What the lanes at work have written so far, from their events alone: for a run whose model does not come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from genctl import events
from genctl.results import Result, Sequence

REASON = "interrupted"
Link = tuple[events.Token, Any]  # a token and the link before it


@dataclass
class _PartialLane:
    began: events.Began
    returned: int
    prefilled: events.Prefilled | None = None
    rows: list[tuple[events.Row | None, Link | None, Any]] = field(default_factory=lambda: [(None, None, None)])
    ended: list[tuple[events.Hypothesis, Link | None, Any]] = field(default_factory=list)


class Unfinished:
    """Feed it events; `results` has each lane that began to write and is not done."""

    def __init__(self, *, texts: bool = True) -> None:
        self._texts = texts  # whether there is a tokenizer to write any
        self._lanes: dict[str, _PartialLane] = {}
        self._returned: dict[str, int] = {}

    def expect(self, lane: str, returned: int) -> None:
        """A lane will begin, of which so many sequences are returned."""
        self._returned[lane] = returned

    def feed(self, event: events.Event) -> None:
        """Take in one event."""
        if isinstance(event, events.Began):
            self._lanes[event.lane] = _PartialLane(event, self._returned.pop(event.lane, 1))
        elif isinstance(event, (events.Finished, events.Failed)):
            self._lanes.pop(event.lane, None)
            self._returned.pop(event.lane, None)
        elif isinstance(event, events.Prefilled) and event.lane in self._lanes:
            self._lanes[event.lane].prefilled = event
        elif isinstance(event, events.Stepped) and event.lane in self._lanes:
            lane = self._lanes[event.lane]
            for one in event.ended:
                lane.ended.append((one.hypothesis, *_grow(lane, one.parent, one.written)))
            lane.rows = [(row, *_grow(lane, row.parent, row.written)) for row in event.rows]

    def results(self) -> list[Result]:
        """What there is, the rows that live ended as interrupted, as the loop would have done it."""
        return [result for lane in self._lanes.values() if (result := _result(lane, self._texts)) is not None]


def _grow(lane: _PartialLane, parent: int, written: tuple[events.Token, ...]) -> tuple[Link | None, Any]:
    _, link, path = lane.rows[parent]
    for token in written:
        link = (token, link)
    return link, (parent, path)


def _result(lane: _PartialLane, texts: bool) -> Result | None:
    found = []
    for hypothesis, link, path in lane.ended:
        found.append(Sequence(hypothesis, tuple(_unlink(link)), tuple(_unlink(path))))
    penalty = float(lane.began.settings.get("length_penalty", 1.0))
    for row, link, path in lane.rows:
        if row is not None:
            tokens = tuple(_unlink(link))
            ids = tuple(token.id for token in tokens)
            score = row.total / max(len(ids), 1) ** penalty
            text = "".join(token.text for token in tokens) if texts else ""
            made = events.Hypothesis(ids, row.logprob, row.total, REASON, score, row.slot, "", text)
            found.append(Sequence(made, tokens, tuple(_unlink(path))))
    if not found:
        return None
    found.sort(key=lambda one: (one.hypothesis.slot or 0, -one.hypothesis.score))
    began, prefilled = lane.began, lane.prefilled
    return Result(
        began.lane,
        began.prompt,
        began.strategy,
        began.seed,
        began.model,
        tuple(found[: lane.returned]),
        prefilled.prompt_tokens if prefilled is not None else 0,
        prefilled.seconds if prefilled is not None else 0.0,
    )


def _unlink(link: Any) -> list[Any]:
    items = []
    while link is not None:
        item, link = link
        items.append(item)
    items.reverse()
    return items
