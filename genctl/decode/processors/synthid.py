"""SynthID text watermarking without a state per row (Dathathri et al., Nature 634, 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from genctl import compat


class SynthID:
    """transformers' SynthIDTextWatermarkLogitsProcessor as a function of the history.

    transformers' own stores the last tokens and the hashes of all contexts by row number, which is wrong once rows
    change places. Here both are computed from the new tokens, with its hash and its update of the scores.
    """

    def __init__(self, processor: Any, prompt_len: int) -> None:
        self.processor, self.prompt_len = processor, prompt_len
        if processor.ngram_len < 2:
            raise ValueError(f"ngram_len must be at least 2, but is {processor.ngram_len}")

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        """history int64 [R, T], scores f32 [R, V] -> scores f32 [R, V], log-probabilities where watermarked."""
        inner = self.processor
        if inner.debug_mode:
            scores = torch.ones_like(scores)
        width = inner.ngram_len - 1
        new = history[:, self.prompt_len :]
        count, rows = new.shape[1], new.shape[0]
        if inner.skip_first_ngram_calls and count < width:
            return scores
        # The first context is all zeros, the prompt is not part of it; then each new token enters from the right.
        contexts = torch.cat([new.new_zeros(rows, width), new], 1).unfold(1, width, 1)  # [R, count + 1, width]
        ones = torch.ones(rows * (count + 1), dtype=torch.long, device=history.device)
        hashes = inner.accumulate_hash(ones, contexts.reshape(-1, width)).view(rows, count + 1)
        ids = torch.arange(scores.shape[1], device=history.device).expand(rows, -1)
        keys, now = compat.synthid_keys(inner, contexts[:, -1], ids)
        marked = inner.update_scores(scores, inner.sample_g_values(keys))
        first = width if inner.skip_first_ngram_calls else 0
        earlier = hashes[:, first:count][:, -inner.context_history_size :]
        repeated = (earlier == now[:, None]).any(1, keepdim=True)
        if earlier.shape[1] < inner.context_history_size:
            repeated |= (now == 0)[:, None]  # its list of hashes is filled up with zeros
        return torch.where(repeated, scores, marked)
