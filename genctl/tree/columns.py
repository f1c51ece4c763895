"""The keys and values of branches: what branches have in common is stored once.

A segment holds the columns of a run of nodes, and refers to the segment that holds those before them. The cache of a
branch is put together from its segments. Under a bound, segments that nothing continues leave, the one that was used
longest ago first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Segment:
    """Columns `start` to `end` of a branch, of every layer."""

    start: int
    end: int
    nodes: list[int]
    states: dict[str, Tensor]  # by the names of `Cache.state_dict`, each [1, heads, end - start, head_dim]
    above: Segment | None
    below: list[Segment] = field(default_factory=list)
    used: int = 0

    @property
    def bytes(self) -> int:
        """The memory of the columns."""
        return sum(tensor.nbytes for tensor in self.states.values())


class Columns:
    """Columns of nodes, `most` bytes of them. A path is the numbers of nodes, the root's first."""

    def __init__(self, prompt: int, most: int) -> None:
        self.prompt, self.most = prompt, most  # columns of the root; bytes
        self.bytes = 0
        self._of: dict[int, Segment] = {}
        self._clock = 0

    def held(self, path: Sequence[int]) -> int:
        """How many columns of a path are held: all those of its first nodes."""
        for place in range(len(path) - 1, -1, -1):
            if path[place] in self._of:
                return self.prompt + place
        return 0

    def states(self, path: Sequence[int], columns: int) -> dict[str, Tensor]:
        """The first `columns` columns of a path, which are held, as `Cache.load_state_dict` takes them."""
        parts: list[dict[str, Tensor]] = []
        end = columns
        self._clock += 1
        for segment in self._chain(path):
            segment.used = self._clock
            if segment.start < end:
                parts.append({name: one[:, :, : end - segment.start] for name, one in segment.states.items()})
                end = segment.start
        parts.reverse()
        return {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]} if parts else {}

    def keep(self, path: Sequence[int], states: dict[str, Tensor]) -> None:
        """Hold those columns of a path that are not held yet. `states` has all."""
        start, end = self.held(path), self.prompt + len(path) - 1
        if start == end or not states:
            return
        nodes = list(path[start - self.prompt + 1 :] if start else path)
        own = {name: one[:, :, start:end].clone() for name, one in states.items()}
        self._clock += 1
        above = self._of[path[start - self.prompt]] if start else None
        segment = Segment(start, end, nodes, own, above, used=self._clock)
        if above is not None:
            above.below.append(segment)
        self._of |= dict.fromkeys(nodes, segment)
        self.bytes += segment.bytes
        self._evict()

    def shared(self, path: Sequence[int]) -> tuple[int, int]:
        """How many columns of a path another branch has too, and how many are its own alone."""
        columns = self.held(path)
        end, shared = columns, 0
        chain = list(self._chain(path))
        for segment in chain:
            if segment.end > end:
                shared = max(shared, end)
            forks = [other.start for other in segment.below if other not in chain]
            shared = max([shared, *(min(fork, end) for fork in forks)])
            end = min(end, segment.start)
        return shared, columns - shared

    def drop(self) -> None:
        """Forget everything."""
        self._of, self.bytes = {}, 0

    def _chain(self, path: Sequence[int]) -> Iterable[Segment]:
        """The segments of a path, the newest first."""
        columns = self.held(path)
        segment = self._of[path[columns - self.prompt]] if columns else None
        while segment is not None:
            yield segment
            segment = segment.above

    def _evict(self) -> None:
        while self.bytes > self.most and self._of:
            last = [segment for segment in dict.fromkeys(self._of.values()) if not segment.below]
            oldest = min(last, key=lambda segment: segment.used)
            for node in oldest.nodes:
                del self._of[node]
            if oldest.above is not None:
                oldest.above.below.remove(oldest)
            self.bytes -= oldest.bytes
