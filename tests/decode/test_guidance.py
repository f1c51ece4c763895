"""Classifier-free guidance reads a second prompt beside the first, whatever becomes of the rows."""

from __future__ import annotations

import pytest
import torch

from genctl.decode.processors.build import ProcessorContext, build
from genctl.decode.read_along import ReadAlong, unconditional
from genctl.params import Generation
from genctl.strategies.sample import Sample
from tests.decode.driver import PROMPTS, Case


@pytest.fixture(scope="module", params=["llama", "mistral", "gpt2"])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.mark.parametrize("negative", [None, (5, 6, 7, 8)], ids=["last token", "negative prompt"])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_guided_greedy_text_equals_generate(case: Case, negative: tuple[int, ...] | None, use_cache: bool) -> None:
    prompt = PROMPTS[2]
    options = {} if negative is None else {"negative_prompt_ids": torch.tensor([negative])}
    expected = case.generate(prompt, do_sample=False, guidance_scale=1.7, use_cache=use_cache, **options)
    other = unconditional(ReadAlong(case.forward, use_cache=use_cache), negative or prompt[-1:], len(prompt))
    material = ProcessorContext(Generation(guidance_scale=1.7), len(prompt), len(prompt) + 20, 300, unconditional=other)
    assert case.ours([case.lane(prompt, processors=build(material), use_cache=use_cache)])["0"] == expected


def test_rows_are_recognised_by_what_they_hold(case: Case) -> None:
    prompt = torch.tensor([PROMPTS[0]]).expand(3, -1)
    other = unconditional(ReadAlong(case.forward), (9, 10), prompt.shape[1])
    rows = torch.tensor([[11], [12], [13]])
    other(torch.cat([prompt, rows], 1))
    moved = torch.tensor([[13, 14], [11, 15], [13, 16]])  # forked, reordered, one dropped
    found = other(torch.cat([prompt, moved], 1))
    afresh = unconditional(ReadAlong(case.forward, use_cache=False), (9, 10), prompt.shape[1])(
        torch.cat([prompt, moved], 1)
    )
    assert torch.allclose(found, afresh, atol=1e-3)
    unknown = torch.tensor([[20, 21, 22]])
    assert torch.allclose(
        other(torch.cat([prompt[:1], unknown], 1)),
        unconditional(ReadAlong(case.forward, use_cache=False), (9, 10), prompt.shape[1])(
            torch.cat([prompt[:1], unknown], 1)
        ),
        atol=1e-3,
    )


def test_a_guided_sampled_row_does_not_change_with_its_siblings(case: Case) -> None:
    prompt = PROMPTS[1]

    def lane(name: str, count: int):  # type: ignore[no-untyped-def]
        other = unconditional(ReadAlong(case.forward), (5, 6), len(prompt))
        material = ProcessorContext(
            Generation(guidance_scale=1.4), len(prompt), len(prompt) + 20, 300, unconditional=other
        )
        return case.lane(prompt, Sample(True, count), name=name, seed=2, processors=build(material))

    alone = case.ours([lane("a", 2)])["a"]
    assert case.ours([lane("a", 2), case.lane(PROMPTS[0], name="b")], width=2)["a"] == alone
