"""A layer in the memory of the host."""

from __future__ import annotations

import torch
from torch import Tensor

from genctl.decode.cache.growing import GrowingLayer


class OffloadedLayer(GrowingLayer):
    """A full-attention layer whose columns lie on the host, and are copied to the GPU for each pass.

    The GPU holds one layer at a time. `device` is that of the model.
    """

    is_plain = is_convertible = False
    is_chosen = True
    extends = False

    def prefetch(self) -> None:
        """Does nothing: `content` copies."""

    def _encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return _on_host(keys), _on_host(values)

    def _decode(self, columns: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        keys, values = (part.to(self.device, non_blocking=True) for part in columns)
        return keys, values

    def _states(self, number: int) -> Tensor:
        return self.content()[number]

    def _allocate(self, like: Tensor, rows: int, columns: int) -> Tensor:
        shape = rows, like.shape[1], columns, like.shape[3]
        return torch.empty(shape, dtype=like.dtype, pin_memory=self.device.type == "cuda")


def _on_host(states: Tensor) -> Tensor:
    """A copy, once it is complete."""
    return states.to("cpu")
