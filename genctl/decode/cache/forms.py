"""The other forms of a growing layer: sliding window, allocated once, with slots for compiled or captured steps, and in
8 bits.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from genctl.decode.cache.growing import STEP, GrowingLayer
from genctl.decode.cache.layer import SLIDING, CacheLayer, attention_entry


class SlidingLayer(GrowingLayer):
    """A sliding-window layer: columns that no later token can see are dropped.

    The newest `window - 1` columns stay at the end of a buffer with room; when it is full they move to the front of
    a new one. A buffer has as many columns as the final text, but at most `STEP` more than the window keeps. A window
    of 1 keeps all columns, as in transformers (`DynamicSlidingWindowLayer` keeps `[-window + 1:]`).
    """

    kind = SLIDING
    is_plain = is_convertible = False
    is_sliding = True

    def __init__(self, sliding_window: int, room: int = 0) -> None:
        super().__init__(room)
        self.sliding_window = sliding_window
        self.most = sliding_window - 1 or sys.maxsize  # columns that stay
        self.seen = 0  # columns ever appended

    def activate_past_recording(self) -> None:
        """Drop nothing until the next `crop`, so that tokens can be removed."""
        self.record_past = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append columns; returns the visible ones, `[rows, heads, at most window - 1 + new, head_dim]`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        if self.seen == 0 and not self.record_past:  # a long prompt: dropped columns are never stored
            start = max(new - self.most, 0)
            self._append((key_states[:, :, start:], value_states[:, :, start:]))
            self.seen = new
            return key_states, value_states
        self._append((key_states, value_states))
        first, visible = self._see(new, self.begin, self.length)
        keys, values = (buffer.narrow(2, first, visible) for buffer in self.buffers)
        return keys, values

    def extend(self, count: int) -> tuple[int, int]:
        """See `GrowingLayer.extend`."""
        return self._see(count, *super().extend(count))

    def _see(self, new: int, first: int, columns: int) -> tuple[int, int]:
        """Count new columns. Returns the first column that they see, and the number of columns that they see."""
        self.seen += new
        if self.record_past:
            visible = min(self.most + new, columns)
            return first + columns - visible, visible
        self._drop_unseen()
        return first, columns

    def get_seq_length(self) -> int:
        """Columns ever appended."""
        return self.seen

    def get_max_length(self) -> int:
        """The window."""
        return self.sliding_window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a query attends to, and the offset of the first one."""
        before = self.sliding_window - 1
        return min(self.seen, before) + query_length, max(self.seen - before, 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest columns, and drop those older than the window.

        Raises ValueError if columns that would become visible again were dropped.
        """
        removed = abs(tokens_to_remove)
        if self.is_initialized:
            if self.length - removed < min(self.seen - removed, self.most):
                raise ValueError(f"a window of {self.sliding_window} has dropped what precedes {removed} tokens")
            self.length -= removed
            self.seen -= removed
            self._drop_unseen()

    def reset(self) -> None:
        """Remove everything."""
        super().reset()
        self.seen = 0

    def select(self, rows: Tensor, *, room: int = 0, drop: int = 0) -> SlidingLayer:
        """A new layer with `rows` (int64 [N]) of this one, without its first `drop` columns. This one is unchanged."""
        if not self.is_initialized:
            return copy.copy(self)
        seen = self.seen - drop
        surplus = max(self.length - seen, 0)
        new = super().select(rows, room=self._free(self.length - surplus, seen, room), drop=surplus)
        assert isinstance(new, SlidingLayer)
        new.seen = seen
        return new

    def reorder(self, rows: Tensor, since: int) -> GrowingLayer:
        """Replace row i by row `rows[i]` (int64 [N], one per row), in place, with all columns of the window."""
        return super().reorder(rows, 0)

    def keep(self, rows: Sequence[int], index: Tensor, *, room: int = 0, drop: int = 0) -> CacheLayer:
        """Replace row i by row `rows[i]` >= i, without the first `drop` columns; in place."""
        if not self.is_initialized:
            return self.select(index)
        self.seen -= drop
        return super().keep(rows, index, drop=max(self.length - self.seen, 0))

    def merge(self, others: Sequence[GrowingLayer], room: int = 0) -> SlidingLayer:
        """A new layer with the rows of this one and of others, aligned to the right over zeros."""
        seen = max(self.seen, *(other.seen for other in others if isinstance(other, SlidingLayer)))
        longest = max(layer.length for layer in (self, *others))
        new = super().merge(others, self._free(longest, seen, room))
        assert isinstance(new, SlidingLayer)
        new.seen = seen
        return new

    def hold(self, keys: Tensor, values: Tensor, room: int = 0) -> None:
        """Set the content to `keys` and `values` of a whole text; the window's part is kept."""
        seen = keys.shape[-2]
        start = max(seen - self.most, 0)
        if start:  # a copy, not a view: a view would keep the dropped columns in memory
            keys, values = keys[:, :, start:].clone(), values[:, :, start:].clone()
        super().hold(keys, values, self._free(seen - start, seen, room))
        self.seen = seen

    def describe(self, number: int) -> list[dict[str, Any]]:
        """See `Cache.describe`."""
        return [{**part, "window": self.sliding_window} for part in super().describe(number)]

    def _free(self, stored: int, seen: int, room: int) -> int:
        """The number of columns to keep free after the stored ones, if `room` more will follow."""
        return max(min(seen + room, self.most + STEP) - stored, 0) if room else 0

    def _roomy(self, columns: int) -> int:
        return max(columns, min(super()._roomy(columns), self.most + STEP))

    def _drop_unseen(self) -> None:
        surplus = self.length - self.most
        if surplus > 0:
            self.begin += surplus
            self.length -= surplus

    def _take(self, other: GrowingLayer) -> None:
        assert isinstance(other, SlidingLayer)
        self.seen = other.seen
        super()._take(other)


class StaticLayer(GrowingLayer):
    """A full-attention layer that is allocated once, for the final length of its rows."""

    kind = "static"
    is_fixed = is_chosen = True
    is_convertible = False
    borrowed = False  # whether another layer writes after the columns of this one

    def continued(self, rows: Tensor, room: int) -> CacheLayer:
        """Like `select` of all rows, but in the same buffers if they have exactly this room, and only once.

        The columns of this layer are unchanged. Two layers that continue it would write to the same columns.
        """
        fits = self.is_initialized and not self.begin and self.capacity == self.length + room
        if not fits or self.borrowed or self.is_slotted:
            return self.select(rows, room=room)
        new = copy.copy(self)
        self.borrowed = new.borrowed = True
        return new

    def describe(self, number: int) -> list[dict[str, Any]]:
        """See `Cache.describe`; free columns are included."""
        if not self.is_initialized:
            return []
        return [{**attention_entry(number, self.kind, self.buffers), "filled": self.length}]


class SlotPlace(NamedTuple):
    """Where a step writes in the buffers of a layer, and which columns it sees."""

    column: int  # of the fed token
    first: int  # the first column that it sees
    before: int  # tokens before the first column of the buffers


class SlottedLayer(StaticLayer):
    """A layer for compiled and captured steps: rows always see the whole buffers, whose width is a multiple of `STEP`.

    Unwritten columns are zeros, because a masked column is still multiplied by the values, and 0 x NaN is NaN.
    For other code it is a static layer like any other.
    """

    is_plain = is_chosen = is_fixed = False
    is_slotted = is_convertible = True
    keep = CacheLayer.keep  # it selects, because columns must begin at the front of the buffers

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
            self._grow(self.length + max(count, self.length // 4))  # new buffers need a new graph
        keys, values = self.buffers
        return keys, values

    def place(self) -> SlotPlace:
        """Where the next step writes. Call `slots` before."""
        return SlotPlace(self.length, 0, 0)

    def written(self, count: int = 1) -> None:
        """Register `count` columns that a compiled or captured step wrote after the first `length`."""
        self.length += count

    def _allocate(self, like: Tensor, rows: int, columns: int) -> Tensor:
        return like.new_zeros(rows, like.shape[1], columns, like.shape[3])

    def _grow(self, capacity: int) -> None:
        super()._grow(self.length + _rounded(self.length, capacity - self.length))


class SlottedWindow(SlidingLayer):
    """A sliding window for captured steps, which see the whole buffers.

    When these are full, the columns of the window move to the front, so the addresses do not change.
    """

    is_slotted = True
    keep = CacheLayer.keep

    @classmethod
    def of(cls, layer: SlidingLayer) -> SlottedWindow:
        """A slotted window on the buffers of `layer`, which are not copied."""
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
        """Register `count` columns that a captured step wrote."""
        self.extend(count)

    _allocate = SlottedLayer._allocate

    def _roomy(self, columns: int) -> int:
        return max(columns, self.most + STEP) if columns > self.most else super()._roomy(columns)


def _rounded(length: int, room: int) -> int:
    """The number of free columns, at least `room`, that makes a buffer with `length` columns a multiple of `STEP`."""
    return -(-(length + room) // STEP) * STEP - length


class Slots:
    """All columns of a layer's buffers, written or not, for a step in which no tensor changes its shape.

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


class QuantizedLayer(GrowingLayer):
    """A full-attention layer in 8 bits: the key and value of each token and head are scaled by their own largest
    number.

    Symmetric absmax quantisation, one float32 scale per token and head (as in LLM.int8(), Dettmers et al. 2022, for
    vectors): a token's codes never change, so rows can be appended, reordered, padded and cropped without a second
    rounding. Lossy. The prefill itself uses the exact values; later steps use the rounded ones.
    """

    kind = "quantised"
    is_plain = is_convertible = False
    is_chosen = True
    extends = False

    def _encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return (*_quantize(keys), *_quantize(values))

    def _states(self, number: int) -> Tensor:
        return self.content()[number]

    def _decode(self, columns: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        keys, key_scales, values, value_scales = columns
        return (keys * key_scales).to(self.dtype), (values * value_scales).to(self.dtype)


def _quantize(states: Tensor) -> tuple[Tensor, Tensor]:
    """states [rows, heads, length, head_dim] -> int8 of that shape, float32 scales [rows, heads, length, 1]."""
    scales = states.float().abs().amax(-1, keepdim=True) / 127
    codes = (states.float() / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    return codes, scales
