"""A layer of keys and values in buffers with room to grow.

A layer stores them as columns of one or more buffers: unchanged here, in a buffer that is allocated once
(`forms.StaticLayer`), or in 8 bits (`forms.QuantizedLayer`). Appending copies only new columns; selecting rows,
merging lanes and cropping work on the stored columns in any form. The layers have the attributes that transformers'
caches expect, so every model accepts them (`foreign` registers them); this file does not import transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from genctl.decode.cache.layer import FULL, CacheLayer, attention_entry, bytes_in_memory

STEP = 64  # a full buffer grows by half, and by at least this many columns
LEAST_SHARED = 64  # columns; shorter prompts are not shared


def grown(columns: int) -> int:
    """The largest capacity of a buffer that grew as it filled and now holds this many columns."""
    return columns + max(STEP, (columns - 1) // 2)


class GrowingLayer(CacheLayer):
    """A full-attention layer whose buffers have room: appending copies only new columns."""

    kind = FULL
    has_columns = only_columns = is_plain = is_mergeable = True
    is_croppable = True
    is_initialized = record_past = False
    prompt: tuple[Tensor, Tensor] | None = None  # see `layer.KeyValues`
    is_convertible = True  # whether it can be converted to another form
    extends = True  # whether its buffers hold the values unencoded, so that a caller may write columns (`extend`)
    is_chosen = False  # whether its form was chosen with `cache_implementation`
    is_sliding, is_compileable, supports_early_init = False, False, True  # attributes that transformers' caches read

    def __init__(self, room: int = 0) -> None:
        self.dtype, self.device = torch.float32, torch.device("cpu")  # until something is stored
        self.room = room  # columns to keep free after the first write, if the final length is known
        self.length = 0  # columns stored
        self.begin = 0  # the first of them in the buffers
        self.buffers = ()  # each [rows, heads, capacity, size]

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The buffers of the columns, each `[rows, heads, capacity, size]`."""
        return self._buffers

    @buffers.setter
    def buffers(self, buffers: tuple[Tensor, ...]) -> None:
        self._buffers = buffers
        self._allocated = buffers  # includes rows that left (see `keep`), which others may overwrite

    @property
    def is_shareable(self) -> bool:
        """Whether the layer holds a prompt that is long enough for rows to share (`shared.SharedLayer`)."""
        return type(self) is GrowingLayer and self.is_initialized and self.length >= LEAST_SHARED

    @property
    def capacity(self) -> int:
        """The number of columns in the buffers, free ones included."""
        return self.buffers[0].shape[-2]

    @property
    def keys(self) -> Tensor | None:
        """The keys for transformers' code, `[rows, heads, length, head_dim]`; None before anything is stored."""
        return self._states(0) if self.buffers else None

    @property
    def values(self) -> Tensor | None:
        """Like `keys`."""
        return self._states(1) if self.buffers else None

    # -- what models call ----------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Adopt the dtype and the device of the first keys."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append columns; returns all keys and values, `[rows, heads, length, head_dim]`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.prefetch()
        first = self.length == 0
        self._append(self._encode(key_states, value_states))
        # return the exact values of the first write, even if they are stored rounded
        return (key_states, value_states) if first else self.content()

    def open(
        self, rows: int, heads: int, size: int, dtype: torch.dtype, count: int, device: torch.device | None = None
    ) -> None:
        """Allocate buffers for a first `extend` by `count` columns, on the CPU if no device is given."""
        self.dtype, self.device, self.is_initialized = dtype, device or torch.device("cpu"), True
        like = torch.empty(rows, heads, 0, size, dtype=dtype, device=device)
        self.buffers = tuple(self._allocate(like, rows, count + self.room) for _ in range(2))
        self.room = 0

    def extend(self, count: int) -> tuple[int, int]:
        """Like `update`, but the caller writes the new columns into the buffers, which must exist.

        Returns the first column that the new tokens see, and the number of columns, the new ones included.
        """
        self._room_for(count)
        self.length += count
        return self.begin, self.length

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
        """Set the content to `keys` and `values`. They are copied only into a buffer with room or of another form."""
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.length, self.room = keys.shape[-2], 0
        self.buffers = self._encode(keys, values)
        if room:
            self._grow(self.length + room)

    def select(self, rows: Tensor, *, room: int = 0, drop: int = 0) -> GrowingLayer:
        """A new layer with `rows` (int64 [N]) of this one, without its first `drop` columns. This one is unchanged."""
        new = copy.copy(self)
        if not self.is_initialized:
            return new
        new.length, new.begin = self.length - drop, 0
        rows = rows.to(self.buffers[0].device)
        held = []
        for old in self._columns():
            buffer = self._allocate(old, len(rows), new.length + room)
            torch.index_select(old[:, :, drop:], 0, rows, out=buffer[:, :, : new.length])
            held.append(buffer)
        new.buffers = tuple(held)
        return new

    def reorder(self, rows: Tensor, since: int) -> GrowingLayer:
        """Replace row i by row `rows[i]` (int64 [N], one per row), in place, from column `since` on."""
        if since < self.length:
            rows = rows.to(self.buffers[0].device)
            for part in self._columns():
                part[:, :, since:] = part[:, :, since:].index_select(0, rows)
        return self

    def keep(self, rows: Sequence[int], index: Tensor, *, room: int = 0, drop: int = 0) -> CacheLayer:
        """Replace row i by row `rows[i]` >= i, without the first `drop` columns; in place.

        Rows that leave stay in the buffers, so that `merge` can overwrite them. A fixed layer is copied.
        """
        if self.is_fixed or not self.is_initialized:
            return self.select(index, room=room, drop=drop)
        self.begin += drop
        self.length -= drop
        for columns in self._columns():
            for place, row in enumerate(rows):
                if row != place:
                    columns[place] = columns[row]
        self._buffers = tuple(buffer[: len(rows)] for buffer in self._buffers)
        return self

    def merge(self, others: Sequence[GrowingLayer], room: int = 0) -> GrowingLayer:
        """A layer with the rows of this one and of others, aligned to the right over zeros.

        It is this layer, in place, if the others fit in the places of rows that left; else a new one with `room`.
        """
        if not self.is_initialized:
            return copy.copy(self)
        layers = (self, *others)
        length = max(layer.length for layer in layers)
        rows = sum(layer.buffers[0].shape[0] for layer in layers)
        fits = rows <= self._allocated[0].shape[0] and length - self.length <= self.begin
        if self._allocated is not self._buffers and fits:
            new, buffers, begin = self, self._allocated, self.begin - (length - self.length)
        else:
            new, begin = copy.copy(self), 0
            buffers = tuple(self._allocate(part, rows, length + room) for part in self.buffers)
            new.buffers = buffers
        for number, buffer in enumerate(buffers):
            at = 0
            for layer in layers:
                part = layer._columns()[number]
                place = buffer[at : (at := at + part.shape[0]), :, begin : begin + length]
                # zeros, not empty: a masked column is still multiplied by the values, and 0 x NaN is NaN
                place[:, :, : length - layer.length] = 0
                if layer is not new:
                    place[:, :, length - layer.length :] = part
        new._buffers = tuple(buffer[:rows] for buffer in buffers)
        new.begin, new.length = begin, length
        return new

    def content(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all columns, `[rows, heads, length, head_dim]`, as a query attends to them."""
        return self._decode(self._columns())

    def converted(self, form: type[GrowingLayer], room: int = 0) -> GrowingLayer:
        """The layer in another form, with `room` additional columns if that form is fixed.

        Returns this layer if it already has the form or cannot be converted.
        """
        if not self.is_convertible or isinstance(self, form):
            return self
        new = form()
        if self.is_initialized:
            new.hold(*self.content(), room if form.is_fixed else 0)
        return new

    # -- contents ------------------------------------------------------------------------------------------------------

    def describe(self, number: int) -> list[dict[str, Any]]:
        """See `Cache.describe`."""
        return [attention_entry(number, self.kind, self._columns())] if self.is_initialized else []

    def reserved(self) -> int:
        """Bytes of the buffers, free columns included."""
        return sum(map(bytes_in_memory, self.buffers))

    def state_dict(self) -> dict[str, Tensor]:
        """The keys and values of all columns."""
        return dict(zip(("keys", "values"), self.content(), strict=True)) if self.is_initialized else {}

    def load_state_dict(self, states: Mapping[str, Tensor], length: int) -> None:
        """Load the keys and values, stored after `length` tokens. Raises KeyError."""
        if "keys" in states:
            self.hold(states["keys"], states["values"])

    # -- how columns are stored ----------------------------------------------------------------------------------------

    def _encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return keys, values

    def _decode(self, columns: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        keys, values = columns
        return keys, values

    def _states(self, number: int) -> Tensor:
        """The keys (0) or the values (1) of the rows' own columns."""
        return self.buffers[number].narrow(2, self.begin, self.length)

    def _columns(self) -> tuple[Tensor, ...]:
        return tuple([buffer.narrow(2, self.begin, self.length) for buffer in self.buffers])

    def _append(self, columns: tuple[Tensor, ...]) -> None:
        count = columns[0].shape[-2]
        if not self.buffers:
            capacity = self.begin + self.length + count + self.room
            self.buffers = tuple(self._allocate(column, len(column), capacity) for column in columns)
            self.room = 0
        self._room_for(count)
        end = self.begin + self.length
        for buffer, column in zip(self.buffers, columns, strict=True):
            buffer[:, :, end : end + count] = column
        self.length += count

    def _allocate(self, like: Tensor, rows: int, columns: int) -> Tensor:
        """A buffer for so many rows and columns, with the heads, head size and dtype of `like`."""
        return like.new_empty(rows, like.shape[1], columns, like.shape[3])

    def _room_for(self, count: int) -> None:
        """Grow the buffers if they have fewer than `count` free columns."""
        if self.capacity < self.begin + self.length + count:
            self._grow(self._roomy(self.length + count))

    def _roomy(self, columns: int) -> int:
        """The new capacity of a full buffer that must hold this many columns (see `grown`)."""
        return columns + max(STEP, self.length // 2)

    def _grow(self, capacity: int) -> None:
        grown = []
        for old in self._columns():
            buffer = self._allocate(old, len(old), capacity)
            buffer[:, :, : self.length] = old
            grown.append(buffer)
        self.buffers, self.begin = tuple(grown), 0

    def _move(self, device: torch.device | str) -> None:
        if self.buffers and self.buffers[0].device != (torch.device(device) if isinstance(device, str) else device):
            self.buffers = tuple(buffer.to(device, non_blocking=True) for buffer in self.buffers)

    def _take(self, other: GrowingLayer) -> None:
        self.length, self.begin, self.buffers = other.length, other.begin, other.buffers


class OffloadedLayer(GrowingLayer):
    """A full-attention layer with its columns on the host, copied to the GPU for each pass.

    The GPU holds one layer at a time. `device` is the model's device.
    """

    is_plain = is_convertible = False
    is_chosen = True
    extends = False

    def prefetch(self) -> None:
        """Does nothing: `content` copies the columns."""

    def _encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return keys.to("cpu"), values.to("cpu")  # blocks until they are computed

    def _decode(self, columns: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        keys, values = (part.to(self.device, non_blocking=True) for part in columns)
        return keys, values

    def _states(self, number: int) -> Tensor:
        return self.content()[number]

    def _allocate(self, like: Tensor, rows: int, columns: int) -> Tensor:
        shape = rows, like.shape[1], columns, like.shape[3]
        return torch.empty(shape, dtype=like.dtype, pin_memory=self.device.type == "cuda")
