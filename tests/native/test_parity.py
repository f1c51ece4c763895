"""Every family and every variation of its config: the same logits as transformers, step by step, alone and padded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from genctl.decode.cache.foreign import new_cache
from genctl.kernels import build as products
from genctl.models.architectures import read_native
from genctl.native.decoder import Decoder
from genctl.native.load import build
from genctl.native.pages import mapped
from genctl.native.plan import WeightPlan
from genctl.native.runtime import NativeModel, SpecialTokens
from tests.native.variations import VARIATIONS, model
from tests.versions import CACHE

CLOSE = 1e-5  # of the largest number
PROMPTS = [torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(length)) for length in (5, 13, 21)]
STEPS = 6

pytestmark = pytest.mark.parametrize("name", VARIATIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@cache
def native(name: str, folder: Path) -> Decoder:
    return network_of(model(name), folder / name.replace(" ", "_")).decoder


def network_of(theirs: Any, place: Path) -> NativeModel:
    """A variation's model, from a file of its weights."""
    theirs.save_pretrained(place)
    path = place / "model.safetensors"
    with safe_open(path, "pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    plan = WeightPlan(*read_native(json.loads((place / "config.json").read_text())), shapes)
    assert plan.unused == []
    return build(plan, mapped((path,)), {}, SpecialTokens({}))


def layers(name: str) -> list[Any]:
    return new_cache(model(name).config).layers


@cache
def told(name: str, prompt: torch.Tensor) -> list[torch.Tensor]:
    """transformers' logits for a prompt and STEPS greedy steps, each [V]; and the tokens."""
    from transformers import DynamicCache

    theirs = model(name)
    cache, feed, said = DynamicCache(config=theirs.config), prompt[None], []
    with torch.no_grad():
        for _ in range(STEPS + 1):
            logits = theirs(feed, use_cache=True, **{CACHE: cache}).logits[0]
            said.append(logits)
            feed = logits[-1:].argmax(-1, keepdim=True)
    return said


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of two tensors, relative to their largest number."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_prompt_and_steps_have_the_logits_of_transformers(name: str, prompt: torch.Tensor, folder: Path) -> None:
    decoder, held, past, feed = native(name, folder), layers(name), 0, prompt[None]
    for wanted in told(name, prompt):
        positions = torch.arange(past, past + feed.shape[1])[None]
        logits = decoder(feed, positions, held, past=past)
        assert distance(logits[0], wanted) < CLOSE
        past += feed.shape[1]
        feed = logits[:, -1].argmax(-1, keepdim=True)


def test_a_padded_batch_has_the_logits_of_each_row_alone(name: str, folder: Path) -> None:
    check_padded(native(name, folder), name)


def test_so_it_has_without_the_compiled_library(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, or if nothing was compiled: masks and windows are built for torch's functions."""
    monkeypatch.setattr(products, "choice", lambda: ("", "for this test"))
    check_padded(network_of(model(name), folder / "torch").decoder, name)


def check_padded(decoder: Decoder, name: str) -> None:
    """Compare the last logits of each step of a batch, padded on the left."""
    held = layers(name)
    longest = max(map(len, PROMPTS))
    pads = torch.tensor([longest - len(prompt) for prompt in PROMPTS])[:, None]
    feed = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in PROMPTS])
    wanted = [told(name, prompt) for prompt in PROMPTS]
    past = 0
    for step in range(STEPS + 1):
        columns = torch.arange(past, past + feed.shape[1])[None]
        mask = (torch.arange(past + feed.shape[1])[None] >= pads).long()
        logits = decoder(feed, (columns - pads).clamp(min=0), held, mask=mask, past=past, keep=1)
        for row, steps in enumerate(wanted):
            assert distance(logits[row, -1], steps[step][-1]) < CLOSE
        past += feed.shape[1]
        feed = logits[:, -1].argmax(-1, keepdim=True)


def test_hidden_states_are_those_of_transformers(name: str, folder: Path) -> None:
    decoder, theirs, prompt = native(name, folder), model(name), PROMPTS[1][None]
    states: list[torch.Tensor] = []
    decoder(prompt, torch.arange(prompt.shape[1])[None], layers(name), states=states)
    with torch.no_grad():
        wanted = theirs(prompt, output_hidden_states=True).hidden_states
    assert len(states) == len(wanted)
    for ours, other in zip(states, wanted, strict=True):
        assert distance(ours, other) < CLOSE


def test_without_a_cache_a_text_has_the_same_logits(name: str, folder: Path) -> None:
    prompt = PROMPTS[2][None]
    with torch.no_grad():
        wanted = model(name)(prompt, use_cache=False).logits
    logits = native(name, folder)(prompt, torch.arange(prompt.shape[1])[None])
    assert distance(logits, wanted) < CLOSE
