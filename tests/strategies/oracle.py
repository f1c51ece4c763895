"""The beams of transformers' `generate`, and those of the decode loop: (new tokens, score), best first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from genctl import events
from genctl.decode.types import Lane
from tests.decode.driver import PROMPTS, Case

NEW = 14
Found = list[tuple[list[int], float]]


@cache
def case_of(arch: str) -> Case:
    return Case(arch)


@cache
def endings(arch: str) -> tuple[int, ...]:
    """EOS ids that beams of this checkpoint do reach: its own, and two tokens from its greedy texts."""
    case = case_of(arch)
    texts = [case.generate(prompt, do_sample=False, max_new_tokens=NEW) for prompt in PROMPTS[:2]]
    return (case.eos[0], texts[0][0][:5][-1], texts[1][0][:9][-1])


def theirs(case: Case, prompts: Sequence[Sequence[int]], count: int, eos: Sequence[int], **options: Any) -> list[Found]:
    """One call of `generate` for all prompts, padded on the left (sources: on the right)."""
    longest = max(map(len, prompts))
    pads = [[0] * (longest - len(prompt)) for prompt in prompts]
    right = case.encoder_decoder
    ids = torch.tensor([[*p, *pad] if right else [*pad, *p] for p, pad in zip(prompts, pads, strict=True)])
    mask = torch.tensor(
        [[1] * len(p) + pad if right else pad + [1] * len(p) for p, pad in zip(prompts, pads, strict=True)]
    )
    options = {"max_new_tokens": NEW, "do_sample": False, "num_return_sequences": count, **options}
    made = case.model.generate(
        ids,
        attention_mask=mask,
        eos_token_id=list(eos),
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    skipped = 1 if right else longest
    found: list[Found] = []
    for place in range(len(prompts)):
        rows = made.sequences[place * count : (place + 1) * count, skipped:].tolist()
        scores = made.sequences_scores[place * count : (place + 1) * count].tolist()
        found.append([(cut(row, eos), score) for row, score in zip(rows, scores, strict=True)])
    return found


def ours(case: Case, lanes: Sequence[Lane], width: int = 1) -> list[Found]:
    """The loop's hypotheses for each lane, in the order of the lanes."""
    found: dict[str, Found] = {}
    for event in case.stream(lanes, width):
        if isinstance(event, events.Finished):
            found[event.lane] = [(list(hypothesis.tokens), hypothesis.score) for hypothesis in event.hypotheses]
    return [found[lane.name] for lane in lanes]


def cut(tokens: list[int], eos: Sequence[int]) -> list[int]:
    """The tokens up to the first EOS, inclusive."""
    for place, token in enumerate(tokens):
        if token in eos:
            return tokens[: place + 1]
    return tokens


def same(mine: Found, reference: Found, tolerance: float = 1e-4) -> bool:
    """Whether tokens and order are equal, and scores within `tolerance` (large scores: within float32 precision)."""
    return [tokens for tokens, _ in mine] == [tokens for tokens, _ in reference] and [
        score for _, score in mine
    ] == pytest.approx([score for _, score in reference], abs=tolerance, rel=2e-6)
