"""Searches that transformers 5 has no more, against what transformers 4 wrote: see `scripts/make_goldens.py`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.strategies.checkpoints import START, made
from tests.strategies.oracle import same
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from genctl import events
from genctl.decode.forward import Forward
from genctl.decode.loop import decode
from genctl.decode.types import Lane, Strategy
from genctl.params import Generation
from genctl.strategies.choose import choose

GOLDENS = Path(__file__).parent.parent / "goldens"


def cases(name: str) -> list[Any]:
    data = json.loads((GOLDENS / f"{name}.json").read_text())
    return [(case, data["max_new_tokens"]) for case in data["cases"]]


@cache
def forward(arch: str) -> Forward:
    return Forward(made(arch))


def processors(case: dict[str, Any], new: int) -> tuple[LogitsProcessor, ...]:
    options, found = case["options"], []
    if "repetition_penalty" in options:
        found.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if "no_repeat_ngram_size" in options:
        found.append(NoRepeatNGramLogitsProcessor(options["no_repeat_ngram_size"]))
    if "min_new_tokens" in options:
        length = 1 if case["arch"] in START else len(case["prompt"])
        found.append(MinNewTokensLengthLogitsProcessor(length, options["min_new_tokens"], case["eos"]))
    return tuple(found)


def lane(case: dict[str, Any], new: int, name: str = "0", **fields: Any) -> Lane:
    knobs = Generation(num_return_sequences=len(case["sequences"]), **case["options"])
    strategy: Strategy = choose(knobs)
    prompt = tuple(case["prompt"])
    tokens, source = ((START[case["arch"]],), prompt) if case["arch"] in START else (prompt, None)
    return Lane(
        name,
        tokens,
        strategy,
        new,
        tuple(case["eos"]),
        source,
        processors(case, new),
        returned=knobs.num_return_sequences,
        **fields,
    )


def written(arch: str, lanes: list[Lane], width: int = 1) -> dict[str, list[tuple[list[int], float]]]:
    found = {}
    for event in decode(forward(arch), lanes, width=width):
        assert not isinstance(event, events.Failed), event
        if isinstance(event, events.Finished):
            found[event.lane] = [(list(h.tokens), h.score) for h in event.hypotheses]
    return found


def check(case: dict[str, Any], mine: list[tuple[list[int], float]]) -> None:
    if "scores" in case:
        assert same(mine, list(zip(case["sequences"], case["scores"], strict=True)))
    assert [tokens for tokens, _ in mine] == case["sequences"]


@pytest.mark.parametrize("name", ["contrastive", "diverse", "constrained"])
@pytest.mark.parametrize("arch", ["gpt2", "llama", "bart"])
def test_sequences_and_scores_are_those_of_transformers_4(name: str, arch: str) -> None:
    for case, new in cases(name):
        if case["arch"] == arch:
            check(case, written(arch, [lane(case, new)])["0"])
