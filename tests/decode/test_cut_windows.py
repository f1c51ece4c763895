"""Windows whose cache and mask disagree: the texts are those of `generate()`, however they are split into passes.

A window of 1, for which transformers' cache drops nothing, and a window in the config.json of a model that has none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch

from genctl.decode.runtime import ModelRuntime, Pass
from genctl.decode.types import Draft, Lane
from genctl.strategies.assisted import Assisted
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from genctl.transformers.runtime import TransformersRuntime
from tests import runtimes
from tests.decode.driver import written
from tests.native.variations import made
from tests.tiny import EOS

NEW = 10
PROMPTS = tuple(
    tuple(torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist())
    for length in (4, 11, 17)
)
Make = Callable[[Any], ModelRuntime]
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 1}),
    "phi3": ("phi3", {"sliding_window": 1}),
    "gemma2": ("gemma2", {"sliding_window": 1}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 1}),
    "starcoder2": ("starcoder2", {"sliding_window": 1}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 1, "max_window_layers": 1}),
}
STRAY = {f"llama, {size}": ("llama", {"sliding_window": size}) for size in (1, 2, 6)}
CASES = [*((name, TransformersRuntime) for name in (*WINDOWS, *STRAY)), *((name, runtimes.native) for name in WINDOWS)]


def model(name: str) -> Any:
    family, changes = {**WINDOWS, **STRAY}[name]
    return deepcopy(made(family, json.dumps(changes, sort_keys=True)))


@cache
def generated(name: str, prompt: tuple[int, ...], **options: Any) -> list[list[int]]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": NEW, **options}
    rows = model(name).generate(ids, attention_mask=torch.ones_like(ids), **options)[:, len(prompt) :].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


def run(forward: ModelRuntime, strategies: list[Any], width: int = 1, **fields: Any) -> list[list[list[int]]]:
    lanes = [
        Lane(str(place), prompt, strategy, NEW, eos=(EOS,), returned=getattr(strategy, "n", 1), **fields)
        for place, (prompt, strategy) in enumerate(zip(PROMPTS, strategies, strict=True))
    ]
    found = written(forward, lanes, width)
    return [found[lane.name] for lane in lanes]


class Right:
    """Drafts what greedy writes."""

    kind = "guess"

    def __init__(self, text: tuple[int, ...]) -> None:
        self.text = list(text)

    def begin(self, context: Any, do_sample: bool, confidence: float) -> Any:
        return lambda row, count: Draft(self.text[len(row) :][:count])


@pytest.mark.parametrize(("name", "make"), CASES)
def test_texts_are_those_of_generate_alone_together_and_drafted(name: str, make: Make) -> None:
    wanted = [generated(name, prompt) for prompt in PROMPTS]
    greedy: list[Any] = [Sample()] * 3
    assert run(make(model(name)), greedy) == wanted
    assert run(make(model(name)), greedy, width=3) == wanted
    assert run(make(model(name)), greedy, cache="static") == wanted
    drafting = [Assisted(Right((*prompt, *found[0]))) for prompt, found in zip(PROMPTS, wanted, strict=True)]
    assert run(make(model(name)), drafting) == wanted


@pytest.mark.parametrize(("name", "make"), CASES)
def test_beams_and_texts_without_a_cache_too(name: str, make: Make) -> None:
    wanted = [generated(name, prompt, num_beams=3, num_return_sequences=3) for prompt in PROMPTS]
    assert run(make(model(name)), [Beam(3, n=3)] * 3) == wanted
    wanted = [generated(name, prompt, use_cache=False) for prompt in PROMPTS]
    assert run(make(model(name)), [Sample()] * 3, use_cache=False) == wanted


@pytest.mark.parametrize(("name", "make"), CASES)
def test_rows_that_are_read_again_go_on_as_before(name: str, make: Make) -> None:
    """After a shortage of memory: a cache rebuilt from prompt and text gives the same as the one that grew."""
    forward, text = make(model(name)), list(PROMPTS[1])
    prefix = forward.prefill(PROMPTS[1], None)
    grown = forward.prefill(PROMPTS[1], None).cache
    for token in PROMPTS[2][:6]:
        text.append(token)
        last = forward(Pass(torch.tensor([[token]]), grown))
    anew = forward.reread(torch.tensor([text[:-1]]), prefix)
    found = forward(Pass(torch.tensor([text[-1:]]), anew))
    torch.testing.assert_close(found.logits, last.logits, atol=1e-4, rtol=1e-4)
    saved = forward.prefill(PROMPTS[2][:9], None, whole=True)
    assert forward.resume(saved, PROMPTS[2], None) == (None, 0)
