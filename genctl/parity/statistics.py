"""All positions in a few figures: those of `llama-perplexity --kl-divergence`, by its formulas, and ours beside them.

Its standard errors take positions as independent, and propagate to first order (llama.cpp tools/perplexity).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from genctl.parity.values import Estimate, Position, Quantiles, Summary

QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999, 0.001, 0.01, 0.05, 0.1, 0.25, 0.75)
_NOTHING = Quantiles(*(math.nan for _ in range(9)))


def quantiles(values: Sequence[float]) -> Quantiles:
    """The distribution of a figure; between two values quantiles are interpolated."""
    import numpy

    if not values:
        return _NOTHING
    data = numpy.sort(numpy.asarray(values, dtype=numpy.float64))
    places = numpy.asarray(QUANTILES) * (len(data) - 1)
    below, above = data[numpy.floor(places).astype(int)], data[numpy.ceil(places).astype(int)]
    with numpy.errstate(invalid="ignore"):  # infinite values: between equal ones there is no difference to interpolate
        between = numpy.where(below == above, below, below + (places - numpy.floor(places)) * (above - below))
        mean = mean_of(data)
    median, q90, q95, q99, q999, *others = map(float, between)
    ends = float(data.max()), float(data.min())
    return Quantiles(mean.value, median, q90, q95, q99, q999, *ends, mean.uncertainty, *others)


def mean_of(data: Any) -> Estimate:
    """The mean of an array, and its standard error; NaN for that of one value."""
    count = len(data)
    if count < 2:
        return Estimate(float(data.mean()) if count else math.nan, math.nan)
    return Estimate(float(data.mean()), float(data.std() / math.sqrt(count - 1)))


def summary(positions: Sequence[Position]) -> Summary:
    """The summary of all positions. Perplexities leave out positions whose token a server does not report."""
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
    """A root that rounding may have brought below 0."""
    return math.sqrt(max(square, 0.0)) if not math.isnan(square) else math.nan
