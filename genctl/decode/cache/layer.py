"""The interface of a cache's layers. A layer stores the state of one model layer after the tokens read so far.

Keys and values are `[rows, heads, length, head_dim]`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

CROSS, RECURRENT, SLIDING, FULL = "cross-attention", "recurrent state", "sliding window", "full"


class KeyValues(Protocol):
    """The part of a layer that attention uses."""

    prompt: tuple[Tensor, Tensor] | None  # keys and values `[1, heads, length, head_dim]` shared by all rows

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Append columns; returns all visible keys and values, without those of `prompt`."""

    def content(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all columns, those of `prompt` included."""


class CacheLayer(ABC):
    """One layer of a cache: keys and values of its rows, a recurrent state, both, or nothing.

    Methods that change rows return the layer with the new rows: this one, changed in place, or a new one.
    """

    kind = ""  # the name of its content in `describe` and in notes
    has_columns = False  # whether it keeps keys and values of tokens
    only_columns = False  # whether it keeps only those, so that columns can be removed at both ends
    is_plain = False  # whether a query sees exactly the columns that are stored
    is_recurrent = False  # whether it keeps a state of constant size
    is_fixed = False  # whether it is allocated once and needs an exact `room`
    is_slotted = False  # whether steps may write to its buffers at a place given by a tensor
    is_mergeable = False  # whether rows of several lanes may share it
    record_past = False  # whether it keeps columns that it would otherwise drop, until the next `crop`
    prompt: tuple[Tensor, Tensor] | None = None  # see `KeyValues`

    @property
    def for_model(self) -> Any:
        """The object that the model receives for this layer."""
        return self

    @abstractmethod
    def select(self, rows: Tensor, *, room: int = 0, drop: int = 0) -> CacheLayer:
        """A new layer with `rows` (int64 [N]) of this one, without its first `drop` columns. This one is unchanged.

        `room`: columns to keep free, where a layer has buffers.
        """

    def reorder(self, rows: Tensor, since: int) -> CacheLayer:
        """Replace row i by row `rows[i]` (int64 [N], one per row); rows are equal before column `since`."""
        return self.select(rows)

    def keep(self, rows: Sequence[int], index: Tensor, *, room: int = 0, drop: int = 0) -> CacheLayer:
        """Replace row i by row `rows[i]` >= i; `index` is `rows` as a tensor int64 [N]."""
        return self.select(index, room=room, drop=drop)

    def continued(self, rows: Tensor, room: int) -> CacheLayer:
        """See `Cache.continued`."""
        return self.select(rows, room=room)

    def merge(self, others: Sequence[Any], room: int = 0) -> CacheLayer:
        """A layer with the rows of this one and of others, aligned to the right. Only if it `is_mergeable`."""
        raise NotImplementedError

    def unshared(self) -> CacheLayer:
        """A layer in which every row stores all of its columns."""
        return self

    @abstractmethod
    def get_seq_length(self) -> int:
        """Columns ever appended; 0 if columns are not counted."""

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `abs(tokens_to_remove)` columns, in place. Only if it `is_croppable`."""
        raise NotImplementedError

    def activate_past_recording(self) -> None:  # noqa: B027 — most layers drop nothing
        """Keep columns that would be dropped until the next `crop`, so that tokens can be removed."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append columns; returns all visible keys and values, without those of `prompt`. Only if it `only_columns`."""
        raise NotImplementedError

    def content(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all columns, as a query attends to them. Only if it `has_columns`."""
        raise NotImplementedError

    def converted(self, form: type[Any], room: int = 0) -> CacheLayer:
        """The layer in another form, with `room` additional columns if that is fixed; itself if there is none."""
        return self

    def describe(self, number: int) -> list[dict[str, Any]]:
        """The parts of layer `number`, as `Cache.describe` lists them."""
        return []

    def reserved(self) -> int:
        """Bytes of all buffers, free columns included."""
        return sum(part["bytes"] for part in self.describe(0))

    def state_dict(self) -> dict[str, Tensor]:
        """The stored tensors: `keys`, `values`, `conv.J`, `recurrent.J`. Raises ModelError if it cannot be saved."""
        return {}

    def load_state_dict(self, states: Mapping[str, Tensor], length: int) -> None:  # noqa: B027 — some store nothing
        """Load the result of `state_dict`, stored after `length` tokens. Raises KeyError or ValueError."""


def entry(number: int, kind: str, keys: Tensor, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The description of a part: the shape and dtype of `keys`, the bytes of all its tensors."""
    return {
        "layer": number,
        "kind": kind,
        "shape": shape_in_memory(keys),
        "dtype": str(keys.dtype).removeprefix("torch."),
        "device": str(keys.device),
        "bytes": sum(map(bytes_in_memory, tensors)),
    }


def attention_entry(number: int, kind: str, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The description of keys and values; the first half of the tensors hold the keys."""
    keys, values = tensors[0], tensors[len(tensors) // 2]
    part = entry(number, kind, keys, tensors)
    if shape_in_memory(values) != part["shape"]:
        part["value_shape"] = shape_in_memory(values)
    return part


def shape_in_memory(tensor: Tensor) -> list[int]:
    """The shape with every dimension of stride 0 counted once."""
    return [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def bytes_in_memory(tensor: Tensor) -> int:
    """Bytes of a tensor; expanded dimensions (stride 0) count once."""
    return math.prod(shape_in_memory(tensor)) * tensor.element_size()
