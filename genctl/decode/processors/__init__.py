"""Logits processors: (history, scores) -> scores. Start with `build` and `trace`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

# A function of what was written and what was scored: (history int64 [R, T], scores f32 [R, V]) -> scores [R, V].
Processor: TypeAlias = Callable[["Tensor", "Tensor"], "Tensor"]


def on_host(*tensors: Tensor) -> bool:
    """Whether the host can read tensors without waiting for another device."""
    return all(tensor.device.type == "cpu" for tensor in tensors)
