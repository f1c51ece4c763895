"""A logits processor that ends its process at one token of a prompt, as a broken library could end a worker."""

from __future__ import annotations

import os

import torch

POISON = 299


def at_the_poison(history: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if bool((history == POISON).any()):
        os._exit(9)
    return scores
