"""The common prefix of several paths, and the part of a text that a search can no longer change."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce

from genctl.events.history import ROOT, Endings, LaneHistory, Path

# Searches whose first result is the finished sequence with the highest score.
RANKED = frozenset({"beam", "beam-sample", "diverse-beam", "stochastic-beam"})
DRAWN = frozenset({"greedy", "sample"})  # rows that do not compete: the first slot is returned first


def meet(paths: Iterable[Path]) -> Path:
    """The newest step that all paths share; the root if there are none."""
    first, *others = [*paths] or [ROOT]
    return reduce(Path.meet, others, first)


class Certain:
    """The certain beginning of the first returned sequence of a lane, which only grows.

    It is common to all live rows and to every finished sequence that could still be returned first. A call costs the
    live rows, and the rows that ended since the call before: what the others share is known.
    """

    def __init__(self) -> None:
        self._forget("")

    def _forget(self, lane: str) -> None:
        self._lane = lane
        self._seen: Endings | None = None  # all up to here are in the fields below
        self._ended: Path | None = None  # what the rows share that ended
        self._best = -math.inf  # the highest score among them
        self._winner: Path | None = None  # what those with this score share, or with none that compares
        self._first: int | None = None  # the lowest slot among them
        self._of_first: Path | None = None  # what those of this slot share
        self._slots = True  # whether each has a slot

    def __call__(self, lane: LaneHistory) -> Path:
        """The end of the certain part."""
        self._read(lane)
        kind = lane.began.strategy if lane.began else ""
        if kind in RANKED:
            return _meet(self._winner, lane.rows)
        slots = [row.slot for row in lane.rows]
        known = [slot for slot in (*slots, self._first) if slot is not None]
        if kind not in DRAWN or not self._slots or None in slots or not known:
            return _meet(self._ended, lane.rows)
        first = min(known)
        rows = [row for row, slot in zip(lane.rows, slots, strict=True) if slot == first]
        return _meet(self._of_first if first == self._first else None, rows)

    def _read(self, lane: LaneHistory) -> None:
        """Take in the rows that ended since the last call."""
        new: list[Path] = []
        node = lane.endings
        while node is not None and node is not self._seen:
            new.append(node.path)
            node = node.before
        if lane.lane != self._lane or node is not self._seen:  # another lane, or the same begins again
            self._forget(lane.lane)
            new = [*(lane.endings or ())]
        for path in reversed(new):
            self._take(path)
        self._seen = lane.endings

    def _take(self, path: Path) -> None:
        self._ended = _meet(self._ended, [path])
        score, slot = path.hypothesis.score, path.slot
        if score > self._best:
            self._best, self._winner = score, path
        elif not score < self._best:  # equals may both win; so may NaN
            self._winner = _meet(self._winner, [path])
        if slot is None:
            self._slots = False
        elif self._first is None or slot < self._first:
            self._first, self._of_first = slot, path
        elif slot == self._first:
            self._of_first = _meet(self._of_first, [path])


def _meet(one: Path | None, others: Iterable[Path]) -> Path:
    return meet([*([] if one is None else [one]), *others])
