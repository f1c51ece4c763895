"""A layer with a sliding window."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from genctl.decode.cache.growing import STEP, GrowingLayer
from genctl.decode.cache.layer import SLIDING, CacheLayer


class SlidingLayer(GrowingLayer):
    """A sliding-window layer: columns that no later token can see are dropped.

    The newest `window - 1` columns stay at the end of a buffer with room; when it is full they move to the front of
    another one. A buffer has as many columns as the final text, but at most `STEP` more than the window keeps. A window
    of 1 keeps all columns, as transformers' does (`DynamicSlidingWindowLayer` keeps `[-window + 1:]`).
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
        first, self.seen = self.seen == 0, self.seen + new
        if first and not self.record_past:  # a long prompt: dropped columns are never stored
            start = max(new - self.most, 0)
            self._append((key_states[:, :, start:], value_states[:, :, start:]))
            return key_states, value_states
        self._append((key_states, value_states))
        keys, values = self._columns()
        if self.record_past:
            visible = min(self.most + new, keys.shape[-2])
            keys, values = keys[:, :, -visible:], values[:, :, -visible:]
        else:
            self._drop_unseen()
        return keys, values

    def extend(self, count: int) -> tuple[int, int]:
        """See `GrowingLayer.extend`."""
        first, columns = super().extend(count)
        self.seen += count
        if self.record_past:
            visible = min(self.most + count, columns)
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
        """Remove the newest columns, and drop what is older than the window.

        Raises ValueError if columns that become visible again were dropped.
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
        """Row i becomes row `rows[i]` (int64 [N], as many as there are), in place, with all columns of the window."""
        return super().reorder(rows, 0)

    def keep(self, rows: Sequence[int], index: Tensor, *, room: int = 0, drop: int = 0) -> CacheLayer:
        """Row i becomes row `rows[i]`, which is i or a later one, without the first `drop` columns; in place."""
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
        """Take `keys` and `values` of a whole text as the content."""
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
        """Columns to keep free after the stored ones, if `room` more will come."""
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
