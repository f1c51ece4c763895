"""What crosses between the device that computes and the host that decides.

A host that asks a GPU for a number waits until all work given to it is done, and the GPU then waits for the host. So
what a step has to know is collected first and fetched once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> bool:
    """Whether the host reads a tensor without waiting for another device."""
    return tensor.device.type == "cpu"


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 [N] on a device; a GPU's queue is not waited for."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.long, device=device)
    return torch.tensor(numbers, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)


def fetch(groups: Sequence[Sequence[Tensor]]) -> list[list[Any]]:
    """The numbers of tensors as (nested) lists, group by group. Whole numbers stay whole, all others pass as float32.

    From another device they come together: one tensor for each of the two kinds.
    """
    if all(on_host(tensor) for group in groups for tensor in group):
        return [[tensor.tolist() for tensor in group] for group in groups]
    whole = _moved((tensor for group in groups for tensor in group if not tensor.is_floating_point()), torch.long)
    real = _moved((tensor for group in groups for tensor in group if tensor.is_floating_point()), torch.float32)
    return [[next(real if tensor.is_floating_point() else whole) for tensor in group] for group in groups]


def _moved(tensors: Iterable[Tensor], dtype: torch.dtype) -> Any:
    """An iterator over the tensors' numbers as lists, moved as one tensor of this dtype."""
    found = list(tensors)
    if not found:
        return iter(())
    flat = torch.cat([tensor.flatten().to(dtype) for tensor in found]).cpu()
    parts = flat.split_with_sizes([tensor.numel() for tensor in found])
    return (part.view(tensor.shape).tolist() for part, tensor in zip(parts, found, strict=True))
