"""What crosses between the device that computes and the host that decides.

A host that asks a GPU for a number waits until all work given to it is done, and the GPU then waits for the host. So
what the loop wants to know of a step is asked for together and fetched once. On the CPU there is nothing to wait for:
every answer is given at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def near(tensor: Tensor) -> bool:
    """Whether the host reads a tensor without waiting for another device."""
    return tensor.device.type == "cpu"


def sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 [N] on a device; a GPU's queue is not waited for."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.long, device=device)
    return torch.tensor(numbers, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)


class Asked:
    """Numbers that the host wants to know of one step, and what it does with them."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Callable[[Any], None]]] = []

    def ask(self, tensor: Tensor, use: Callable[[Any], None]) -> None:
        """Call `use` with the tensor's numbers as (nested) lists: now on the CPU, else when `fetch` is called.

        Numbers pass through float32, which holds scores, tokens and rows as they are.
        """
        if near(tensor):
            use(tensor.tolist())
        else:
            self._waiting.append((tensor, use))

    def fetch(self) -> None:
        """Hand over everything that was asked for, in order. What `use` raises ends it."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        flat = torch.cat([tensor.flatten().float() for tensor, _ in waiting]).cpu()
        parts = flat.split_with_sizes([tensor.numel() for tensor, _ in waiting])
        for part, (tensor, use) in zip(parts, waiting, strict=True):
            use(part.view(tensor.shape).to(tensor.dtype).tolist())

    def now(self, *tensors: Tensor) -> list[Any]:
        """These tensors' numbers as lists, with whatever else was asked for."""
        found: list[Any] = []
        for tensor in tensors:
            self.ask(tensor, found.append)
        self.fetch()
        return found
