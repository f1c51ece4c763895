"""Rerank finished samples: best of n by log-probability, and minimum Bayes risk.

Both use only the texts and sums of the hypotheses.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from genctl import events
from genctl.params import Generation

ORDER, BETA = 6, 2.0  # of chrF: the longest n-grams, and the weight of recall against precision


@dataclass(frozen=True)
class RerankPlan:
    """How a lane's samples are reranked, and how many of them are returned."""

    kind: Literal["best_of", "mbr"]
    samples: int
    returned: int
    length_penalty: float = 1.0  # best_of: the score is logprob / tokens ** length_penalty


def plan(generation: Generation) -> RerankPlan | None:
    """The plan for the knobs; None if samples are returned as they are."""
    g = generation
    if g.best_of is not None:
        return RerankPlan("best_of", g.best_of, g.num_return_sequences, g.length_penalty)
    if g.mbr_samples is not None:
        return RerankPlan("mbr", g.mbr_samples, g.num_return_sequences)
    return None


def rerank(
    hypotheses: Sequence[events.Hypothesis], texts: Sequence[str], plan: RerankPlan
) -> tuple[events.Hypothesis, ...]:
    """The hypotheses, best first, each with its score; `plan.returned` of them.

    best_of: log-probability / tokens ** length_penalty, by default the mean per token, because the sum prefers short
    texts. mbr: the expected utility, chrF in [0, 1] against all samples, itself included, as often as each was sampled
    (Eikema and Aziz 2020, arXiv:2005.10283, section 6); ties are ordered by log-probability. Equal hypotheses stay in
    the order in which they were sampled.
    """
    if plan.kind == "best_of":
        scores = [
            hypothesis.logprob / max(len(hypothesis.tokens), 1) ** plan.length_penalty for hypothesis in hypotheses
        ]
    else:
        scores = expected_chrf(texts)
    ranked = sorted(zip(scores, hypotheses, strict=True), key=lambda pair: (-pair[0], -pair[1].logprob))
    return tuple(dataclasses.replace(hypothesis, score=score) for score, hypothesis in ranked[: plan.returned])


def expected_chrf(texts: Sequence[str]) -> list[float]:
    """For each text its mean chrF with all texts as references. Equal texts are compared once."""
    counts = Counter(texts)
    distinct = list(counts)
    grams = [_ngrams(text) for text in distinct]
    totals = [float(counts[text]) for text in distinct]  # chrF with itself is 1, for each draw
    for i in range(len(distinct)):
        for j in range(i + 1, len(distinct)):
            matches = _matches(grams[i], grams[j])
            totals[i] += counts[distinct[j]] * _f_score(matches, grams[i], grams[j])
            totals[j] += counts[distinct[i]] * _f_score(matches, grams[j], grams[i])
    means = {text: total / len(texts) for text, total in zip(distinct, totals, strict=True)}
    return [means[text] for text in texts]


def chrf(text: str, reference: str) -> float:
    """Character n-gram F-score in [0, 1] (Popović 2015, W15-3049): n = 1 to 6, beta = 2, white space not counted.

    Precision and recall are averaged over the n for which both texts are long enough, as in sacrebleu; two texts
    without characters are equal.
    """
    of_text, of_reference = _ngrams(text), _ngrams(reference)
    return _f_score(_matches(of_text, of_reference), of_text, of_reference)


def _ngrams(text: str) -> list[Counter[str]]:
    """For n = 1 to 6 the n-grams of a text without white space."""
    characters = "".join(text.split())
    return [
        Counter(characters[start : start + n] for start in range(len(characters) - n + 1)) for n in range(1, ORDER + 1)
    ]


def _matches(left: list[Counter[str]], right: list[Counter[str]]) -> list[int]:
    return [
        sum(min(count, large[gram]) for gram, count in small.items() if gram in large)
        for small, large in (sorted(pair, key=len) for pair in zip(left, right, strict=True))
    ]


def _f_score(matches: list[int], of_text: list[Counter[str]], of_reference: list[Counter[str]]) -> float:
    length, reference = of_text[0].total(), of_reference[0].total()  # characters: n - 1 fewer n-grams
    if not length and not reference:
        return 1.0
    orders = min(ORDER, length, reference)
    if not orders:
        return 0.0
    precision = sum(matches[n] / (length - n) for n in range(orders)) / orders
    recall = sum(matches[n] / (reference - n) for n in range(orders)) / orders
    if precision + recall == 0.0:
        return 0.0
    return (1 + BETA**2) * precision * recall / (BETA**2 * precision + recall)
