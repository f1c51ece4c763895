"""Keys and values of a prompt, or of an encoder's source, stored once for all rows that attend to them.

Beams and samples of one prompt, and strategies compared on it, share the prompt's columns: these are neither copied
nor reordered, and attention reads them once for all rows. Attention is computed in two parts, over the prompt with all
rows as queries and over each row's own columns, and merged by their log-sum-exps (as in FlashAttention, Dao et al.
2022; shared prefixes as in Hydragen, Juravsky et al. 2024).

Each encoder source is stored once too: the decoder rows of a source are queries on its single row.

R rows, G query heads for each of H key heads, P prompt columns, S own columns, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from genctl.compat import attention_with_sums
from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.cache.layer import bytes_in_memory


class SharedLayer(GrowingLayer):
    """A full-attention layer whose first columns are the same for all rows, and stored once."""

    is_plain = is_convertible = False
    prompt: tuple[Tensor, Tensor]  # keys and values, [1, H, P, D]

    def __init__(self, prompt: GrowingLayer, rows: int, room: int) -> None:
        super().__init__(room)
        keys, values = prompt.content()
        self.prompt = keys, values
        self.columns = keys.shape[-2]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.buffers = tuple(part.new_empty(rows, part.shape[1], room, part.shape[3]) for part in (keys, values))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append columns; returns each row's own, `[R, H, S, D]`; `attend` adds the shared ones."""
        self._append((key_states, value_states))
        keys, values = self._columns()
        return keys, values

    def get_seq_length(self) -> int:
        """The number of columns of a row, the shared ones included."""
        return self.columns + self.length

    def reorder(self, rows: Tensor, since: int) -> GrowingLayer:
        """Replace row i by row `rows[i]`, in place; the shared columns are not moved."""
        return super().reorder(rows, max(since - self.columns, 0))

    def merge(self, others: Sequence[Any], room: int = 0) -> GrowingLayer:
        """A layer with the rows of all; the prompt stays shared if it is the same and the rows have equal length."""
        own = self.prompt[0].data_ptr(), self.columns, self.length
        for other in others:
            if not isinstance(other, SharedLayer) or (other.prompt[0].data_ptr(), other.columns, other.length) != own:
                return self.unshared().merge([other.unshared() for other in others], room)
        return super().merge(others, room)

    def unshared(self) -> GrowingLayer:
        """A plain layer with all columns in every row."""
        new = GrowingLayer()
        rows = self.buffers[0].shape[0]
        keys, values = (
            torch.cat([prompt.expand(rows, -1, -1, -1), own], 2)
            for prompt, own in zip(self.prompt, self._columns(), strict=True)
        )
        new.hold(keys, values)
        return new

    def content(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all columns, `[R, H, P + S, D]`."""
        return self.unshared().content()

    def describe(self, number: int) -> list[dict[str, Any]]:
        """See `Cache.describe`: the bytes of the prompt count once for all rows."""
        parts = super().describe(number)
        for part in parts:
            part["shape"][2] += self.columns
            part["bytes"] += sum(map(bytes_in_memory, self.prompt))
            part["shared"] = self.columns
        return parts

    def reserved(self) -> int:
        """Bytes of the buffers and of the prompt."""
        return super().reserved() + sum(map(bytes_in_memory, self.prompt))


def attend(
    query: Tensor, prompt: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], scaling: float | None = None
) -> Tensor:
    """Attention of one new token per row: query [R, H·G, 1, D] -> [R, 1, H·G, D].

    Keys and values: `prompt` [1, H, P, D], each row's `own` [R, H, S, D].
    """
    rows, heads, _, size = query.shape
    groups = heads // own[0].shape[1]
    # the prompt is read once: each row and each head of a group is one more query on it
    queries = query.view(rows, heads // groups, groups, size)
    merged = queries.permute(1, 0, 2, 3).reshape(1, heads // groups, rows * groups, size)
    far, far_sum = attention_with_sums(merged, prompt[0], prompt[1], scaling)
    near, near_sum = attention_with_sums(queries, own[0], own[1], scaling)
    far = far.view(heads // groups, rows, groups, size).transpose(0, 1)
    far_sum = far_sum.view(heads // groups, rows, groups).transpose(0, 1)
    weight = torch.sigmoid(far_sum - near_sum)[..., None].to(near.dtype)
    return torch.lerp(near, far, weight).reshape(rows, 1, heads, size)
