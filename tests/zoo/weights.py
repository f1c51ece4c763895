"""Weights for any architecture: as in `tests.tiny`, peaked logits (standard deviation about 4), and text that wanders.

Linear maps, embeddings and experts are drawn anew; all else (norms, states, convolutions, gates) stays as the
architecture begins its training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.tiny import gain

SPREAD = 4.0
_LIKE_T5 = frozenset({"fsmt", "t5", "mt5", "umt5", "longt5", "switch_transformers"})


def draw(model: Any) -> None:
    """Draw the weights of `model` from torch's generator, then scale the head so that logits spread by `SPREAD`."""
    kind = "t5" if model.config.model_type in _LIKE_T5 else model.config.model_type
    head = model.get_output_embeddings()
    with torch.no_grad():
        for name, module in model.named_modules():
            if module is head:
                continue
            if isinstance(module, nn.Embedding) and module.weight.requires_grad:
                module.weight.normal_(0.0, 1.0)
                if module.padding_idx is not None:
                    module.weight[module.padding_idx] = 0.0
            elif isinstance(module, (nn.Linear, Conv1D)):
                inputs = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
                module.weight.normal_(0.0, gain(f"{name}.weight", kind) / inputs**0.5)
        for name, weight in model.named_parameters():
            if weight.ndim == 3 and "expert" in name:
                weight.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)
        if head is None or not hasattr(head, "weight"):
            return
        tied = head.weight is model.get_input_embeddings().weight
        if not tied:
            head.weight.normal_(0.0, SPREAD / head.weight.shape[-1] ** 0.5)
        spread = float(_logits(model).float().std())
        if not tied and 0.0 < spread < float("inf"):
            head.weight.mul_(SPREAD / spread)


def _logits(model: Any) -> Tensor:
    ids = torch.randint(3, 290, (1, 24), generator=torch.Generator().manual_seed(3))
    fed: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        fed["decoder_input_ids"] = ids
    found: Tensor = model(**fed).logits
    return found
