"""Filters: processors that remove tokens and change no score. They remove the same tokens as those of transformers.

top_k, top_p, min_p and typical_p filter one row at a time, with sums in double precision and without sorting all of it.
If rounding in transformers' float32 could change the result (a sum close to the threshold, equal scores of which a sort
keeps some), the row goes through the `exact` formula, as do all rows of the other filters.

Consecutive filters share the remaining tokens of a row: after `top_k = 50` the others process fifty tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from genctl.decode.processors import Processor, on_host
from genctl.decode.processors.build import ProcessorContext, clearly, own
from genctl.decode.processors.rows import Places, RowCandidates, front, largest
from genctl.kernels.ops import total

# Row -> places of the remaining tokens, ascending; None if rounding makes them uncertain.
Keep: TypeAlias = Callable[[RowCandidates], "Places | None"]

OUT = -float("inf")
ULP = 2.0**-24  # half the distance from 1 to the next float32: the relative error of one rounding
# torch sums in at least this many SIMD lanes
_LANES = 4


@dataclass(frozen=True, eq=False)
class Filter:
    """A processor that removes tokens. On a GPU, where sorting is cheap, and without `keep` only `exact` is used."""

    exact: Processor
    keep: Keep | None = None

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        """history int64 [R, T], scores f32 [R, V] -> scores f32 [R, V]."""
        return cut((self,), history, scores)[0]

    def on(self, row: RowCandidates, history: Tensor) -> RowCandidates | None:
        """The remaining tokens of a row; history int64 [1, T]."""
        places = None if self.keep is None else self.keep(row)
        if places is not None:
            return row.take(places)
        return RowCandidates.of(clearly(self.exact, history, row.dense())[0].numpy())


def cut(filters: Sequence[Filter], history: Tensor, scores: Tensor) -> tuple[Tensor, list[RowCandidates] | None]:
    """Apply all filters in turn. history int64 [R, T], scores f32 [R, V] -> scores f32 [R, V], and the remaining tokens
    of each row.

    None in place of the tokens on another device, for another dtype, or if a row has NaN, +inf or no tokens.
    """
    if not on_host(scores) or scores.dtype != torch.float32:
        return _exactly(filters, history, scores), None
    rows = scores.detach().numpy()
    output = np.full(rows.shape, -np.inf, np.float32)
    left: list[RowCandidates] = []
    for number, values in enumerate(rows):
        here = slice(number, number + 1)
        row = RowCandidates.of(values)
        for step in filters:
            row = None if row is None else step.on(row, history[here])
        if row is None:  # NaN, +inf or no tokens: transformers' processors raise the error
            output[here] = _exactly(filters, history[here], scores[here]).numpy()
        else:
            row.write(output[number])
            left.append(row)
    return torch.from_numpy(output), left if len(left) == len(output) else None


def _exactly(filters: Sequence[Filter], history: Tensor, scores: Tensor) -> Tensor:
    for step in filters:
        scores = clearly(step.exact, history, scores)
    return scores


def keep_top_p(p: float, least: int, *, together: bool = False) -> Keep:
    """Keep the best tokens that sum up to at least p, and at least `least` of them (arXiv:1904.09751).

    transformers adds up from the worst token, and removes while the sum is not above 1 - p. Of equal scores at the
    threshold it removes those that its sort puts first; `together` keeps them all instead.
    """
    limit = float(np.float32(1.0 - p))

    def keep(row: RowCandidates) -> Places | None:
        if limit == 0.0:
            return None
        weights, places, rest = row.weights, None, 0.0
        if not row.small:
            places = front(row.values, weights, (1.0 - 0.99 * limit) * row.total)
            if places is None:
                return _worst_removed(row, limit, least, together)
            weights = weights[places]
            rest = row.total - float(weights.sum(dtype=np.float64))
        chosen = row.values if places is None else row.values[places]
        ascending = np.sort(chosen)
        # bounds the rounding error of a softmax over the sorted row, summed from the smallest weight
        sums = (np.cumsum(np.sort(weights), dtype=np.float64) + rest) / row.total
        added = (float(sums.sum()) + len(row) * rest / row.total) / _LANES
        spread = min(max(row.best - float(ascending[0]), 40.0), 104.0)  # beyond, a float32 exp is 0
        error = limit * ULP * (2.0 * added + 2.0 * spread + 16.0)
        most = max(len(ascending) - least, 0)
        removed, upper = (min(int(np.searchsorted(sums, limit + by, "right")), most) for by in (-error, error))
        if removed != upper:
            return _worst_removed(row, limit, least, together)
        if not together and removed > 0 and ascending[removed - 1] == ascending[removed]:
            return None
        remaining = np.flatnonzero(chosen >= ascending[removed])
        return remaining if places is None else places[remaining]

    return keep


def _worst_removed(row: RowCandidates, limit: float, least: int, together: bool) -> Places | None:
    """`keep_top_p` with transformers' own sums, over a row sorted by numpy."""
    ascending, missing = np.sort(row.dense().numpy()), row.size - len(row)
    sums = torch.from_numpy(ascending).softmax(-1).cumsum(-1)[0].numpy()
    removed = max(missing, min(int(np.searchsorted(sums, np.float32(limit), "right")), row.size - least))
    edge = ascending[0, removed]
    if not together and missing < removed and ascending[0, removed - 1] == edge:
        return None
    return np.flatnonzero(row.values >= edge)


