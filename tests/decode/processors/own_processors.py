"""Processors as a user may write them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor


class Shift(LogitsProcessor):  # type: ignore[misc]
    """Adds `by` to token 0."""

    def __init__(self, by: float = 1.0) -> None:
        if by == 0:
            raise ValueError("by must not be 0")
        self.by = by

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        made = scores.clone()
        made[:, 0] += self.by
        return made


def double(history: torch.Tensor, scores: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return scores * factor


def narrow(history: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores[:, :2]


def nothing(history: torch.Tensor, scores: torch.Tensor) -> None:
    scores.clone()


def broken(history: torch.Tensor, scores: torch.Tensor) -> Any:
    raise KeyError("where is\nit")


def alone(scores: torch.Tensor) -> torch.Tensor:
    return scores


NUMBER = 3
