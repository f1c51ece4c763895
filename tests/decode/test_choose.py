"""Lanes whose tokens are chosen together get what each would get alone, in any batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from genctl import events
from genctl.decode import choose as choosing
from genctl.decode.processors.build import ProcessorContext, build
from genctl.decode.types import Lane
from genctl.errors import ModelError
from genctl.params import Generation
from genctl.strategies.factory import choose
from tests.decode.driver import NEW, PROMPTS, Case

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "top_k": 0},
    "filters": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
    "min_p": {"do_sample": True, "top_k": 0, "min_p": 0.02, "sampler": "inverse-cdf"},
    "several": {"do_sample": True, "top_k": 30, "num_return_sequences": 3},
    "penalty": {"do_sample": True, "repetition_penalty": 1.3},
    "last": {"repetition_penalty": 1.5, "penalty_last_n": 3},
    "grams": {"no_repeat_ngram_size": 4, "num_return_sequences": 2, "do_sample": True, "top_k": 4},
    "words": {"sequence_bias": [([40, 41], 5.0), ([7], -2.0)], "bad_words_ids": [[9], [227, 102], [5, 6, 7]]},
    "prompt": {"do_sample": True, "presence_penalty": 0.5},  # needs the end of the prompt: its lanes choose alone
}
TOGETHER = set(WAYS) - {"prompt"}


@pytest.fixture(scope="module")
def case() -> Case:
    return Case("llama")


def lanes(case: Case, way: str) -> list[Lane]:
    generation = Generation(**WAYS[way])
    made = []
    for number in range(7):
        prompt = PROMPTS[number % len(PROMPTS)][: 3 + number]
        new = NEW - 2 * number  # they do not end together
        material = ProcessorContext(generation, len(prompt), len(prompt) + new, case.forward.vocab_size, eos=case.eos)
        made.append(
            case.lane(
                prompt,
                choose(generation),
                str(number),
                processors=build(material),
                max_new_tokens=new,
                seed=number,
                returned=generation.num_return_sequences,
            )
        )
    return made


def results(case: Case, given: list[Lane], width: int) -> dict[str, Any]:
    found = [event for event in case.stream(given, width) if isinstance(event, events.Finished)]
    return {
        event.lane: [(one.tokens, one.slot, one.reason, one.logprob) for one in event.hypotheses] for event in found
    }


@pytest.mark.parametrize("way", WAYS)
def test_lanes_that_choose_together_write_what_each_writes_alone(
    case: Case, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    plain = choosing._groups

    def counted(states: Any) -> Any:
        for group in plain(states):
            sizes.append(len(group))
            yield group

    monkeypatch.setattr(choosing, "_groups", counted)
    given = lanes(case, way)
    wanted = results(case, given, 1)
    assert max(sizes) == 1
    for width in (2, 7):
        sizes.clear()
        assert results(case, given, width) == wanted
        assert max(sizes) == (width if way in TOGETHER else 1)
    monkeypatch.setattr(choosing, "_groups", lambda states: ([state] for state in states))
    assert results(case, given, 7) == wanted


def test_a_search_of_the_same_strategy_writes_the_same(case: Case) -> None:
    class Searching:
        """A strategy without `tokens`, so that its generator is driven."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            if name == "tokens":
                raise AttributeError(name)
            return getattr(self.inner, name)

    given = lanes(case, "several")
    searched = [replace(lane, strategy=Searching(lane.strategy)) for lane in given]
    assert results(case, searched, 7) == results(case, given, 7)


def test_one_lane_that_fails_takes_no_other_of_its_choice_with_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    given = lanes(case, "filters")
    wanted = results(case, given, 7)
    plain = type(given[0].strategy).tokens

    def failing(self: Any, logits: Any, rows: Any, left: Any) -> Any:
        if any(lane.rng.initial_seed() == 3 for lane in rows):
            raise ModelError("lane 3 is broken")
        return plain(self, logits, rows, left)

    monkeypatch.setattr(type(given[0].strategy), "tokens", failing)
    from genctl.decode.loop import decode

    told = list(decode(case.forward, given, width=7))
    assert [(event.lane, event.message) for event in told if isinstance(event, events.Failed)] == [
        ("3", "lane 3 is broken")
    ]
    done = [event for event in told if isinstance(event, events.Finished)]
    found = {
        event.lane: [(one.tokens, one.slot, one.reason, one.logprob) for one in event.hypotheses] for event in done
    }
    del wanted["3"]
    assert found == wanted


def test_a_traced_choice_that_writes_nothing_yet_is_no_mistake(case: Case) -> None:
    """Contrastive search puts its first candidates on trial before it writes any."""
    generation = Generation(penalty_alpha=0.6, top_k=4, repetition_penalty=1.2)
    material = ProcessorContext(generation, len(PROMPTS[0]), 40, case.forward.vocab_size, eos=case.eos)
    lane = case.lane(PROMPTS[0], choose(generation), processors=build(material), eos=())
    traced = [event for event in case.stream([replace(lane, trace=True)]) if isinstance(event, events.Stepped)]
    assert [event.rows[0].written[0].id for event in traced if event.rows] == [
        event.rows[0].written[0].id for event in case.stream([lane]) if isinstance(event, events.Stepped) and event.rows
    ]
    assert all(token.trace for event in traced for row in event.rows for token in row.written)
