"""Prompts that were read in one pass, and whose rows lie together until one of them is needed alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from genctl.decode.cache.cache import Cache
from genctl.decode.cache.layer import CacheLayer


class RowOfPass(Cache):
    """A row of a pass over several prompts, padded on the left: `layers` copies it out on first use.

    Rows that go on together are taken from the pass at once (see `run_of`), so that no layer is copied row by row.
    """

    def __init__(self, whole: Cache, row: int, pad: int) -> None:
        self.whole, self.row, self.pad = whole, row, pad
        self.cross, self.beyond = None, False
        self._own: list[CacheLayer] | None = None

    @property
    def layers(self) -> list[CacheLayer]:
        """The layers of the row alone, without padding."""
        if self._own is None:
            keys, _ = self.whole.layers[0].content()
            index = torch.tensor([self.row], device=keys.device)
            self.whole = self.whole.select(index, drop=self.pad)
            self._own = self.whole.layers
        return self._own

    @layers.setter
    def layers(self, layers: Iterable[CacheLayer]) -> None:
        self._own = list(layers)

    def with_layers(self, layers: Iterable[CacheLayer]) -> Cache:  # type: ignore[override]
        """A cache with other layers."""
        return Cache(layers)

    @property
    def is_alone(self) -> bool:
        """Whether the row was copied out."""
        return self._own is not None

    @property
    def is_mergeable(self) -> bool:
        """Whether rows of several lanes may share a cache of this kind."""
        return self.whole.is_mergeable

    @property
    def is_fixed(self) -> bool:
        """Whether any layer is allocated once and needs an exact `room`."""
        return self.whole.is_fixed if self._own is None else super().is_fixed

    @property
    def is_shareable(self) -> bool:
        """Whether any layer holds a prompt that is long enough to share."""
        return self.whole.is_shareable


def run_of(caches: list[Cache | None]) -> list[RowOfPass]:
    """The first of some caches, as far as they are rows of one pass."""
    rows: list[RowOfPass] = []
    for cache in caches:
        if not isinstance(cache, RowOfPass) or cache.is_alone or (rows and cache.whole is not rows[0].whole):
            break
        rows.append(cache)
    return rows if len(rows) > 1 else []
