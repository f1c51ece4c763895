"""What several texts have in common, and how much of a text is certain while a search still goes on."""

from __future__ import annotations

from collections.abc import Iterable

from genctl.render.story import ROOT, LaneStory, Leaf, Path

# Searches whose first result is the finished sequence with the highest score, so that a beaten one cannot come back.
RANKED = frozenset({"beam", "beam-sample", "diverse-beam", "stochastic-beam"})
DRAWN = frozenset({"greedy", "sample"})  # rows that do not compete: the first slot is returned first


def meet(paths: Iterable[Path]) -> Path:
    """The newest node that all paths go through; the root if there are none. Costs the way from there to their ends."""
    met: Path | None = None
    for path in paths:
        met = path if met is None else _meet(met, path)
    return ROOT if met is None else met


def _meet(one: Path, two: Path) -> Path:
    while one is not two:
        if one.length < two.length:
            one, two = two, one
        if one.parent is None:  # two recordings in one: they share nothing
            return one
        one = one.parent
    return one


def certain(lane: LaneStory) -> Path:
    """The path with which the first returned sequence of a lane begins, whatever happens from here on.

    All live rows go through it, and every finished sequence that could still be returned first. It only ever grows.
    """
    return meet(contenders(lane))


def contenders(lane: LaneStory) -> list[Path]:
    """The paths of which one becomes, or grows into, the first returned sequence."""
    leaves = list(lane.endings or ())
    kind = lane.began.strategy if lane.began else ""
    if kind in DRAWN:
        return _first_slot(lane, leaves)
    if kind in RANKED and leaves:
        best = max(leaf.hypothesis.score for leaf in leaves)
        leaves = [leaf for leaf in leaves if not leaf.hypothesis.score < best]  # equals may both win; so may NaN
    return [row.path for row in lane.rows] + [leaf.path for leaf in leaves]


def _first_slot(lane: LaneStory, leaves: list[Leaf]) -> list[Path]:
    found = [(row.slot, row.path) for row in lane.rows] + [(leaf.hypothesis.slot, leaf.path) for leaf in leaves]
    slots = [slot for slot, _ in found if slot is not None]
    if len(slots) < len(found):
        return [path for _, path in found]
    return [path for slot, path in found if slot == min(slots)]
