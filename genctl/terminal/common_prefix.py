"""The common prefix of several paths, and the part of a text that a search can no longer change."""

from __future__ import annotations

from collections.abc import Iterable

from genctl.history import ROOT, LaneHistory, Path

# Searches whose first result is the finished sequence with the highest score.
RANKED = frozenset({"beam", "beam-sample", "diverse-beam", "stochastic-beam"})
DRAWN = frozenset({"greedy", "sample"})  # rows that do not compete: the first slot is returned first


def meet(paths: Iterable[Path]) -> Path:
    """The newest step that all paths share; the root if there are none."""
    met: Path | None = None
    for path in paths:
        met = path if met is None else _meet(met, path)
    return ROOT if met is None else met


def _meet(a: Path, b: Path) -> Path:
    while a is not b:
        if a.step < b.step:
            a, b = b, a
        if a.parent is None:  # events of two runs in one file
            return a
        a = a.parent
    return a


def certain(lane: LaneHistory) -> Path:
    """The certain beginning of the first returned sequence of a lane. It can only grow.

    It is common to all live rows and to every finished sequence that could still be returned first.
    """
    return meet(contenders(lane))


def contenders(lane: LaneHistory) -> list[Path]:
    """The paths that can still become the first returned sequence."""
    ended = list(lane.endings or ())
    kind = lane.began.strategy if lane.began else ""
    if kind in DRAWN:
        return _first_slot(lane, ended)
    if kind in RANKED and ended:
        best = max(path.hypothesis.score for path in ended)
        ended = [path for path in ended if not path.hypothesis.score < best]  # equals may both win; so may NaN
    return [*lane.rows, *ended]


def _first_slot(lane: LaneHistory, ended: list[Path]) -> list[Path]:
    paths = [(path.slot, path) for path in (*lane.rows, *ended)]
    slots = [slot for slot, _ in paths if slot is not None]
    if len(slots) < len(paths):
        return [path for _, path in paths]
    return [path for slot, path in paths if slot == min(slots)]
