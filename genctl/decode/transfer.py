"""Transfers between the host and the device.

Reading a number from a GPU waits for all queued work, and then the GPU waits for the host. So the numbers of a step
are collected and fetched at once; if the next pass does not depend on them, it is launched meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from genctl.decode.processors import on_host as on_host


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 [N] on a device, without waiting for the work queued on a GPU."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.long, device=device)
    return torch.tensor(numbers, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)


class PendingCopy:
    """Tensors on their way to the host. The copy is queued at construction, so work launched later does not delay it.

    From another device they are copied as two tensors: floats as float32, integers and booleans as int64. Tensors on
    the host are not copied.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self.groups = groups
        tensors = [tensor for group in groups for tensor in group]
        self._moves = None if on_host(*tensors) else (_Move(tensors, torch.long), _Move(tensors, torch.float32))

    def wait(self) -> list[list[Any]]:
        """The numbers as nested lists, group by group."""
        if self._moves is None:
            return [[tensor.tolist() for tensor in group] for group in self.groups]
        integers, floats = (move.numbers() for move in self._moves)
        return [[next(floats if tensor.is_floating_point() else integers) for tensor in group] for group in self.groups]


def fetch(groups: Sequence[Sequence[Tensor]]) -> list[list[Any]]:
    """The numbers of all tensors, in one transfer."""
    return PendingCopy(groups).wait()


class _Move:
    """One copy of all floats among the tensors, or of all others."""

    def __init__(self, tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
        self.tensors = [tensor for tensor in tensors if tensor.is_floating_point() == dtype.is_floating_point]
        self.copied: torch.cuda.Event | None = None
        if not self.tensors:
            return
        flat = torch.cat([tensor.flatten().to(dtype) for tensor in self.tensors])
        is_cuda = flat.device.type == "cuda"
        self.flat = flat.to("cpu", non_blocking=is_cuda)
        if is_cuda:
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch is
            self.copied.record(torch.cuda.current_stream(flat.device))

    def numbers(self) -> Iterator[Any]:
        """Each tensor's numbers."""
        if not self.tensors:
            return iter(())
        if self.copied is not None:
            self.copied.synchronize()
        parts = self.flat.split_with_sizes([tensor.numel() for tensor in self.tensors])
        return (part.view(tensor.shape).tolist() for part, tensor in zip(parts, self.tensors, strict=True))
