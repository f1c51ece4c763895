"""The figures of `llama-perplexity --kl-divergence`, against a transcription of its formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from genctl.parity.statistics import figures, quantiles, summary
from genctl.parity.values import Position

POSITIONS, VOCABULARY = 150, 40


def logits() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    random = torch.Generator().manual_seed(3)
    base = torch.randn(POSITIONS, VOCABULARY, generator=random) * 3
    other = base + torch.randn(POSITIONS, VOCABULARY, generator=random) * 0.4
    tokens = torch.randint(0, VOCABULARY, (POSITIONS,), generator=random).tolist()
    return base, other, tokens


def positions() -> list[Position]:
    base, other, tokens = logits()
    return figures([("0", index, token) for index, token in enumerate(tokens)], base, other)


def mean_and_uncertainty(total: float, squares: float, count: int) -> tuple[float, float]:
    mean = total / count
    variance = squares / count - mean * mean
    return mean, math.sqrt(variance / (count - 1)) if variance > 0 else 0.0


def percentile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = int(place)
    part = place - below
    return (1 - part) * ordered[below] + part * ordered[min(below + 1, len(ordered) - 1)]


def llama_perplexity() -> dict[str, tuple[float, float]]:
    """One position after the other, with running sums, as tools/perplexity/perplexity.cpp does."""
    base, other, tokens = logits()
    names = ("nll", "nll2", "base", "base2", "both", "kl", "kl2", "p", "p2", "p4", "same")
    sums = dict.fromkeys(names, 0.0)
    for mine, theirs, token in zip(base.tolist(), other.tolist(), tokens, strict=True):
        normal = [max(row) + math.log(sum(math.exp(value - max(row)) for value in row)) for row in (mine, theirs)]
        nll_base, nll = normal[0] - mine[token], normal[1] - theirs[token]
        kl = sum(
            math.exp(one - normal[0]) * (one - normal[0] - another + normal[1])
            for one, another in zip(mine, theirs, strict=True)
        )
        change = math.exp(-nll) - math.exp(-nll_base)
        for name, value in {
            "nll": nll,
            "nll2": nll**2,
            "base": nll_base,
            "base2": nll_base**2,
            "both": nll * nll_base,
            "kl": kl,
            "kl2": kl**2,
            "p": change,
            "p2": change**2,
            "p4": change**4,
            "same": float(mine.index(max(mine)) == theirs.index(max(theirs))),
        }.items():
            sums[name] += value
    count = len(tokens)
    log, log_base = (mean_and_uncertainty(sums[name], sums[f"{name}2"], count) for name in ("nll", "base"))
    covariance = (sums["both"] / count - sums["nll"] / count * sums["base"] / count) / (count - 1)
    ratio = log[0] - log_base[0], math.sqrt(log[1] ** 2 + log_base[1] ** 2 - 2 * covariance)
    ppl, ppl_base = (math.exp(each[0]) for each in (log, log_base))
    errors = ppl * log[1], ppl_base * log_base[1]
    square = mean_and_uncertainty(sums["p2"], sums["p4"], count)
    same = sums["same"] / count
    return {
        "perplexity_other": (ppl, errors[0]),
        "perplexity_reference": (ppl_base, errors[1]),
        "log_ratio": ratio,
        "ratio": (math.exp(ratio[0]), math.exp(ratio[0]) * ratio[1]),
        "perplexity_difference": (
            ppl - ppl_base,
            math.sqrt(errors[0] ** 2 + errors[1] ** 2 - 2 * ppl * ppl_base * covariance),
        ),
        "probability_rms": (math.sqrt(square[0]), 0.5 / math.sqrt(square[0]) * square[1]),
        "agreement": (same, math.sqrt(same * (1 - same) / (count - 1))),
        "kl": mean_and_uncertainty(sums["kl"], sums["kl2"], count),
        "probability_change": mean_and_uncertainty(sums["p"], sums["p2"], count),
        "correlation": (covariance / (log[1] * log_base[1]), math.nan),
    }


@pytest.mark.parametrize(
    "figure",
    [
        "perplexity_other",
        "perplexity_reference",
        "log_ratio",
        "ratio",
        "perplexity_difference",
        "probability_rms",
        "agreement",
    ],
)
def test_an_estimate_is_that_of_llama_perplexity(figure: str) -> None:
    ours, (value, uncertainty) = getattr(summary(positions()), figure), llama_perplexity()[figure]
    assert ours.value == pytest.approx(value, rel=1e-6)
    assert ours.uncertainty == pytest.approx(uncertainty, rel=1e-5)


@pytest.mark.parametrize("figure", ["kl", "probability_change"])
def test_a_mean_is_that_of_llama_perplexity(figure: str) -> None:
    ours, (value, uncertainty) = getattr(summary(positions()), figure), llama_perplexity()[figure]
    assert ours.mean == pytest.approx(value, rel=1e-6)
    assert ours.uncertainty == pytest.approx(uncertainty, rel=1e-5)


def test_correlation_and_quantiles_are_those_of_llama_perplexity() -> None:
    found = summary(positions())
    assert found.correlation == pytest.approx(llama_perplexity()["correlation"][0], rel=1e-6)
    values = [position.kl for position in positions()]
    expected = [percentile(values, fraction) for fraction in (0.5, 0.9, 0.95, 0.99, 0.999, 1.0, 0.0)]
    ours = found.kl
    assert [ours.median, ours.q90, ours.q95, ours.q99, ours.q999, ours.max, ours.min] == pytest.approx(expected)


def test_the_low_quantiles_of_changes_are_those_of_llama_perplexity() -> None:
    """Changes of probabilities may be negative, and only the upper half of their quantiles used to be there."""
    changes = [math.exp(each.logprob_other) - math.exp(each.logprob_reference) for each in positions()]
    ours = summary(positions()).probability_change
    expected = [percentile(changes, fraction) for fraction in (0.001, 0.01, 0.05, 0.1, 0.25, 0.75)]
    assert [ours.q001, ours.q01, ours.q05, ours.q10, ours.q25, ours.q75] == pytest.approx(expected)


def test_quantiles_of_infinite_figures_are_infinite() -> None:
    """Bounds of KL on a server have no upper end: all quantiles used to be NaN."""
    every = quantiles([math.inf] * 4)
    assert {every.mean, every.median, every.q90, every.q999, every.max, every.min} == {math.inf}
    some = quantiles([3.0, 1.0, 2.0, math.inf, math.inf])
    assert (some.min, some.median, some.q90, some.max) == (1.0, 3.0, math.inf, math.inf)


def test_one_position_has_no_interval_and_none_has_no_figures() -> None:
    one = summary(positions()[:1])
    assert one.positions == 1
    assert math.isnan(one.log_ratio.uncertainty)
    assert math.isnan(summary([]).kl.mean)
    assert math.isnan(quantiles([]).max)


def test_forbidden_tokens_have_no_share_in_figures() -> None:
    """Some models forbid tokens by -inf; both sides do."""
    base, other, tokens = logits()
    base[:, 7] = other[:, 7] = -torch.inf
    found = figures([("0", index, 1) for index in range(len(tokens))], base, other)
    assert all(math.isfinite(position.kl) and math.isfinite(position.shift) for position in found)
