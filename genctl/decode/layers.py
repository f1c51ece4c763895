"""genctl's cache layers: one layer's keys and values in buffers with room to grow.

Keys and values are `[rows, heads, length, head_dim]`. A layer stores them as columns of one or more buffers: unchanged
(`GrowingLayer`), in a buffer that is allocated once (`StaticLayer`), or in 8 bits (`QuantizedLayer`). Appending copies
only new columns; selecting rows, merging lanes and cropping work on the stored columns, whatever they hold. The layers
have the attributes that transformers' caches expect, so that every model accepts them (see `transformers_layers`, which
registers them); this file imports nothing of it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

STEP = 64  # a buffer that is full grows by half, and by at least this many columns


def grown(columns: int) -> int:
    """The largest capacity of a buffer that grew as it filled and now holds so many columns."""
    return columns + max(STEP, (columns - 1) // 2)


class GrowingLayer:
    """A full-attention layer whose buffers have room: appending copies only new columns."""

    kind = "full"
    fixed = False  # whether the room is exactly what will be needed
    is_sliding = False
    is_compileable, is_croppable, supports_early_init = False, True, True  # what transformers' caches ask

    def __init__(self, room: int = 0) -> None:
        self.is_initialized = False
        self.dtype, self.device = torch.float32, torch.device("cpu")  # until something is stored
        self.room = room  # columns to keep free beyond the first write, where the final length is known
        self.length = 0  # columns stored
        self.begin = 0  # where they begin in the buffers
        self.buffers = ()  # each [rows, heads, capacity, size]

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """What holds the columns, each `[rows, heads, capacity, size]`."""
        return self._buffers

    @buffers.setter
    def buffers(self, buffers: tuple[Tensor, ...]) -> None:
        self._buffers = buffers
        self._whole = buffers  # with the rows that left (see `keep`), whose places others may take

    @property
    def keys(self) -> Tensor | None:
        """The keys for transformers' code, `[rows, heads, length, head_dim]`; None before anything is stored."""
        return self._found(0) if self.buffers else None

    @property
    def values(self) -> Tensor | None:
        """Like `keys`."""
        return self._found(1) if self.buffers else None

    # -- what models call ----------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the dtype and the device of the first numbers."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append columns; returns all keys and values, `[rows, heads, length, head_dim]`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.prefetch()
        first = self.length == 0
        self._append(self._encode(key_states, value_states))
        # what was just computed is exact, whatever is kept of it
        return (key_states, value_states) if first else self.content()

    def get_seq_length(self) -> int:
        """Columns stored."""
        return self.length

    def get_max_length(self) -> int:
        """-1: unbounded."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a query attends to, and the offset of the first one."""
        return self.length + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest columns. The buffers stay."""
        if tokens_to_remove and self.is_initialized:
            self.length -= abs(tokens_to_remove)

    def reset(self) -> None:
        """Remove everything."""
        self.length, self.begin, self.buffers, self.is_initialized = 0, 0, (), False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows in place."""
        self._take(self.select(beam_idx))

    def offload(self) -> None:
        """Move the columns to the CPU."""
        self._move("cpu")

    def prefetch(self) -> None:
        """Bring the columns back to the layer's device."""
        if self.is_initialized:
            self._move(self.device)

    # -- what the loop calls -------------------------------------------------------------------------------------------

    def hold(self, keys: Tensor, values: Tensor, room: int = 0) -> None:
        """Take `keys` and `values` as the content. They are copied only into a buffer with room or of another form."""
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.length, self.room = keys.shape[-2], 0
        self.buffers = self._encode(keys, values)
        if room:
            self._grow(self.length + room)

    def select(self, rows: Tensor, *, room: int = 0, drop: int = 0) -> GrowingLayer:
        """A new layer with `rows` (int64 [N]) of this one, without its first `drop` columns. This one is unchanged."""
        new = copy.copy(self)
        new.length, new.begin = self.length - drop, 0
        rows = rows.to(self.buffers[0].device)
        held = []
        for old in self._columns():
            buffer = old.new_empty(len(rows), old.shape[1], new.length + room, old.shape[3])
            torch.index_select(old[:, :, drop:], 0, rows, out=buffer[:, :, : new.length])
            held.append(buffer)
        new.buffers = tuple(held)
        return new

    def reorder(self, rows: Tensor, since: int) -> None:
        """Row i becomes row `rows[i]` (int64 [N], as many as there are), in place, from column `since` on."""
        if since < self.length:
            rows = rows.to(self.buffers[0].device)
            for part in self._columns():
                part[:, :, since:] = part[:, :, since:].index_select(0, rows)

    def keep(self, rows: Sequence[int], drop: int = 0) -> None:
        """Row i becomes row `rows[i]`, which is i or a later one, without the first `drop` columns; in place.

        What leaves stays in the buffers, so that `merge` may put other rows there.
        """
        self.begin += drop
        self.length -= drop
        for columns in self._columns():
            for place, row in enumerate(rows):
                if row != place:
                    columns[place] = columns[row]
        self._buffers = tuple(buffer[: len(rows)] for buffer in self._buffers)

    def merge(self, others: Sequence[GrowingLayer], room: int = 0) -> GrowingLayer:
        """A layer with the rows of this one and of others, aligned to the right over zeros.

        It is this one, in place, if the others fit where rows left; else a new one with room for so many columns.
        """
        layers = (self, *others)
        length = max(layer.length for layer in layers)
        rows = sum(layer.buffers[0].shape[0] for layer in layers)
        fits = rows <= self._whole[0].shape[0] and length - self.length <= self.begin
        if self._whole is not self._buffers and fits:
            new, whole, begin = self, self._whole, self.begin - (length - self.length)
        else:
            new, begin = copy.copy(self), 0
            whole = tuple(part.new_empty(rows, part.shape[1], length + room, part.shape[3]) for part in self.buffers)
            new.buffers = whole
        for number, buffer in enumerate(whole):
            at = 0
            for layer in layers:
                part = layer._columns()[number]
                place = buffer[at : (at := at + part.shape[0]), :, begin : begin + length]
                # zeros, not empty: a masked column still meets the values, and 0 x NaN is NaN
                place[:, :, : length - layer.length] = 0
                if layer is not new:
                    place[:, :, length - layer.length :] = part
        new._buffers = tuple(buffer[:rows] for buffer in whole)
        new.begin, new.length = begin, length
        return new

    def content(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all columns, `[rows, heads, length, head_dim]`, as a query attends to them."""
        return self._decode(self._columns())

    def stored(self) -> tuple[Tensor, ...]:
        """The stored columns; of a fixed layer the free ones too."""
        return self.buffers if self.fixed else self._columns()

    # -- how columns are stored ----------------------------------------------------------------------------------------

    def _encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return keys, values

    def _decode(self, columns: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        keys, values = columns
        return keys, values

    def _found(self, number: int) -> Tensor:
        """The keys (0) or the values (1) of the rows' own columns."""
        return self.buffers[number].narrow(2, self.begin, self.length)

    def _columns(self) -> tuple[Tensor, ...]:
        return tuple([buffer.narrow(2, self.begin, self.length) for buffer in self.buffers])

    def _append(self, columns: tuple[Tensor, ...]) -> None:
        end = self.begin + self.length
        new = end + columns[0].shape[-2]
        if not self.buffers:
            self.buffers = tuple(
                column.new_empty(*column.shape[:2], new + self.room, column.shape[3]) for column in columns
            )
            self.room = 0
        elif self.buffers[0].shape[-2] < new:
            needed = new - self.begin
            self._grow(self._roomy(needed))
            end, new = self.length, needed
        for buffer, column in zip(self.buffers, columns, strict=True):
            buffer[:, :, end:new] = column
        self.length = new - self.begin

    def _roomy(self, columns: int) -> int:
        """The new capacity of a full buffer that must hold so many columns (see `grown`)."""
        return columns + max(STEP, self.length // 2)

    def _grow(self, capacity: int) -> None:
        grown = []
        for old in self._columns():
            buffer = old.new_empty(*old.shape[:2], capacity, old.shape[3])
            buffer[:, :, : self.length] = old
            grown.append(buffer)
        self.buffers, self.begin = tuple(grown), 0

    def _move(self, device: torch.device | str) -> None:
        if self.buffers and self.buffers[0].device != (torch.device(device) if isinstance(device, str) else device):
            self.buffers = tuple(buffer.to(device, non_blocking=True) for buffer in self.buffers)

    def _take(self, other: GrowingLayer) -> None:
        self.length, self.begin, self.buffers = other.length, other.begin, other.buffers


class SlidingLayer(GrowingLayer):
    """A sliding-window layer: columns that no later token can see are dropped.

    The newest `window - 1` columns stay, at the end of a buffer with room; when it is full they move to the front of
    another. A buffer has as many columns as the text will have, but at most `STEP` more than the window keeps. A window
    of 1 keeps all columns, as transformers' does (`DynamicSlidingWindowLayer` keeps `[-window + 1:]`).
    """

    kind = "sliding window"
    is_sliding = True

    def __init__(self, sliding_window: int, room: int = 0) -> None:
        super().__init__(room)
        self.sliding_window = sliding_window
        self.most = sliding_window - 1 or sys.maxsize  # columns that stay
        self.seen = 0  # columns ever appended
        self.record_past = False

    def activate_past_recording(self) -> None:
        """Drop nothing until the next `crop`, so that tokens can be removed."""
        self.record_past = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append columns; returns the visible ones, `[rows, heads, at most window - 1 + new, head_dim]`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        first, self.seen = self.seen == 0, self.seen + new
        if first and not self.record_past:  # a long prompt: what is let go is not even stored
            start = max(new - self.most, 0)
            self._append((key_states[:, :, start:], value_states[:, :, start:]))
            return key_states, value_states
        self._append((key_states, value_states))
        keys, values = self._columns()
        if self.record_past:
            visible = min(self.most + new, keys.shape[-2])
            keys, values = keys[:, :, -visible:], values[:, :, -visible:]
        else:
            self._let_go()
        return keys, values

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
        """Remove the newest columns, and drop what is older than the window.

        Raises ValueError if columns that are needed then were dropped.
        """
        removed = abs(tokens_to_remove)
        if self.is_initialized:
            if self.length - removed < min(self.seen - removed, self.most):
                raise ValueError(f"a window of {self.sliding_window} has let go of what is behind {removed} tokens")
            self.length -= removed
            self.seen -= removed
            self._let_go()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.seen = 0

    def select(self, rows: Tensor, *, room: int = 0, drop: int = 0) -> SlidingLayer:
        """A new layer with `rows` (int64 [N]) of this one, without its first `drop` columns. This one is unchanged."""
        seen = self.seen - drop
        surplus = max(self.length - seen, 0)
        new = super().select(rows, room=self._free(self.length - surplus, seen, room), drop=surplus)
        assert isinstance(new, SlidingLayer)
        new.seen = seen
        return new

    def keep(self, rows: Sequence[int], drop: int = 0) -> None:
        """Row i becomes row `rows[i]`, which is i or a later one, without the first `drop` columns; in place."""
        self.seen -= drop
        super().keep(rows, max(self.length - self.seen, 0))

    def merge(self, others: Sequence[GrowingLayer], room: int = 0) -> SlidingLayer:
        """A new layer with the rows of this one and of others, aligned to the right over zeros."""
        seen = max(self.seen, *(other.seen for other in others if isinstance(other, SlidingLayer)))
        longest = max(layer.length for layer in (self, *others))
        new = super().merge(others, self._free(longest, seen, room))
        assert isinstance(new, SlidingLayer)
        new.seen = seen
        return new

    def hold(self, keys: Tensor, values: Tensor, room: int = 0) -> None:
        """Take `keys` and `values` of a whole text as the content."""
        seen = keys.shape[-2]
        start = max(seen - self.most, 0)
        if start:  # a copy, not a view: what is let go must not stay in memory
            keys, values = keys[:, :, start:].clone(), values[:, :, start:].clone()
        super().hold(keys, values, self._free(seen - start, seen, room))
        self.seen = seen

    def _free(self, stored: int, seen: int, room: int) -> int:
        """Columns to keep free after the stored ones, if `room` more will come."""
        return max(min(seen + room, self.most + STEP) - stored, 0) if room else 0

    def _roomy(self, columns: int) -> int:
        return max(columns, min(super()._roomy(columns), self.most + STEP))

    def _let_go(self) -> None:
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
    fixed = True
    lent = False  # whether another layer writes behind the columns of this one

    def lend(self, room: int) -> StaticLayer | None:
        """A layer that continues in these buffers, after the columns of this one; None if they do not fit exactly.

        This one's columns are unchanged. Buffers are lent once: two layers would write to the same columns.
        """
        if self.lent or self.begin or self.buffers[0].shape[-2] != self.length + room:
            return None
        new = copy.copy(self)
        self.lent = new.lent = True
        return new


class SlottedLayer(StaticLayer):
    """A static layer for compiled steps: rows always see the whole buffers, whose width is a multiple of `STEP`.

    Unwritten columns are zeros, because a masked column is still multiplied by the values, and 0 x NaN is NaN.
    Otherwise it is read like any static layer.
    """

    def select(self, rows: Tensor, *, room: int = 0, drop: int = 0) -> GrowingLayer:
        """A new layer with `rows` (int64 [N]) of this one, without its first `drop` columns. This one is unchanged."""
        new = super().select(rows, room=_rounded(self.length - drop, room), drop=drop)
        _blank(new)
        return new

    def merge(self, others: Sequence[GrowingLayer], room: int = 0) -> GrowingLayer:
        """A new layer with the rows of this one and of others, aligned to the right over zeros."""
        longest = max(layer.length for layer in (self, *others))
        new = super().merge(others, _rounded(longest, room))
        _blank(new)
        return new

    def slots(self) -> tuple[Tensor, Tensor]:
        """Keys and values, written or not, `[rows, heads, capacity, head_dim]`, with room for a column at `length`."""
        if self.buffers[0].shape[-2] <= self.length:
            self._grow(self.length + 1)
        keys, values = self.buffers
        return keys, values

    def written(self) -> None:
        """Count a column that was written at `length` from outside."""
        self.length += 1

    def _grow(self, capacity: int) -> None:
        super()._grow(self.length + _rounded(self.length, capacity - self.length))
        _blank(self)


def _rounded(length: int, room: int) -> int:
    """Free columns, at least `room`, that bring a buffer with `length` columns to a multiple of `STEP`."""
    return -(-(length + room) // STEP) * STEP - length


def _blank(layer: GrowingLayer) -> None:
    for buffer in layer.buffers:
        buffer[:, :, layer.length :] = 0


class QuantizedLayer(GrowingLayer):
    """A full-attention layer in 8 bits: the key and value of each token and head are scaled by their own largest
    number.

    Symmetric absmax quantisation, one float32 scale per token and head (as in LLM.int8(), Dettmers et al. 2022, for
    vectors): a token's codes never change, so rows can be appended, reordered, padded and cropped without a second
    rounding. Lossy. The prompt itself is read with exact numbers; later steps read the rounded ones.
    """

    kind = "quantised"

    def _encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return (*_quantize(keys), *_quantize(values))

    def _found(self, number: int) -> Tensor:
        return self.content()[number]

    def _decode(self, columns: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        keys, key_scales, values, value_scales = columns
        return (keys * key_scales).to(self.dtype), (values * value_scales).to(self.dtype)


def _quantize(states: Tensor) -> tuple[Tensor, Tensor]:
    """states [rows, heads, length, head_dim] -> int8 of that shape, float32 scales [rows, heads, length, 1]."""
    scales = states.float().abs().amax(-1, keepdim=True) / 127
    codes = (states.float() / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    return codes, scales
