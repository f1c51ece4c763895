"""Every variation through the whole loop: the tokens of `generate()`, alone, batched, with beams, in each cache."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.types import Lane
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.native.variations import FAMILIES, VARIATIONS, model
from tests.tiny import EOS

PROMPTS = [
    tuple(torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist())
    for length in (6, 17, 11)
]
NEW = 12


@cache
def generated(name: str, prompt: tuple[int, ...], **options: Any) -> list[list[int]]:
    ids = torch.tensor([prompt])
    made = model(name).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, **options
    )
    found = []
    for row in made[:, len(prompt) :].tolist():
        found.append(row[: row.index(EOS) + 1] if EOS in row else row)
    return found


def ours(name: str, lanes: list[Lane], width: int) -> dict[str, list[list[int]]]:
    return written(model(name), lanes, width)


def written(of: Any, lanes: list[Lane], width: int) -> dict[str, list[list[int]]]:
    told = list(decode(runtimes.native(of), lanes, width=width))
    failed = [event for event in told if isinstance(event, events.Failed)]
    assert not failed, failed
    return {e.lane: [list(h.tokens) for h in e.hypotheses] for e in told if isinstance(e, events.Finished)}


def lanes(**fields: Any) -> list[Lane]:
    return [Lane(str(n), prompt, Sample(), NEW, eos=(EOS,), **fields) for n, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("name", VARIATIONS)
def test_greedy_alone_and_together(name: str) -> None:
    wanted = {str(n): generated(name, prompt) for n, prompt in enumerate(PROMPTS)}
    assert ours(name, lanes(), 1) == wanted
    assert ours(name, lanes(), 3) == wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_beams_and_forms_of_cache(name: str) -> None:
    beams = [Lane("0", PROMPTS[1], Beam(3), NEW, eos=(EOS,), returned=3)]
    assert ours(name, beams, 1)["0"] == generated(name, PROMPTS[1], num_beams=3, num_return_sequences=3)
    wanted = {str(n): generated(name, prompt) for n, prompt in enumerate(PROMPTS)}
    assert ours(name, lanes(cache="static"), 3) == wanted
    assert ours(name, lanes(cache="offloaded"), 2) == wanted
    assert ours(name, lanes(use_cache=False), 2) == wanted


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_text_that_grows_past_its_context_turns_each_token_by_its_own_length(kind: str) -> None:
    """transformers takes a step's angles from the longest row of the batch; here a row ignores its neighbours."""
    name = f"llama, {kind} rope" if kind == "dynamic" else "llama, longrope"
    alone = ours(name, lanes(), 1)
    assert alone == {str(n): generated(name, prompt) for n, prompt in enumerate(PROMPTS)}
    assert ours(name, lanes(), 2) == alone
