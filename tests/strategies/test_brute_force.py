"""By enumeration, on four tokens and texts of four: what a search finds when its beam is as wide as the space."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.types import Lane, Strategy
from genctl.strategies.beam import Beam
from genctl.strategies.constrained import ConstrainedBeam
from genctl.strategies.stochastic import StochasticBeam
from tests.decode.table import PROMPT, Table

EOS = 3


def run(table: Any, strategy: Strategy, count: int, seed: int = 0) -> list[events.Hypothesis]:
    lane = Lane("0", PROMPT, strategy, table.length, (EOS,), seed=seed, returned=count)
    finished = [event for event in decode(table, [lane]) if isinstance(event, events.Finished)]
    return list(finished[0].hypotheses)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_beam_as_wide_as_the_space_finds_the_optimum_and_ranks_everything(length_penalty: float, groups: int) -> None:
    for seed in range(5):
        table = Table(4, 4, EOS, seed)
        expected = sorted(((total / len(text) ** length_penalty, text) for text, total in table.texts()), reverse=True)
        wide = Beam(256 * groups, False, groups, 0.0, length_penalty, "never", 20)
        found = run(table, wide, len(expected))
        best = [(hypothesis.score, hypothesis.tokens) for hypothesis in found[::groups]]
        reference = expected if groups == 1 else expected[: len(best)]
        assert [tokens for _, tokens in best] == [tokens for _, tokens in reference]
        assert [score for score, _ in best] == pytest.approx([score for score, _ in reference], abs=1e-5)


# What the documented reading of a promise accepts: a token that breaks a phrase begins nothing itself.
WISHES = [
    (((2,),), r"2"),
    (((1, 2),), r"^(?:[^1]|1[^2])*?12"),
]


@pytest.mark.parametrize(("words", "pattern"), WISHES)
def test_a_wide_constrained_beam_finds_the_best_text_that_keeps_its_promise(words: Any, pattern: str) -> None:
    for seed in range(12):
        table = Table(4, 4, EOS, seed)
        kept = [(total / len(text), text) for text, total in table.texts() if re.search(pattern, spelled(text))]
        found = run(table, ConstrainedBeam(256, (words,), early_stopping="never"), 1)[0]
        assert (found.score, found.tokens) == (pytest.approx(max(kept)[0], abs=1e-5), max(kept)[1])


def test_results_that_keep_their_promise_come_first() -> None:
    """A narrow beam can lose them all, as in transformers 4; it seldom does."""
    found = 0
    for seed in range(12):
        table = Table(4, 4, EOS, seed)
        texts = [spelled(found.tokens) for found in run(table, ConstrainedBeam(4, (((0, 1), (1, 0)), ((2,),)), n=3), 3)]
        kept = [bool(re.search("01|10", text)) and "2" in text for text in texts]
        found += kept[0]
        assert kept == sorted(kept, reverse=True)
    assert found >= 11


def spelled(text: tuple[int, ...]) -> str:
    return "".join(map(str, text))


def test_stochastic_beams_draw_without_replacement_from_the_distribution_over_texts() -> None:
    """A wrong Gumbel conditioning shifts these counts by tens of standard deviations; 5 fool us once in a million."""
    table, draws = Table(4, 2, EOS, 1), 1200
    probability = {text: 2.718281828459045**total for text, total in table.texts()}
    assert sum(probability.values()) == pytest.approx(1)
    first: Counter[tuple[int, ...]] = Counter()
    included: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        pair = [hypothesis.tokens for hypothesis in run(table, StochasticBeam(2, 2), 2, seed)]
        assert len(set(pair)) == 2
        first[pair[0]] += 1
        included.update(pair)
    for text, p in probability.items():
        second = sum(q * p / (1 - q) for other, q in probability.items() if other != text)
        for count, expected in ((first[text], p), (included[text], p + second)):
            assert abs(count - draws * expected) < 5 * (draws * expected * (1 - expected)) ** 0.5 + 1


def test_a_stochastic_beam_as_wide_as_the_space_returns_every_text_once() -> None:
    table = Table(4, 3, EOS, 2)
    texts = {text: total for text, total in table.texts()}
    found = run(table, StochasticBeam(100), 100)
    assert {hypothesis.tokens for hypothesis in found} == set(texts)
    assert all(hypothesis.logprob == pytest.approx(texts[hypothesis.tokens], abs=1e-5) for hypothesis in found)
    assert [hypothesis.score for hypothesis in found] == sorted((h.score for h in found), reverse=True)
