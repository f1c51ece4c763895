"""Waiting lanes, and the order in which they begin."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from genctl.decode.types import Lane


class LaneQueue:
    """Lanes, read lazily. Of the next `ahead` lanes, the one with the most work comes first."""

    def __init__(self, lanes: Iterable[Lane], ahead: int) -> None:
        self.lanes = iter(lanes)
        self.ahead = max(ahead, 1)
        self.known: list[Lane] = []  # those that have been read from `lanes`
        self.exhausted = False
        self.postponed: deque[Lane] = deque()  # lanes whose prompts did not fit beside the others

    def __bool__(self) -> bool:
        """Whether any lane may be left."""
        return bool(not self.exhausted or self.postponed or self.known)

    def take(self, places: int) -> list[Lane]:
        """The lanes to begin next, at most `places`: postponed ones first, then the longest known ones."""
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
    """The size of a lane: tokens that it may write, then tokens to read. Longest first leaves the least idle time:
    Graham (1969), "Bounds on Multiprocessing Timing Anomalies".
    """
    return lane.max_new_tokens, len(lane.tokens) + len(lane.source or ())
