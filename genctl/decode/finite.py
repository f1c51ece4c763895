"""Logits that are no numbers: one check and one error, for all that reads logits."""

from __future__ import annotations

import torch
from torch import Tensor

from genctl.errors import ModelError


def is_finite(logits: Tensor) -> bool:
    """Whether logits f32 [..., V] are a distribution in every row. Some tokens may be forbidden (-inf), not all."""
    return bool(torch.isfinite(logits.amax(-1)).all())  # NaN, if a logit of the row is


def check_finite(logits: Tensor, where: str) -> None:
    """Raises ModelError, which says `where`, unless logits are a distribution."""
    if not is_finite(logits):
        raise damaged(where)


def damaged(where: str) -> ModelError:
    """The error of logits that are no numbers."""
    return ModelError(f"the model's logits are not finite {where}: its weights or activations are damaged")
