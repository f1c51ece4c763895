"""The part of a text that a search can no longer change."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce

from genctl.events import Event, Finished
from genctl.events.history import ROOT, Endings, LaneHistory, Path

RANKED = frozenset({"beam", "beam-sample", "diverse-beam"})  # the finished sequence with the highest score comes first
DRAWN = frozenset({"greedy", "sample"})  # rows that do not compete: the sequence of the first slot comes first


def common_ancestor(paths: Iterable[Path | None]) -> Path:
    """The newest step that all paths share, None apart; the root if there are none."""
    known = [path for path in paths if path is not None]
    return reduce(Path.meet, known) if known else ROOT


class StablePrefix:
    """The stable beginning of the first returned sequence of a lane, which only grows.

    It is common to all live rows and to every finished sequence that could still be returned first. A call costs the
    live rows, and the rows that ended since the call before.
    """

    def __init__(self) -> None:
        self._forget("")

    def _forget(self, lane: str) -> None:
        self._lane = lane
        self._read: Endings | None = None  # the newest row that is counted in the fields below
        self._all: Path | None = None  # what all ended rows share
        self._best = -math.inf  # the highest score of an ended row
        self._winners: Path | None = None  # what the rows with this score share (NaN counts as equal)
        self._slot: int | None = None  # the lowest slot of an ended row
        self._first: Path | None = None  # what the rows of this slot share
        self._have_slots = True  # whether each ended row has a slot

    def __call__(self, lane: LaneHistory) -> Path:
        """The end of the stable part."""
        new: list[Path] = []
        node = lane.endings
        while node is not None and node is not self._read:
            new.append(node.path)
            node = node.before
        if lane.lane != self._lane or node is not self._read:  # another lane, or the same one begins again
            self._forget(lane.lane)
            new = [*(lane.endings or ())]
        for path in reversed(new):
            self._count(path)
        self._read = lane.endings
        kind = lane.began.strategy if lane.began else ""
        if kind in RANKED:
            return common_ancestor([self._winners, *lane.rows])
        slots = [row.slot for row in lane.rows]
        known = [slot for slot in (*slots, self._slot) if slot is not None]
        if kind not in DRAWN or not self._have_slots or None in slots or not known:
            return common_ancestor([self._all, *lane.rows])
        first = min(known)
        rows = [row for row, slot in zip(lane.rows, slots, strict=True) if slot == first]
        return common_ancestor([self._first if first == self._slot else None, *rows])

    def _count(self, path: Path) -> None:
        """Count a row that ended."""
        self._all = common_ancestor([self._all, path])
        score, slot = path.hypothesis.score, path.slot
        if score > self._best:
            self._best, self._winners = score, path
        elif not score < self._best:
            self._winners = common_ancestor([self._winners, path])
        if slot is None:
            self._have_slots = False
        elif self._slot is None or slot < self._slot:
            self._slot, self._first = slot, path
        elif slot == self._slot:
            self._first = common_ancestor([self._first, path])


class GrowingText:
    """The first text of a lane while it grows. `feed` takes the events of the lane."""

    def __init__(self, lane: str) -> None:
        self._history = LaneHistory(lane)
        self._stable = StablePrefix()
        self._shown = ROOT
        self._pieces: list[str] = []

    def feed(self, event: Event) -> str:
        """What an event adds to the text."""
        self._history = self._history.after(event)
        if isinstance(event, Finished) and event.hypotheses:
            shown = "".join(self._pieces)
            return event.hypotheses[0].text.removeprefix(shown)
        path = self._stable(self._history)
        if path.length <= self._shown.length:
            return ""
        piece, self._shown = path.text(self._shown.chars), path
        self._pieces.append(piece)
        return piece
