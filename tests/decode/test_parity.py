"""Token for token what `model.generate` writes, on every architecture that we promise."""

from __future__ import annotations

import pytest
import torch

from genctl.strategies.sample import Sample
from tests.decode.driver import PROMPTS, Case
from tests.tiny import ARCHITECTURES


@pytest.fixture(params=ARCHITECTURES, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_greedy_equals_generate_alone_and_in_a_batch(case: Case, use_cache: bool) -> None:
    expected = {str(i): case.generate(prompt, do_sample=False) for i, prompt in enumerate(PROMPTS)}
    lanes = [case.lane(prompt, name=str(i), use_cache=use_cache) for i, prompt in enumerate(PROMPTS)]
    for lane in lanes:
        assert case.ours([lane])[lane.name] == expected[lane.name]
    assert case.ours(lanes, width=3) == expected


def test_a_place_that_becomes_free_is_taken_without_changing_anybody(case: Case) -> None:
    limits = (4, 20, 9, 13, 6)
    lanes = [case.lane(PROMPTS[i % 3], name=str(i), max_new_tokens=limit) for i, limit in enumerate(limits)]
    alone = {lane.name: case.ours([lane])[lane.name] for lane in lanes}
    assert case.ours(lanes, width=2) == alone


@pytest.mark.parametrize("count", [1, 3])
def test_seeded_sampling_equals_generate_after_manual_seed(case: Case, count: int) -> None:
    for prompt in PROMPTS:
        torch.manual_seed(11)
        expected = case.generate(prompt, do_sample=True, top_k=0, temperature=1.0, num_return_sequences=count)
        assert case.ours([case.lane(prompt, Sample(True, count), seed=11)])["0"] == expected


def test_a_sampled_row_does_not_change_with_its_neighbours(case: Case) -> None:
    lanes = [case.lane(prompt, Sample(True, 2), name=str(i), seed=i) for i, prompt in enumerate(PROMPTS)]
    alone = {lane.name: case.ours([lane])[lane.name] for lane in lanes}
    assert case.ours(lanes, width=3) == alone
    assert case.ours(lanes[::-1], width=2) == alone


def test_several_eos_ids_end_a_row_and_nothing_follows(case: Case) -> None:
    free = case.generate(PROMPTS[1], do_sample=False)[0]
    eos = (case.eos[0], free[min(6, len(free) - 2)])
    made = case.ours([case.lane(PROMPTS[1], eos=eos)])["0"][0]
    assert made == case.generate(PROMPTS[1], do_sample=False, eos_token_id=list(eos))[0][: len(made)]
    assert made[-1] in eos
    assert not set(made[:-1]) & set(eos)


def test_several_rows_of_one_prompt_without_a_cache(case: Case) -> None:
    torch.manual_seed(4)
    expected = case.generate(PROMPTS[2], do_sample=True, top_k=0, num_return_sequences=3, use_cache=False)
    assert case.ours([case.lane(PROMPTS[2], Sample(True, 3), seed=4, use_cache=False)])["0"] == expected
