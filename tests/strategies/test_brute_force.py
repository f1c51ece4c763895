"""By enumeration, with four tokens and texts of four: the results of searches whose beam is as wide as the space."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.types import Lane, Strategy
from genctl.strategies.beam import Beam
from genctl.strategies.constrained import ConstrainedBeam
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


Words = tuple[tuple[tuple[int, ...], ...], ...]

# For each promise, the phrases of which one must appear.
WISHES: list[Words] = [
    (((2,),),),
    (((1, 2),),),
    (((0, 0, 1),),),  # begins inside a failed attempt: 0 0 0 1
    (((0, 1),), ((1, 2),)),  # overlapping: 0 1 2
    (((0, 1, 2),), ((1,),)),  # one inside the other
    (((0, 1), (1, 0)), ((2,),)),
    (((0, 0, 1), (2, 2)), ((1, 0),)),
    (((0, 1), (1,)), ((1,), (2, 2))),  # one place satisfies both
    (((1,),), ((1,),)),  # twice
    (((0, 0),), ((0, 0),), ((2,),)),  # twice, and 0 0 0 is enough
    (((0, 1, 0),), ((1, 0, 0),), ((0, 0, 2),)),  # five tokens are enough: 0 1 0 0 2
]


def keeps(text: tuple[int, ...], words: Words) -> bool:
    """Whether each promise has as many places in the text as it occurs in `words`, by looking at each place."""

    def places(phrases: tuple[tuple[int, ...], ...]) -> int:
        ends = range(1, len(text) + 1)
        return sum(any(len(p) <= end and text[end - len(p) : end] == p for p in phrases) for end in ends)

    return all(places(phrases) >= count for phrases, count in Counter(words).items())


@pytest.mark.parametrize("words", WISHES)
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0])
def test_a_wide_constrained_beam_finds_the_best_text_that_keeps_its_promises(
    words: Words, length_penalty: float
) -> None:
    for seed in range(4):
        table = Table(4, 5, EOS, seed)
        best = max((total / len(text) ** length_penalty, text) for text, total in table.texts() if keeps(text, words))
        found = run(table, ConstrainedBeam(1024, words, length_penalty, "never"), 1)[0]
        assert (found.score, found.tokens) == (pytest.approx(best[0], abs=1e-5), best[1])


@pytest.mark.parametrize("words", WISHES)
@pytest.mark.parametrize("beams", [2, 3, 5])
def test_every_result_of_a_narrow_constrained_beam_keeps_its_promises(words: Words, beams: int) -> None:
    """With just enough tokens for the phrases, and with more."""
    texts = {text for length in range(1, 7) for text in itertools.product(range(3), repeat=length)}
    shortest = min(len(text) for text in texts if keeps(text, words))
    for seed, length in itertools.product(range(6), range(shortest, 7)):
        found = run(Table(4, length, EOS, seed), ConstrainedBeam(beams, words, n=beams), beams)
        assert found
        assert all(keeps(hypothesis.tokens, words) for hypothesis in found)


def test_an_interrupted_search_returns_the_rows_with_most_phrases_first() -> None:
    words, mixed = (((0, 1),), ((2, 2),)), 0
    for seed in range(20):
        steps = iter(["", "", "", "interrupted"])
        lane = Lane("0", PROMPT, ConstrainedBeam(4, words, n=4), 8, (EOS,), returned=4)
        stream = decode(Table(4, 8, EOS, seed), [lane], interrupted=lambda steps=steps: next(steps, "interrupted"))
        found = next(event for event in stream if isinstance(event, events.Finished)).hypotheses
        kept = [sum(keeps(each.tokens, (word,)) for word in words) for each in found]
        assert kept == sorted(kept, reverse=True)
        mixed += kept[0] > kept[-1] and found[0].score < found[-1].score
    assert mixed  # the rows with fewer phrases were the more probable ones


def test_phrases_that_share_tokens_are_written_in_the_fewest() -> None:
    """Three random promises over three tokens, with exactly as many tokens as the shortest text that keeps them."""
    rng = random.Random(7)
    texts = {n: list(itertools.product(range(3), repeat=n)) for n in range(1, 8)}
    for seed in range(60):
        words = tuple(
            tuple(tuple(rng.choices(range(3), k=rng.randint(1, 3))) for _ in range(rng.randint(1, 2))) for _ in range(3)
        )
        length = next(n for n in texts if any(keeps(text, words) for text in texts[n]))
        found = run(Table(4, length, EOS, seed), ConstrainedBeam(2, words, n=2), 2)
        assert found
        assert all(keeps(hypothesis.tokens, words) for hypothesis in found), words


def test_a_budget_below_the_shortest_text_is_refused() -> None:
    lane = Lane("0", PROMPT, ConstrainedBeam(2, (((0, 1),), ((1, 2),), ((2, 2),))), 3, (EOS,))
    (failed,) = [event for event in decode(Table(4, 3, EOS, 0), [lane]) if isinstance(event, events.Failed)]
    assert failed.message == "the forced words need 4 tokens or more, but max_new_tokens = 3"
