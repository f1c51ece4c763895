"""Short prompts are read in one pass, with the same prefixes; the longest prompt that waits begins first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.prefix_cache import MOST, groups
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Lane
from genctl.strategies.contrast import Contrastive
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.tiny import ARCHITECTURES, SEQ2SEQ, tiny

RECURRENT = {"mamba", "jamba"}
PROMPTS = [[11, 48, 205, 93, 160], [5, 60, 250, 7], [299, 3, 150, 9, 77]]


def lane(name: str, length: int, new: int = 4) -> Lane:
    start = sum(map(ord, name)) % 200
    return Lane(name, tuple(5 + (start + 7 * place) % 290 for place in range(length)), Sample(), new)


def lengths(found: list[list[Lane]]) -> list[list[int]]:
    return [[len(one.tokens) for one in group] for group in found]


def test_prompts_of_about_one_length_are_put_together_in_the_order_given() -> None:
    assert lengths(groups([lane("a", 40), lane("b", 10), lane("c", 33), lane("d", 9), lane("e", 32)])) == [
        [40, 33, 32],
        [10, 9],
    ]
    assert lengths(groups([lane("a", 4)])) == [[4]]
    assert groups([]) == []


def test_a_pass_is_no_longer_than_what_keeps_the_model_busy() -> None:
    found = lengths(groups([lane(str(number), MOST // 4) for number in range(9)]))
    assert found == [[MOST // 4] * 4, [MOST // 4] * 4, [MOST // 4]]
    assert lengths(groups([lane("a", MOST), lane("b", MOST), lane("c", 3 * MOST)])) == [[MOST], [MOST], [3 * MOST]]


@pytest.mark.parametrize("arch", sorted({*ARCHITECTURES} - {*SEQ2SEQ} - RECURRENT))
def test_a_prompt_read_beside_others_is_the_prefix_that_it_is_alone(arch: str) -> None:
    forward = runtimes.forward(tiny(arch))
    assert forward.abilities.reads_together
    for ids, found in zip(PROMPTS, forward.prefill_together(PROMPTS), strict=True):
        alone = forward.prefill(ids, None)
        assert torch.equal(found.tokens, alone.tokens)
        torch.testing.assert_close(found.logits, alone.logits, rtol=0.0, atol=1e-4)
        assert found.cache.length == alone.cache.length
        for one, other in zip(found.cache.layers, alone.cache.layers, strict=True):
            for mine, theirs in zip(one.content(), other.content(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("arch", [*sorted(RECURRENT), *SEQ2SEQ])
def test_states_that_padding_would_mark_are_made_alone(arch: str) -> None:
    assert not runtimes.forward(tiny(arch)).abilities.reads_together


def run(forward: ModelRuntime, given: list[Lane], **how: Any) -> tuple[dict[str, Any], list[str]]:
    found: dict[str, Any] = {}
    order = []
    for event in decode(forward, given, **how):
        if isinstance(event, events.Prefilled):
            order.append(event.lane)
            assert not event.shared
        if isinstance(event, events.Finished):
            found[event.lane] = (event.hypotheses[0].tokens, event.forwards)
    return found, order


def test_passes_are_saved_and_tokens_are_the_same() -> None:
    given = [lane("abcdefgh"[number], 5 + number % 3) for number in range(8)]
    one, many = runtimes.forward(tiny("llama")), runtimes.forward(tiny("llama"))
    wanted, _ = run(one, given)
    found, _ = run(many, given, width=8)
    assert found == wanted
    assert one.forwards == 8 * 4
    assert many.forwards < 8  # at most three for the prompts, three for the tokens after the first


def written(forward: ModelRuntime, given: list[Lane]) -> dict[str, tuple[int, ...]]:
    """The tokens of each lane, all at work at once."""
    stream = decode(forward, given, width=len(given))
    found = {event.lane: event.hypotheses[0].tokens for event in stream if isinstance(event, events.Finished)}
    return {one.name: found[one.name] for one in given}


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0, 1)])
def test_a_prompt_read_without_hidden_states_is_read_again_for_who_needs_them(order: tuple[int, ...]) -> None:
    """Greedy and contrastive search on one prompt, in any order: what each writes alone."""
    forward = runtimes.forward(tiny("gpt2"))
    lanes = [Lane("greedy", tuple(PROMPTS[0]), Sample(), 6), Lane("hidden", tuple(PROMPTS[0]), Contrastive(4, 0.6), 6)]
    alone = [written(forward, [one])[one.name] for one in lanes]
    assert alone[0] != alone[1]
    together = [replace(lanes[which], name=str(place)) for place, which in enumerate(order)]
    assert list(written(forward, together).values()) == [alone[which] for which in order]


def test_of_those_at_hand_the_longest_begins_first() -> None:
    given = [lane("a", 5, 3), lane("b", 5, 9), lane("c", 8, 9), lane("d", 5, 4), lane("e", 5, 30)]
    forward = runtimes.forward(tiny("llama"))
    wanted, order = run(forward, given)
    assert order == list("abcde")
    found, order = run(forward, given, ahead=4)
    assert order == ["c", "e", "b", "d", "a"]  # e comes into view when c has begun
    assert found == wanted


def test_no_more_is_read_than_was_asked_for() -> None:
    read = []

    def coming() -> Any:
        for number in range(9):
            read.append(number)
            yield lane(str(number), 5, 3)

    stream = decode(runtimes.forward(tiny("llama")), coming(), width=2, ahead=3)
    next(stream)
    assert len(read) == 2 - 1 + 3
    stream.close()
