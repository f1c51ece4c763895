"""Sample one token for each row from the softmax of its scores.

`multinomial` samples exactly what `torch.multinomial` samples: the largest p / q with q ~ Exp(1) for every token of the
vocabulary. On a CPU this noise is the largest cost of a step, and nearly all of it is for tokens that cannot win.
So the random bits are taken from the generator as torch takes them, and noise is computed only for tokens that may win.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genctl.decode import transfer
from genctl.decode.types import RowsOfLane

if TYPE_CHECKING:
    from genctl.decode.processors.rows import RowCandidates

Sampler: TypeAlias = Literal["multinomial", "inverse-cdf", "counter"]
Candidates: TypeAlias = "Sequence[RowCandidates] | None"

_FEW = 4096  # up to this many tokens, noise is computed for all
_MANTISSA = (1 << 53) - 1
_UNIT = 2.0**-53


def multinomial(
    logits: Tensor, indices: Sequence[int], count: int, rng: torch.Generator, left: Candidates = None
) -> Tensor:
    """logits f32 [R, V] -> int64 [R]: what `torch.multinomial(p, 1)` samples for rows `indices` of `count` rows p.

    Noise is drawn for all `count` rows, so that a row's tokens do not depend on which other rows are still live. `left`
    are the same rows without their -inf entries, if known.
    """
    if logits.dtype != torch.float32 or not bits_are_known():
        return (logits.softmax(-1) / _exponential(logits, RowsOfLane(rng, indices, count, 0))).argmax(-1)
    bits = torch.empty(count, logits.shape[1], dtype=torch.long).random_(generator=rng).numpy()
    scores = logits.detach().numpy()
    rows: Sequence[RowCandidates | None] = [None] * len(scores) if left is None else left
    drawn = [_race(row, bits[index], few) for row, index, few in zip(scores, indices, rows, strict=True)]
    return torch.tensor(drawn, dtype=torch.long)


def inverse_cdf(
    logits: Tensor, indices: Sequence[int], count: int, rng: torch.Generator, left: Candidates = None
) -> Tensor:
    """logits f32 [R, V] -> int64 [R]: the token at which the cumulative probability exceeds one uniform number.

    A number is drawn for each of `count` rows; the rows of `logits` are `indices` of these. `left`: see `multinomial`.
    """
    uniform = torch.rand(count, dtype=torch.float64, generator=rng).tolist()
    drawn = []
    for number, (row, index) in enumerate(zip(logits.detach().numpy(), indices, strict=True)):
        known = None if left is None else left[number].ids
        places = np.flatnonzero(row > -np.inf) if known is None else known
        if not len(places):  # nothing can be drawn: the loop refuses such a row
            drawn.append(0)
            continue
        scores = row[places]
        below = scores - scores.max()
        if len(places) > _FEW:
            sums = torch.from_numpy(below).exp_().cumsum(0, dtype=torch.float64).numpy()
        else:
            sums = np.cumsum(np.exp(below, dtype=np.float64))
        edge = min(uniform[index] * sums[-1], np.nextafter(sums[-1], 0.0))
        drawn.append(int(places[np.searchsorted(sums, edge, "right")]))
    return torch.tensor(drawn, dtype=torch.long)


def draw_on_device(sampler: Sampler, logits: Tensor, lanes: Sequence[RowsOfLane]) -> Tensor:
    """`multinomial` or `inverse_cdf` on another device: logits f32 [R, V] of all lanes -> int64 [R].

    Each lane draws its own numbers; everything else is computed for all lanes at once.
    """
    if sampler == "multinomial":
        noise = [_exponential(logits, lane) for lane in lanes]
        return (logits.softmax(-1) / (noise[0] if len(noise) == 1 else torch.cat(noise))).argmax(-1)
    numbers = [
        _own(torch.rand(lane.sequences, dtype=torch.float64, device=logits.device, generator=lane.rng), lane)
        for lane in lanes
    ]
    return inverse_cdf_on_device(logits, torch.cat(numbers))


def _exponential(logits: Tensor, lane: RowsOfLane) -> Tensor:
    """q ~ Exp(1) for every token of a lane's rows, f32 [rows, V]."""
    noise = torch.empty(lane.sequences, logits.shape[1], device=logits.device)
    return _own(noise.exponential_(1, generator=lane.rng), lane)


def _own(drawn: Tensor, lane: RowsOfLane) -> Tensor:
    """Select the live rows from what was drawn for all sequences of a lane."""
    return drawn[transfer.to_device(lane.indices, drawn.device)] if len(lane.indices) < lane.sequences else drawn


