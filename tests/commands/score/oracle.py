"""The model's own loss, and the simplest computation of every token's log-probability."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch


def loss(model: Any, ids: Sequence[int], first: int = 1, source: Sequence[int] | None = None) -> float:
    """`model(input_ids, labels=…).loss` in nats per token, labels before `first` masked with -100.

    With a source: that of an encoder-decoder; the labels are `ids` without the decoder start token.
    """
    labels = torch.tensor([[-100 if place < first else id for place, id in enumerate(ids)]])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from EncoderDecoderModel, about an old change
        if source is not None:
            return float(model(input_ids=torch.tensor([list(source)]), labels=labels[:, 1:]).loss)
        return float(model(input_ids=torch.tensor([list(ids)]), labels=labels).loss)


def plain(model: Any, ids: Sequence[int]) -> list[float]:
    """Log-probability of every token but the first, in nats: one pass, one log_softmax."""
    tensor = torch.tensor([list(ids)])
    with torch.no_grad():
        logprobs = model(input_ids=tensor).logits[0, :-1].double().log_softmax(-1)
    return [float(value) for value in logprobs.gather(1, tensor[0, 1:, None])[:, 0]]
