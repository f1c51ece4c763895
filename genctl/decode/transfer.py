"""Transfers between the host and the device.

Reading a number from a GPU waits for all queued work, and then the GPU waits for the host. So the numbers of a step
are collected first and fetched once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from genctl.decode.processors import on_host as on_host


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 [N] on a device, without waiting for a GPU's queue."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.long, device=device)
    return torch.tensor(numbers, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)


def fetch(groups: Sequence[Sequence[Tensor]]) -> list[list[Any]]:
    """The numbers of tensors as (nested) lists, group by group. Integers stay integers, all others pass as float32.

    From another device each of the two kinds is copied as one tensor.
    """
    if on_host(*[tensor for group in groups for tensor in group]):
        return [[tensor.tolist() for tensor in group] for group in groups]
    integers = _moved((tensor for group in groups for tensor in group if not tensor.is_floating_point()), torch.long)
    floats = _moved((tensor for group in groups for tensor in group if tensor.is_floating_point()), torch.float32)
    return [[next(floats if tensor.is_floating_point() else integers) for tensor in group] for group in groups]


def _moved(tensors: Iterable[Tensor], dtype: torch.dtype) -> Any:
    """An iterator over the tensors' numbers as lists, moved as one tensor of this dtype."""
    moved = list(tensors)
    if not moved:
        return iter(())
    flat = torch.cat([tensor.flatten().to(dtype) for tensor in moved]).cpu()
    parts = flat.split_with_sizes([tensor.numel() for tensor in moved])
    return (part.view(tensor.shape).tolist() for part, tensor in zip(parts, moved, strict=True))
