"""`penalty_last_n`: penalties look at the last tokens alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

import genctl
from genctl.decode.processors.build import ProcessorContext, build
from genctl.params import Generation
from tests.cli.tool import genctl as tool
from tests.tiny import tokenizer

HISTORY = torch.tensor([[3, 4, 5, 6, 7, 5, 6, 8], [9, 9, 3, 3, 9, 5, 3, 9]])
PROMPT = 3  # tokens of the prompt


def processed(window: int | None, **knobs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.randn(2, 300, generator=torch.Generator().manual_seed(3))
    context = ProcessorContext(Generation(penalty_last_n=window, **knobs), PROMPT, 40, 300, tokenizer=tokenizer())
    (processor,) = build(context)
    return scores, processor(HISTORY, scores.clone())


@pytest.mark.parametrize("window", [1, 2, 4, 8, 100])
def test_repetition_penalty_is_that_of_the_last_tokens(window: int) -> None:
    scores, after = processed(window, repetition_penalty=1.3)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(HISTORY[:, -window:], scores.clone())
    assert torch.equal(after, expected)


@pytest.mark.parametrize("window", [1, 3, 5, 100, None])
def test_presence_and_frequency_count_new_tokens_in_the_window(window: int | None) -> None:
    new = HISTORY[:, max(PROMPT, HISTORY.shape[1] - (window or 100)) :]
    counts = torch.stack([torch.bincount(row, minlength=300) for row in new])
    scores, after = processed(window, frequency_penalty=0.5)
    assert torch.allclose(after, scores - 0.5 * counts)
    scores, after = processed(window, presence_penalty=0.5)
    assert torch.allclose(after, scores - 0.5 * (counts > 0))


def test_dry_sees_no_repetition_outside_the_window() -> None:
    repeated = torch.tensor([[40, 41, 42, 43, 50, 51, 40, 41, 42]])
    for window, hit in ((None, True), (9, True), (5, False)):
        context = ProcessorContext(
            Generation(dry_multiplier=1.0, penalty_last_n=window), 2, 40, 300, tokenizer=tokenizer()
        )
        (processor,) = build(context)
        assert bool(processor(repeated, torch.zeros(1, 300))[0, 43] < 0) is hit


def test_a_preset_that_lists_its_processors_sets_it_there() -> None:
    context = ProcessorContext(
        Generation(),
        PROMPT,
        40,
        300,
        explicit=({"use": "repetition_penalty", "repetition_penalty": 1.3, "penalty_last_n": 2},),
    )
    (processor,) = build(context)
    scores = torch.randn(2, 300, generator=torch.Generator().manual_seed(3))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(HISTORY[:, -2:], scores.clone())
    assert torch.equal(processor(HISTORY, scores.clone()), expected)


def test_without_a_penalty_it_is_a_mistake() -> None:
    done = tool("run", "Once", "--set", "penalty_last_n=64", "-n", "2")
    assert done.status == 2
    assert "penalty_last_n = 64 (--set penalty_last_n) has no effect without repetition_penalty" in done.err
    assert tool("run", "Once", "--set", "penalty_last_n=64", "--repetition-penalty", "1.2", "-n", "2").status == 0
    assert "penalty_last_n" in tool("run", "Once", "--set", "repeat_last_n=64", "-n", "2").err


def test_a_text_differs_by_its_window() -> None:
    model = genctl.load("builtin:stories")
    texts = {
        model.generate(["Once upon a time"], max_new_tokens=40, repetition_penalty=1.8, penalty_last_n=window)[0].text
        for window in (None, 2)
    }
    assert len(texts) == 2
