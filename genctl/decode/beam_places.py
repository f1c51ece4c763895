"""Which candidates of a beam live on, and which results are kept: a fixed number for each group, best first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from genctl.decode.types import FinishedRow, Pruning


class Places:
    """The places of a beam. Candidates take them in order."""

    def __init__(self, pruning: Pruning, may_finish: Sequence[bool] | None) -> None:
        self.width, self.groups, self.may_finish = pruning.width, pruning.groups, may_finish
        self.seen: Counter[int] = Counter()  # candidates of each group
        self.taken: Counter[int] = Counter()  # candidates of each group that live on

    def of(self, candidate: int) -> tuple[bool, bool]:
        """Whether there is a place for a candidate if it lives on, and whether its end would be a result."""
        group = self._group(candidate)
        lives, among_best = self.taken[group] < self.width, self.seen[group] < self.width
        self.seen[group] += 1
        return lives, lives and among_best if self.may_finish is None else self.may_finish[candidate]

    def take(self, candidate: int) -> None:
        """Give the candidate a place: it lives on."""
        self.taken[self._group(candidate)] += 1

    def _group(self, candidate: int) -> int:
        return 0 if self.groups is None else self.groups[candidate]


def retain(ended: Sequence[FinishedRow], pruning: Pruning | None, length_penalty: float) -> list[FinishedRow]:
    """The results to keep: the best `width` of each group, by tier and score; all without pruning."""
    if pruning is None:
        return list(ended)
    results: list[FinishedRow] = []
    count: Counter[int] = Counter()
    for row in sorted(ended, key=lambda row: (-row.tier, -row.score(length_penalty))):
        if count[row.group] < pruning.width:
            count[row.group] += 1
            results.append(row)
    return results