def inverse_cdf_on_device(logits: Tensor, uniform: Tensor) -> Tensor:
    """`inverse_cdf` with uniform numbers f64 [R], on their device."""
    sums = logits.double().softmax(-1).cumsum(-1)
    totals = sums[:, -1:]
    share = torch.minimum(uniform[:, None] * totals, torch.nextafter(totals, torch.zeros_like(totals)))
    # with NaN the search returns V, and an index out of range is an error that a device cannot recover from
    return torch.searchsorted(sums, share, right=True)[:, 0].clamp(max=sums.shape[1] - 1)


def draw_distinct(totals: Tensor, count: int, width: int, rng: torch.Generator) -> Tensor:
    """`count` different indices into totals f32 [W] (W <= width), sampled from its softmax; int64 [count], in that
    order.

    The largest p / q with q ~ Exp(1), as in torch.multinomial without replacement. Noise is drawn for `width` places,
    including rows that are no longer live, so that the samples equal transformers'. If few places are possible, noise
    is computed for these alone.
    """
    places = np.empty(0, np.intp)
    if transfer.on_host(totals) and totals.dtype == torch.float32 and bits_are_known():
        places = np.flatnonzero(totals.detach().numpy() > -np.inf)
    if count <= len(places) <= _FEW:
        before = rng.get_state()
        bits = torch.empty(width, dtype=torch.long).random_(generator=rng).numpy()[places]
        with np.errstate(divide="ignore"):
            values = totals.softmax(0).numpy()[places] / _noise(bits)
        order = np.argsort(-values, kind="stable")
        first = values[order[: count + 1]]
        if first[count - 1] > 0.0 and (first[1:] < first[:-1]).all():
            return torch.from_numpy(places[order[:count]])
        rng.set_state(before)  # torch decides between equal values and between impossible places
    noise = torch.empty(width, device=totals.device).exponential_(1, generator=rng)[: len(totals)]
    return (totals.softmax(0) / noise).topk(min(count, len(totals))).indices


def _race(scores: NDArray[np.float32], bits: NDArray[np.int64], left: RowCandidates | None) -> int:
    """The token with the largest p / q. scores f32 [V], bits int64 [V]; `left` of the scores, if known."""
    if left is not None and left.ids is not None and len(left) <= _FEW:
        best, places = left.best, left.ids
    else:
        best = float(scores.max())
        if not -np.inf < best < np.inf:  # nothing can be drawn: the loop refuses such a row
            return 0
        there = scores > -np.inf
        places = np.flatnonzero(there) if np.count_nonzero(there) <= _FEW else _hopeful(scores, best, bits)
    noise = _noise(bits[places])
    with np.errstate(divide="ignore"):
        values = np.exp(scores[places].astype(np.float64) - best) / noise
        winner = int(values.argmax())
        # torch uses float32 probabilities: use them if the race is close
        if np.count_nonzero(values >= values[winner] * (1.0 - 1e-4)) > 1:
            values = torch.from_numpy(scores).softmax(-1).numpy()[places] / noise
            winner = int(values.argmax())
    return int(places[winner])


def _hopeful(scores: NDArray[np.float32], best: float, bits: NDArray[np.int64]) -> NDArray[np.intp]:
    """Places, ascending, of the tokens that may win: q is at least the uniform number u that it is computed from."""
    weights: NDArray[np.float32] = torch.from_numpy(scores - np.float32(best)).exp_().numpy()
    uniform = (bits & _MANTISSA) * _UNIT
    probable = np.flatnonzero(scores >= best - 2.0)
    with np.errstate(divide="ignore"):
        beaten = float((weights[probable] / _noise(bits[probable])).max())
    if not beaten < np.inf:
        return probable[np.equal(_noise(bits[probable]), 0.0)]
    return np.flatnonzero(np.greater_equal(weights, uniform * (beaten * (1.0 - 1e-3))))


def _noise(bits: NDArray[np.int64]) -> NDArray[np.float32]:
    """Exp(1), f32, from 64 random bits each, bit for bit as `exponential_` computes it."""
    noise: NDArray[Any] = -np.log1p((bits & _MANTISSA) * -_UNIT)
    return noise.astype(np.float32)


@lru_cache(maxsize=1)
def bits_are_known() -> bool:
    """Whether this torch computes exponential noise from random bits as `_noise` does."""
    first, second = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    noise = torch.empty(64).exponential_(1, generator=first)
    bits = torch.empty(64, dtype=torch.long).random_(generator=second)
    same = torch.equal(noise, torch.from_numpy(_noise(bits.numpy())))
    return same and torch.equal(first.get_state(), second.get_state())
