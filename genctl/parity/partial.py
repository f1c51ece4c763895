"""Distributions of which only the most probable tokens are known, and the probability of all others together.

KL is bounded then. From below by the log-sum inequality, with all other tokens as one; from above with their
probability on the token that the other side finds least probable. T known tokens, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genctl.parity.statistics import first_choice
from genctl.parity.values import Bounds, KnownTop, Position

TOP = 20  # tokens of a distribution
ENOUGH = 1e-6  # of the probability: where the best tokens leave less, the others are not listed


def known_top(logits: Tensor, token: int) -> KnownTop:
    """What is kept of logits f32 [V]."""
    logits = logits.detach().cpu()
    logprobs = logits.double().log_softmax(-1)
    values, ids = logprobs.topk(min(TOP, logprobs.shape[-1]))
    first = int(first_choice(logits.float()[None])[0])  # of equals the first, as everywhere
    order = sorted(
        range(len(ids)), key=lambda place: (-float(values[place]), int(ids[place]) != first, int(ids[place]))
    )
    chosen, left = [], 1.0
    for place in order:
        chosen.append((int(ids[place]), _f32(float(values[place]))))
        left = max(left - math.exp(float(values[place])), 0.0)
        if left < ENOUGH:
            break
    others = logprobs.clone()
    others[[id for id, _ in chosen]] = -torch.inf
    tail = math.exp(float(others.logsumexp(-1))) if len(chosen) < len(others) else 0.0
    return KnownTop(_f32(float(logprobs[token])), tuple(chosen), _f32(tail))


def _f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def position(place: tuple[str, int, int], known: KnownTop, logits: Tensor) -> Position:
    """The figures of a position: text, index and token. `logits` f32 [V] are those of the other side.

    Regret and rank are the least possible ones where the other's first choice is not among the known tokens.
    """
    logits = logits.detach().cpu()
    q = logits.double().log_softmax(-1)
    ids = torch.tensor([id for id, _ in known.top])
    p = torch.tensor([value for _, value in known.top], dtype=torch.float64)
    mine = dict(known.top)
    first = int(first_choice(logits.float()[None])[0])
    best = float(p[0])
    own = mine.get(first, float(p[-1]))
    rank = [id for id, _ in known.top].index(first) + 1 if first in mine else len(p) + 1
    same_numbers = known_top(logits, place[2]) == known
    low, high = (0.0, 0.0) if same_numbers else _bounds(known, p, ids, q)
    return Position(
        *place,
        kl=low,
        same=first == known.top[0][0],
        regret=max(best - own, 0.0),
        first_reference=known.top[0][0],
        first_other=first,
        rank_in_reference=rank,
        rank_in_other=1 + int((q > q[known.top[0][0]]).sum()),
        logprob_reference=known.logprob,
        logprob_other=known.logprob if same_numbers else float(q[place[2]]),
        shift=0.0 if same_numbers else float(shift_of(q[ids] - p)),
        margin=best - float(p[1]) if len(p) > 1 else 0.0,
        kl_bounds=Bounds(low, high),
    )


def _bounds(known: KnownTop, p: Tensor, ids: Tensor, q: Tensor) -> tuple[float, float]:
    sure = float((p.exp() * (p - q[ids])).sum())
    rest = q.clone()
    rest[ids] = -torch.inf
    if known.tail <= 0 or not bool(rest.isfinite().any()):
        return max(sure, 0.0), max(sure, 0.0)
    tail = math.log(known.tail)
    least = float(q[rest.isfinite()].min())
    low = sure + known.tail * (tail - float(rest.logsumexp(-1)))
    high = sure + known.tail * (min(tail, float(p[-1])) - least)
    return max(low, 0.0), max(high, low, 0.0)


def shift_of(difference: Tensor) -> Tensor:
    """Root mean square of differences over known tokens [..., T] without their mean -> [...]."""
    return (difference - difference.mean(-1, keepdim=True)).square().mean(-1).sqrt()
