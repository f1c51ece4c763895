"""Filters whose threshold follows from the whole distribution: p-less and min-k. `filters` says how filters work."""

from __future__ import annotations

import torch
from torch import Tensor

from genctl.decode.processors import Processor
from genctl.decode.processors.build import ProcessorContext
from genctl.decode.processors.filters import OUT, Filter, there


def p_less(m: ProcessorContext, kind: str) -> Processor:
    """Keep tokens at least as probable as two draws are equal: L = sum of p ** 2 (arXiv:2509.23234, section 3).

    `norm` is the relaxed threshold of the same paper, (V * L - 1) / (V - 1) with a vocabulary of V. The best token is
    always at least as probable.
    """
    least = m.min_tokens_to_keep

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        probable = _wide(scores).softmax(-1)
        likelihood = probable.square().sum(-1, keepdim=True)
        if kind == "norm":
            likelihood = (scores.shape[-1] * likelihood - 1.0) / max(scores.shape[-1] - 1.0, 1.0)
        out = (probable < likelihood) & (scores < scores.amax(-1, keepdim=True))
        if least > 1:
            out &= scores < scores.topk(min(least, scores.shape[-1])).values[..., -1:]
        return scores.masked_fill(out, OUT)

    return processor


def min_k(m: ProcessorContext, tau: float) -> Processor:
    """Keep the k best, where the sorted scores l drop most: k = argmax of (l_i - l_(i+1)) / (i * (l_1 - l_n)).

    At least tau / (l_1 - l_n) tokens stay, rounded down, so that a flat distribution keeps some (arXiv:2604.11012,
    algorithm 1). Without that, temperature does not change the result. Removed tokens are not among the n.
    """

    def exact(history: Tensor, scores: Tensor) -> Tensor:
        left = there(scores)
        ordered = _wide(scores).masked_fill(~left, OUT).sort(-1, descending=True).values
        count = left.sum(-1, keepdim=True)
        span = ordered[..., :1] - ordered.gather(-1, (count - 1).clamp(min=0))
        ranks = torch.arange(1, scores.shape[-1], device=scores.device)
        drops = ((ordered[..., :-1] - ordered[..., 1:]) / ranks).masked_fill(ranks >= count, -1.0)
        cliff = drops.argmax(-1, keepdim=True) + 1 if len(ranks) else count
        flat = (tau / span).floor().nan_to_num(posinf=scores.shape[-1]).clamp(max=scores.shape[-1]).long()
        flat = torch.where(span > 0.0, flat, count)
        keep = torch.maximum(cliff, flat).clamp(min=m.min_tokens_to_keep).minimum(count).clamp(min=1)
        return scores.masked_fill(scores < ordered.gather(-1, keep - 1), OUT)

    return Filter(exact)


def _wide(scores: Tensor) -> Tensor:
    """The scores in double precision, which MPS has not."""
    return scores.to(torch.float32 if scores.device.type == "mps" else torch.float64)
