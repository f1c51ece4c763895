"""Lanes that have not begun, and which of them comes next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from genctl.decode.types import Lane


class LaneQueue:
    """Lanes, read lazily: of the next `ahead` of them the one with the most work comes first."""

    def __init__(self, lanes: Iterable[Lane], ahead: int) -> None:
        self.lanes = iter(lanes)
        self.ahead = max(ahead, 1)
        self.known: list[Lane] = []  # those of the next ones that have been asked for
        self.exhausted = False
        self.postponed: deque[Lane] = deque()  # whose prompts did not fit beside the others

    def __bool__(self) -> bool:
        """Whether a lane may be left."""
        return bool(not self.exhausted or self.postponed or self.known)

    def take(self, places: int) -> list[Lane]:
        """The lanes to begin next, at most `places`: those put off, then the longest of those known."""
        chosen: list[Lane] = []
        while len(chosen) < places:
            if self.postponed:
                chosen.append(self.postponed.popleft())
                continue
            while not self.exhausted and len(self.known) < self.ahead:
                lane = next(self.lanes, None)
                if lane is None:
                    self.exhausted = True
                else:
                    self.known.append(lane)
            if not self.known:
                break
            longest = max(self.known, key=work)  # the first of equals
            self.known.remove(longest)
            chosen.append(longest)
        return chosen


def work(lane: Lane) -> tuple[int, int]:
    """How long a lane may be at work: what it may write, then what it has to read. Longest first leaves the least idle.

    Graham (1969), "Bounds on Multiprocessing Timing Anomalies": the longest job first.
    """
    return lane.max_new_tokens, len(lane.tokens) + len(lane.source or ())