def keep_typical(mass: float, least: int) -> Keep:
    """Keep the tokens whose surprise is nearest to the entropy, up to `mass` (arXiv:2202.00666)."""

    def keep(row: RowCandidates) -> Places | None:
        # |surprise - entropy| = |below - mean of below|: the normaliser cancels
        below = row.values.astype(np.float64) - row.best if row.small else row.values - np.float32(row.best)
        mean = float((row.weights * below).sum()) / row.total
        away = np.abs(below - (mean if row.small else np.float32(mean)))
        enough = min(1.0, mass + 1e-3) * row.total
        places = np.arange(len(row)) if row.small else front(-away, row.weights, enough)
        if places is None:
            return None
        order = places[np.argsort(away[places])]
        near, weights = away[order], row.weights[order]
        sums = np.cumsum(weights, dtype=np.float64) / row.total
        # torch sums the weights in this order, in SIMD lanes; a weight far smaller than the sum of its lane is lost
        lost = (_below(row, ULP / 8.0) + _below(row, ULP) / _LANES) / row.total
        error = mass * (lost + ULP * (16.0 + (len(row) if row.small else math.sqrt(len(row)))))
        last = int(np.searchsorted(sums, mass - error, "left"))
        if last >= len(order):
            return None
        edge = float(near[last])
        surprise = -math.log(float(row.weights.max()) / row.total)
        off = ULP * (8.0 * (abs(mean) + surprise + edge) + 16.0)
        first, after = int(np.searchsorted(near, edge - off, "left")), int(np.searchsorted(near, edge + off, "right"))
        group = row.values[order[first:after]]
        if bool((group != group[0]).any()) or sums[after - 1] < mass + error or after < least:
            return None
        return np.sort(order[:after]) if row.small or after < len(order) else None

    return keep


def _below(row: RowCandidates, share: float) -> float:
    """The sum of the weights that are below a share of their total."""
    return float((row.weights * (row.weights < row.total * share)).sum())


# -- rows of `listed_knobs.PROCESSORS`; `exact` has the numbers of transformers' classes -------------------------------


def top_n_sigma(m: ProcessorContext, n: float) -> Processor:
    """Keep tokens whose score is at least max - n * sigma (arXiv:2411.07641, Algorithm 1).

    sigma is the population's standard deviation over the remaining tokens. Temperature divides both sides, so it does
    not change the result.
    """
    least = m.min_tokens_to_keep

    def exact(history: Tensor, scores: Tensor) -> Tensor:
        left = there(scores)
        count = left.sum(-1, keepdim=True)
        mean = total(scores.masked_fill(~left, 0.0))[..., None] / count
        variance = total((scores - mean).masked_fill(~left, 0.0).square())[..., None] / count
        out = scores < scores.amax(-1, keepdim=True) - n * variance.sqrt()
        if least > 1:  # the best token is never removed: the floor is at most its score
            out.scatter_(1, scores.topk(min(least, scores.shape[1])).indices, False)
        return scores.masked_fill(out, OUT)

    return Filter(exact)


