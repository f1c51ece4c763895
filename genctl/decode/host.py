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


class Desk:
    """Where the questions of several lanes wait, to be answered together."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Asked, Tensor, Callable[[Any], None]]] = []

    def take(self, asked: Asked, tensor: Tensor, use: Callable[[Any], None]) -> None:
        """Keep a question for the next `fetch`."""
        self._waiting.append((asked, tensor, use))

    def fetch(self) -> None:
        """Wait for the device once, and lay out every answer for whoever asked."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        flat = torch.cat([tensor.flatten().float() for _, tensor, _ in waiting]).cpu()
        parts = flat.split_with_sizes([tensor.numel() for _, tensor, _ in waiting])
        for part, (asked, tensor, use) in zip(parts, waiting, strict=True):
            asked.answers.append((use, part.view(tensor.shape).to(tensor.dtype).tolist()))


class Asked:
    """Numbers that the host wants to know of one lane's step, and what it does with them."""

    def __init__(self, desk: Desk | None = None) -> None:
        self.desk = desk or Desk()
        self.answers: list[tuple[Callable[[Any], None], Any]] = []

    def ask(self, tensor: Tensor, use: Callable[[Any], None]) -> None:
        """Call `use` with the tensor's numbers as (nested) lists: now on the CPU, else in `settle` after a fetch.

        Numbers pass through float32, which holds scores, tokens and rows as they are.
        """
        if near(tensor):
            use(tensor.tolist())
        else:
            self.desk.take(self, tensor, use)

    def settle(self) -> None:
        """Use the answers that are there, in the order of the questions. What a `use` raises ends it."""
        answers, self.answers = self.answers, []
        for use, numbers in answers:
            use(numbers)

    def fetch(self) -> None:
        """Wait for the answers, with whatever else is asked for at the desk, and use them."""
        self.desk.fetch()
        self.settle()

    def now(self, *tensors: Tensor) -> list[Any]:
        """These tensors' numbers as lists, with whatever else was asked for."""
        found: list[Any] = []
        for tensor in tensors:
            self.ask(tensor, found.append)
        self.fetch()
        return found
