"""Filters whose threshold follows from the whole distribution: p-less and min-k. `filters` says how filters work."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from genctl.decode.processors import Processor
from genctl.decode.processors.build import ProcessorContext
from genctl.decode.processors.filters import OUT, Filter, Keep, there
from genctl.decode.processors.rows import Places, RowCandidates, largest

_HEAD = 256  # of the best tokens, among which the steepest drop of `min_k` nearly always is


def keep_min_k(tau: float, least: int) -> Keep:
    """Keep the tokens that `exact_min_k` keeps."""

    def keep(row: RowCandidates) -> Places | None:
        values = row.values[row.values > np.finfo(np.float32).min].astype(np.float64)
        if not len(values):
            return None
        span, count = float(values.max() - values.min()), len(values)
        flat = math.floor(tau / span) if span > 0.0 else count
        for most in (min(_HEAD, count), count):
            ordered = np.sort(row.values[largest(row.values, most)])[::-1][:most].astype(np.float64)
            drops = (ordered[:-1] - ordered[1:]) / np.arange(1.0, most)
            # behind the head no drop is larger than all that is left, over its rank
            if most == count or (most > 1 and drops.max() > (ordered[-1] - values.min()) / most):
                cliff = int(drops.argmax()) + 1 if most > 1 else 1
                return largest(row.values, min(max(cliff, flat, least), count))
        return None

    return keep


def exact_p_less(min_tokens_to_keep: int = 1, *, norm: bool = False) -> Processor:
    """Keep tokens at least as probable as two draws are equal: L = sum of p ** 2 (arXiv:2509.23234, section 3).

    `norm` is the relaxed threshold of the same paper, (V * L - 1) / (V - 1) with a vocabulary of V. The best token is
    always at least as probable.
    """

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        probable = _wide(scores).softmax(-1)
        likelihood = probable.square().sum(-1, keepdim=True)
        if norm:
            likelihood = (scores.shape[-1] * likelihood - 1.0) / max(scores.shape[-1] - 1.0, 1.0)
        out = (probable < likelihood) & (scores < scores.amax(-1, keepdim=True))
        if min_tokens_to_keep > 1:
            out &= scores < scores.topk(min(min_tokens_to_keep, scores.shape[-1])).values[..., -1:]
        return scores.masked_fill(out, OUT)

    return processor


def exact_min_k(tau: float, min_tokens_to_keep: int = 1) -> Processor:
    """Keep the k best, where the sorted scores l drop most: k = argmax of (l_i - l_(i+1)) / (i * (l_1 - l_n)).

    At least tau / (l_1 - l_n) tokens stay, rounded down, so that a flat distribution keeps some (arXiv:2604.11012,
    algorithm 1). Without that, temperature does not change the result. Removed tokens are not among the n.
    """

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        left = there(scores)
        ordered = _wide(scores).masked_fill(~left, OUT).sort(-1, descending=True).values
        count = left.sum(-1, keepdim=True)
        span = ordered[..., :1] - ordered.gather(-1, (count - 1).clamp(min=0))
        ranks = torch.arange(1, scores.shape[-1], device=scores.device)
        drops = ((ordered[..., :-1] - ordered[..., 1:]) / ranks).masked_fill(ranks >= count, -1.0)
        cliff = drops.argmax(-1, keepdim=True) + 1 if len(ranks) else count
        flat = (tau / span).floor().nan_to_num(posinf=scores.shape[-1]).clamp(max=scores.shape[-1]).long()
        flat = torch.where(span > 0.0, flat, count)
        keep = torch.maximum(cliff, flat).clamp(min=min_tokens_to_keep).minimum(count).clamp(min=1)
        return scores.masked_fill(scores < ordered.gather(-1, keep - 1), OUT)

    return processor


def _wide(scores: Tensor) -> Tensor:
    """The scores in double precision, which MPS has not."""
    return scores.to(torch.float32 if scores.device.type == "mps" else torch.float64)


def min_k(m: ProcessorContext, tau: float) -> Processor:
    least = m.min_tokens_to_keep
    return Filter(keep_min_k(tau, least), exact_min_k(tau, least))


def p_less(m: ProcessorContext, kind: str) -> Processor:
    return exact_p_less(m.min_tokens_to_keep, norm=kind == "norm")