def top_h(m: ProcessorContext, share: float) -> Processor:
    return own("TopHLogitsWarper", top_h=share)


def top_k(m: ProcessorContext, k: int) -> Processor:
    """Keep the k best, and those with the same score as the last of them."""
    k = max(k, m.min_tokens_to_keep)

    def exact(history: Tensor, scores: Tensor) -> Tensor:
        least = scores.topk(min(k, scores.shape[-1]))[0][..., -1, None]
        return scores.masked_fill(scores < least, OUT)

    return Filter(exact, lambda row: largest(row.values, k))


def top_p(m: ProcessorContext, p: float) -> Processor:
    least = m.min_tokens_to_keep

    def exact(history: Tensor, scores: Tensor) -> Tensor:
        ordered, places = scores.sort(descending=False)
        out = ordered.softmax(-1).cumsum(-1) <= (1 - p)
        out[..., -least:] = False
        return scores.masked_fill(out.scatter(1, places, out), OUT)

    return Filter(exact, keep_top_p(p, least, together=m.half))


def min_p(m: ProcessorContext, p: float) -> Processor | None:
    """Keep tokens at least p times as probable as the best one (arXiv:2407.01082)."""
    if not p:
        return None
    least, edge = m.min_tokens_to_keep, math.log(p)

    def exact(history: Tensor, scores: Tensor) -> Tensor:
        probabilities = scores.softmax(-1)
        out = probabilities < p * probabilities.amax(-1, keepdim=True)
        best = probabilities.topk(min(least, probabilities.shape[-1]), -1).indices
        return scores.masked_fill(out.scatter(-1, best, False), OUT)

    def keep(row: RowCandidates) -> Places | None:
        if edge < -60.0:  # probabilities close to the smallest float32
            return None
        error = ULP * (4.0 * abs(edge) + 2.0 * abs(row.best) + 16.0)
        places = np.flatnonzero(row.values >= row.best + edge - error)
        surely = np.count_nonzero(row.values[places] >= min(row.best, row.best + edge + error))
        return places if surely == len(places) >= min(least, len(row)) else None

    return Filter(exact, keep)


def typical_p(m: ProcessorContext, p: float) -> Processor:
    least = m.min_tokens_to_keep
    return Filter(own("TypicalLogitsWarper", mass=p, min_tokens_to_keep=least), keep_typical(p, least))


def epsilon_cutoff(m: ProcessorContext, cutoff: float) -> Processor:
    return Filter(own("EpsilonLogitsWarper", epsilon=cutoff, min_tokens_to_keep=m.min_tokens_to_keep))


def eta_cutoff(m: ProcessorContext, cutoff: float) -> Processor:
    least = m.min_tokens_to_keep
    return Filter(own("EtaLogitsWarper", epsilon=cutoff, device=m.device, min_tokens_to_keep=least))


def p_less(m: ProcessorContext, kind: str) -> Processor:
    """Keep tokens at least as probable as two equal draws, L = sum of p ** 2 (arXiv:2509.23234, section 3).

    `norm` is the relaxed threshold of the same paper, (V * L - 1) / (V - 1) with a vocabulary of V. The best token
    always stays.
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

    At least floor(tau / (l_1 - l_n)) tokens stay, so a flat distribution keeps some (arXiv:2604.11012, algorithm 1).
    Apart from that minimum, temperature does not change the result. n does not count removed tokens.
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
    """The scores in double precision; float32 on MPS, which has no float64."""
    return scores.to(torch.float32 if scores.device.type == "mps" else torch.float64)


def there(scores: Tensor) -> Tensor:
    """bool [R, V]: tokens that are not removed."""
    return scores > torch.finfo(scores.dtype).min
