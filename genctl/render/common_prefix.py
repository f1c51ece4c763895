"""The common prefix of several paths, and the part of a text that a search can no longer change."""

from __future__ import annotations

from collections.abc import Iterable

from genctl.render.run_history import ROOT, LaneHistory, Leaf, Path

# Searches whose first result is the finished sequence with the highest score.
RANKED = frozenset({"beam", "beam-sample", "diverse-beam", "stochastic-beam"})
DRAWN = frozenset({"greedy", "sample"})  # rows that do not compete: the first slot is returned first


def meet(paths: Iterable[Path]) -> Path:
    """The newest node that all paths share; the root if there are none."""
    met: Path | None = None
    for path in paths:
        met = path if met is None else _meet(met, path)
    return ROOT if met is None else met


def _meet(a: Path, b: Path) -> Path:
    while a is not b:
        if a.length < b.length:
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
    leaves = list(lane.endings or ())
    kind = lane.began.strategy if lane.began else ""
    if kind in DRAWN:
        return _first_slot(lane, leaves)
    if kind in RANKED and leaves:
        best = max(leaf.hypothesis.score for leaf in leaves)
        leaves = [leaf for leaf in leaves if not leaf.hypothesis.score < best]  # equals may both win; so may NaN
    return [row.path for row in lane.rows] + [leaf.path for leaf in leaves]


def _first_slot(lane: LaneHistory, leaves: list[Leaf]) -> list[Path]:
    paths = [(row.slot, row.path) for row in lane.rows] + [(leaf.hypothesis.slot, leaf.path) for leaf in leaves]
    slots = [slot for slot, _ in paths if slot is not None]
    if len(slots) < len(paths):
        return [path for _, path in paths]
    return [path for slot, path in paths if slot == min(slots)]
