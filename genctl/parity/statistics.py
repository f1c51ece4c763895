"""The figures of each position, from the logits of both sides, and a summary of all positions.

Figures are computed in float64 from the float32 logits: their own rounding (1e-16) is far below that of any
model. M positions, V vocabulary.

The summary has the figures of `llama-perplexity --kl-divergence`, by its formulas, and some of ours. Standard errors
treat positions as independent and propagate to first order (llama.cpp tools/perplexity).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from genctl.parity.values import Estimate, Position, Quantiles, Summary

QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999, 0.001, 0.01, 0.05, 0.1, 0.25, 0.75)
_NOTHING = Quantiles(*(math.nan for _ in range(9)))


def quantiles(values: Sequence[float]) -> Quantiles:
    """The distribution of a figure; quantiles between two values are interpolated."""
    import numpy

    if not values:
        return _NOTHING
    data = numpy.sort(numpy.asarray(values, dtype=numpy.float64))
    places = numpy.asarray(QUANTILES) * (len(data) - 1)
    below, above = data[numpy.floor(places).astype(int)], data[numpy.ceil(places).astype(int)]
    with numpy.errstate(invalid="ignore"):  # equal infinite values need no interpolation
        between = numpy.where(below == above, below, below + (places - numpy.floor(places)) * (above - below))
        mean = mean_of(data)
    median, q90, q95, q99, q999, *others = map(float, between)
    ends = float(data.max()), float(data.min())
    return Quantiles(mean.value, median, q90, q95, q99, q999, *ends, mean.uncertainty, *others)


def mean_of(data: Any) -> Estimate:
    """The mean of an array, and its standard error; NaN for a single value."""
    count = len(data)
    if count < 2:
        return Estimate(float(data.mean()) if count else math.nan, math.nan)
    return Estimate(float(data.mean()), float(data.std() / math.sqrt(count - 1)))


def summary(positions: Sequence[Position]) -> Summary:
    """The summary of all positions. Perplexities leave out tokens without a log-probability."""
    import numpy

    known = [each for each in positions if not math.isnan(each.logprob_other)]
    reference = -numpy.asarray([each.logprob_reference for each in known], dtype=numpy.float64)
    other = -numpy.asarray([each.logprob_other for each in known], dtype=numpy.float64)
    change = numpy.exp(-other) - numpy.exp(-reference)
    nll_reference, nll_other = mean_of(reference), mean_of(other)
    count = len(known)
    covariance = math.nan
    if count > 1:
        covariance = float(((reference - nll_reference.value) * (other - nll_other.value)).mean()) / (count - 1)
    spread = nll_reference.uncertainty * nll_other.uncertainty
    log_ratio = Estimate(
        nll_other.value - nll_reference.value,
        _root(nll_other.uncertainty**2 + nll_reference.uncertainty**2 - 2 * covariance),
    )
    ppl_reference, ppl_other = _exponential(nll_reference), _exponential(nll_other)
    square = mean_of(change**2)
    rms = math.sqrt(square.value) if count else math.nan
    same = sum(each.same for each in positions) / len(positions) if positions else math.nan
    bounds = [each.kl_bounds for each in positions]
    high = [each.kl if bound is None else bound.high for each, bound in zip(positions, bounds, strict=True)]
    return Summary(
        positions=len(positions),
        kl=_of(positions, lambda each: each.kl),
        regret=_of(positions, lambda each: each.regret),
        difference=_of(known, lambda each: each.difference),
        agreement=Estimate(same, _root(same * (1 - same) / (len(positions) - 1)) if len(positions) > 1 else math.nan),
        perplexity_reference=ppl_reference,
        perplexity_other=ppl_other,
        log_ratio=log_ratio,
        ratio=_exponential(log_ratio),
        perplexity_difference=Estimate(
            ppl_other.value - ppl_reference.value,
            _root(
                ppl_other.uncertainty**2
                + ppl_reference.uncertainty**2
                - 2 * ppl_other.value * ppl_reference.value * covariance
            ),
        ),
        correlation=covariance / spread if spread else math.nan,
        probability_change=quantiles(change.tolist()),
        probability_rms=Estimate(rms, 0.5 / rms * square.uncertainty if rms else 0.0),
        kl_high=quantiles(high) if any(bounds) else None,
        perplexity_positions=count if count < len(positions) else None,
    )


def _of(positions: Sequence[Position], figure: Callable[[Position], float]) -> Quantiles:
    return quantiles([figure(each) for each in positions])


def _exponential(log: Estimate) -> Estimate:
    """exp of an estimate; its error to first order."""
    try:
        value = math.exp(log.value)
    except OverflowError:
        value = math.inf
    return Estimate(value, value * log.uncertainty)


def _root(square: float) -> float:
    """A square root, where rounding may have brought the square below 0."""
    return math.sqrt(max(square, 0.0)) if not math.isnan(square) else math.nan


AT_ONCE = 2**20  # logits of one side that are compared at a time: 8 MiB in float64


def figures(places: Sequence[tuple[str, int, int]], reference: Tensor, other: Tensor) -> list[Position]:
    """The figures of M positions. `places`: text, index and token of each; reference and other f32 [M, V]."""
    a, b = reference.double(), other.double()
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    kl = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1).clamp(min=0.0)
    first_a, first_b = first_choice(reference), first_choice(other)
    both = torch.stack([first_a, first_b], 1)
    own, theirs = p.gather(1, both), q.gather(1, both)  # [M, 2]
    ranks = [1 + (p > own[:, 1:]).sum(-1), 1 + (q > theirs[:, :1]).sum(-1)]
    tokens = torch.tensor([token for _, _, token in places])[:, None]
    best = p.topk(min(2, p.shape[-1]), -1).values
    columns = [
        kl,
        first_a == first_b,
        (own[:, 0] - own[:, 1]).clamp(min=0.0),
        first_a,
        first_b,
        *ranks,
        p.gather(1, tokens)[:, 0],
        q.gather(1, tokens)[:, 0],
        shift(b - a),
        best[:, 0] - best[:, -1],
    ]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [Position(*place, *row) for place, row in zip(places, rows, strict=True)]


def first_choice(logits: Tensor) -> Tensor:
    """The most probable token, the first on a tie: f32 [M, V] -> int64 [M]."""
    return torch.from_numpy(logits.numpy().argmax(-1))


def shift(difference: Tensor) -> Tensor:
    """Root mean square of differences of logits [M, V] without their mean, which the softmax cancels -> f64 [M]."""
    few = max(AT_ONCE // difference.shape[-1], 1)
    if len(difference) > few:
        return torch.cat([shift(rows) for rows in torch.split(difference, few)])
    finite = difference.isfinite()  # some models forbid tokens by -inf
    wide = torch.where(finite, difference.double(), 0.0)
    count = finite.sum(-1, keepdim=True).clamp(min=1)
    centred = torch.where(finite, wide - wide.sum(-1, keepdim=True) / count, 0.0)
    return (centred.square().sum(-1) / count[:, 0]).sqrt()


class Pairs:
    """Collects pairs of rows and hands out their figures, `AT_ONCE` logits at a time."""

    def __init__(self, receive: Callable[[Position], object]) -> None:
        self._receive = receive
        self._places: list[tuple[str, int, int]] = []
        self._rows: list[tuple[Tensor, Tensor]] = []

    def add(self, place: tuple[str, int, int], reference: Tensor, other: Tensor) -> None:
        """One position: text, index and token; f32 [V] of both sides, on the host."""
        self._places.append(place)
        self._rows.append((reference, other))
        if len(self._rows) * reference.shape[-1] >= AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Hand out the rest."""
        if self._rows:
            a, b = (torch.stack(rows) for rows in zip(*self._rows, strict=True))
            places, self._places, self._rows = self._places, [], []
            for position in figures(places, a, b):
                self._receive(position)
