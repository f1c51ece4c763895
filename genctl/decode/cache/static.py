"""Layers that are allocated once, and the slots that compiled or captured steps write to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from genctl.decode.cache.growing import STEP, GrowingLayer
from genctl.decode.cache.layer import CacheLayer, attention_entry
from genctl.decode.cache.sliding import SlidingLayer


class StaticLayer(GrowingLayer):
    """A full-attention layer that is allocated once, for the final length of its rows."""

    kind = "static"
    is_fixed = is_chosen = True
    is_convertible = False
    borrowed = False  # whether another layer writes behind the columns of this one

    def continued(self, rows: Tensor, room: int) -> CacheLayer:
        """Like `select` of all rows, but in the same buffers if they have exactly this room, and only once.

        This one's columns are unchanged. Two layers that continue it would write to the same columns.
        """
        fits = self.is_initialized and not self.begin and self.capacity == self.length + room
        if not fits or self.borrowed or self.is_slotted:
            return self.select(rows, room=room)
        new = copy.copy(self)
        self.borrowed = new.borrowed = True
        return new

    def describe(self, number: int) -> list[dict[str, Any]]:
        """See `Cache.describe`: free columns count."""
        if not self.is_initialized:
            return []
        return [{**attention_entry(number, self.kind, self.buffers), "filled": self.length}]


class SlotPlace(NamedTuple):
    """Where a step writes in the buffers of a layer, and what it sees there."""

    column: int  # of the fed token
    first: int  # the first column that it sees
    before: int  # tokens before the first column of the buffers


class SlottedLayer(StaticLayer):
    """A layer for compiled and captured steps: rows always see the whole buffers, whose width is a multiple of `STEP`.

    Unwritten columns are zeros, because a masked column is still multiplied by the values, and 0 x NaN is NaN.
    Other code reads it like any static layer.
    """

    is_plain = is_chosen = is_fixed = False
    is_slotted = is_convertible = True
    keep = CacheLayer.keep  # by `select`: columns begin at the front of the buffers

    def select(self, rows: Tensor, *, room: int = 0, drop: int = 0) -> GrowingLayer:
        """A new layer with `rows` (int64 [N]) of this one, without its first `drop` columns. This one is unchanged."""
        return super().select(rows, room=_rounded(self.length - drop, room), drop=drop)

    def merge(self, others: Sequence[GrowingLayer], room: int = 0) -> GrowingLayer:
        """A new layer with the rows of this one and of others, aligned to the right over zeros."""
        longest = max(layer.length for layer in (self, *others))
        return super().merge(others, _rounded(longest, room))

    def slots(self, count: int = 1) -> tuple[Tensor, Tensor]:
        """Keys and values, written or not, `[rows, heads, capacity, head_dim]`, with room for `count` more columns."""
        if self.capacity < self.length + count:
            self._grow(self.length + max(count, self.length // 4))  # new buffers cost a new graph
        keys, values = self.buffers
        return keys, values

    def place(self) -> SlotPlace:
        """Where the next step writes. Call `slots` before."""
        return SlotPlace(self.length, 0, 0)

    def written(self, count: int = 1) -> None:
        """Count columns that a compiled or captured step wrote from `length` on."""
        self.length += count

    def _allocate(self, like: Tensor, rows: int, columns: int) -> Tensor:
        return like.new_zeros(rows, like.shape[1], columns, like.shape[3])

    def _grow(self, capacity: int) -> None:
        super()._grow(self.length + _rounded(self.length, capacity - self.length))


class SlottedWindow(SlidingLayer):
    """A sliding window for captured steps, which see the whole buffers.

    When these are full the columns of the window move to the front, so that addresses stay.
    """

    is_slotted = True
    keep = CacheLayer.keep

    @classmethod
    def of(cls, layer: SlidingLayer) -> SlottedWindow:
        """The columns of a layer; they are not copied."""
        new = cls(layer.sliding_window)
        vars(new).update(vars(layer))
        return new

    def slots(self, count: int = 1) -> tuple[Tensor, Tensor]:
        """Keys and values, written or not, with room for `count` columns at `place`."""
        if self.capacity < self.begin + self.length + count:
            if self.begin < max(STEP // 2, count):
                self._grow(self._roomy(self.length + count))
            else:
                for buffer, columns in zip(self.buffers, self._columns(), strict=True):
                    buffer[:, :, : self.length] = columns.clone()
                self.begin = 0
        keys, values = self.buffers
        return keys, values

    def place(self) -> SlotPlace:
        """Where the next step writes. Call `slots` before."""
        column = self.begin + self.length
        return SlotPlace(column, column - min(self.length, self.most), self.seen - column)

    def written(self, count: int = 1) -> None:
        """Count columns that a captured step wrote."""
        self.extend(count)

    def _allocate(self, like: Tensor, rows: int, columns: int) -> Tensor:
        return like.new_zeros(rows, like.shape[1], columns, like.shape[3])

    def _roomy(self, columns: int) -> int:
        return max(columns, self.most + STEP) if columns > self.most else super()._roomy(columns)


def _rounded(length: int, room: int) -> int:
    """Free columns, at least `room`, that bring a buffer with `length` columns to a multiple of `STEP`."""
    return -(-(length + room) // STEP) * STEP - length


class Slots:
    """A layer's buffers with all their columns, written or not, in a step whose tensors keep one shape.

    Keys and values are `[rows, heads, capacity, head_dim]`; `place` int64 [1] is the column of the fed token.
    """

    prompt: tuple[Tensor, Tensor] | None = None  # see `layer.KeyValues`

    def __init__(self, keys: Tensor, values: Tensor, place: Tensor) -> None:
        self.keys, self.values, self.place = keys, values, place

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one column, `[rows, heads, 1, head_dim]`; returns all, `[rows, heads, capacity, head_dim]`."""
        self.keys.index_copy_(2, self.place, key_states)
        self.values.index_copy_(2, self.place, value_states)
        return self.keys, self.values

    def content(self) -> tuple[Tensor, Tensor]:
        """All columns."""
        return self.keys, self.values
