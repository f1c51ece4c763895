"""Every encoder-decoder family and every variation of its config: the numbers of transformers, step by step."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from genctl.decode.cache.cache import Cache, new_cache
from genctl.native.runtime import NativeModel
from tests.native.seq2seq_variations import VARIATIONS, model
from tests.native.test_parity import CLOSE, STEPS, distance, network_of
from tests.versions import CACHE, cache_of

SOURCES = [torch.randint(3, 280, (length,), generator=torch.Generator().manual_seed(length)) for length in (5, 13, 27)]
PROMPTS = [torch.randint(3, 280, (length,), generator=torch.Generator().manual_seed(length)) for length in (1, 4, 19)]

pytestmark = pytest.mark.parametrize("name", VARIATIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@cache
def native(name: str, folder: Path) -> NativeModel:
    return network_of(model(name), folder / name.replace(" ", "_"))


def empty(network: NativeModel) -> tuple[Cache, Cache]:
    layers = [None] * network.spec.layers
    return new_cache(layers), new_cache(layers)


def encoded(network: NativeModel, source: torch.Tensor) -> torch.Tensor:
    """The encoder's states [P, S, E] for sources int64 [P, S]."""
    assert network.encoder is not None
    return network.encoder(source)


@cache
def told(name: str, source: torch.Tensor, prompt: torch.Tensor) -> list[torch.Tensor]:
    """transformers' logits for a prompt and STEPS greedy steps after it, each [F, V]."""
    theirs, feed, said, cache = model(name), prompt[None], [], None
    with torch.no_grad():
        states = theirs.get_encoder()(source[None])
        for _ in range(STEPS + 1):
            output = theirs(encoder_outputs=states, decoder_input_ids=feed, use_cache=True, **{CACHE: cache})
            cache = cache_of(output)
            said.append(output.logits[0])
            feed = output.logits[0, -1:].argmax(-1, keepdim=True)
    return said


@pytest.mark.parametrize("source", SOURCES, ids=len)
def test_a_source_has_the_states_of_transformers(name: str, source: torch.Tensor, folder: Path) -> None:
    with torch.no_grad():
        wanted = model(name).get_encoder()(source[None]).last_hidden_state
    assert distance(encoded(native(name, folder), source[None]), wanted) < CLOSE


@pytest.mark.parametrize("case", range(3))
def test_prompt_and_steps_have_the_logits_of_transformers(name: str, case: int, folder: Path) -> None:
    network, source, feed, past = native(name, folder), SOURCES[case], PROMPTS[case][None], 0
    own, cross = empty(network)
    states = encoded(network, source[None])
    for wanted in told(name, source, PROMPTS[case]):
        positions = torch.arange(past, past + feed.shape[1])[None]
        logits = network.decoder(feed, positions, own.layers, source=states, cross=cross.layers, past=past)
        assert distance(logits[0], wanted) < CLOSE
        past += feed.shape[1]
        feed = logits[:, -1].argmax(-1, keepdim=True)
        states = states * torch.nan  # keys and values of the source are computed once


def test_padded_rows_with_the_products_of_torch(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing were compiled: q, k and v are separate products."""
    monkeypatch.setattr("genctl.native.linear.library", lambda: None)
    native.cache_clear()
    try:
        test_padded_rows_have_the_logits_of_each_row_alone(name, folder)
        layer = native(name, folder).decoder.weights.layers[0]
        assert layer.qkv.form == "plain"
    finally:
        native.cache_clear()


def test_padded_rows_have_the_logits_of_each_row_alone(name: str, folder: Path) -> None:
    """Texts are padded on the left, sources on the right; two rows share each source."""
    network, past = native(name, folder), 0
    longest, farthest = max(map(len, PROMPTS)), max(map(len, SOURCES))
    pads = torch.tensor([longest - len(prompt) for prompt in PROMPTS for _ in range(2)])[:, None]
    feed = torch.stack([torch.nn.functional.pad(p, (longest - len(p), 0)) for p in PROMPTS for _ in range(2)])
    states, cross = torch.zeros(3, farthest, 32), empty(network)[1]
    source_mask = torch.zeros(6, farthest, dtype=torch.long)
    for row, source in enumerate(SOURCES):
        states[row, : len(source)] = encoded(network, source[None])[0]
        source_mask[2 * row : 2 * row + 2, : len(source)] = 1
    wanted = [told(name, source, prompt) for source, prompt in zip(SOURCES, PROMPTS, strict=True)]
    own, _ = empty(network)
    for step in range(STEPS + 1):
        columns = torch.arange(past, past + feed.shape[1])[None]
        mask = (torch.arange(past + feed.shape[1])[None] >= pads).long()
        positions = (columns - pads).clamp(min=0)
        side = {"source": states, "source_mask": source_mask, "cross": cross.layers}
        logits = network.decoder(feed, positions, own.layers, mask=mask, past=past, keep=1, **side)
        assert cross.layers[0].content()[0].shape[0] == 3
        for row in range(6):
            assert distance(logits[row, -1], wanted[row // 2][step][-1]) < CLOSE
        past += feed.shape[1]
        feed = logits[:, -1].argmax(-1, keepdim=True)


def test_hidden_states_are_those_of_transformers(name: str, folder: Path) -> None:
    network, theirs, source, prompt = native(name, folder), model(name), SOURCES[1][None], PROMPTS[1][None]
    states: list[torch.Tensor] = []
    own, cross = empty(network)
    positions = torch.arange(prompt.shape[1])[None]
    held = encoded(network, source)
    network.decoder(prompt, positions, own.layers, source=held, cross=cross.layers, states=states)
    with torch.no_grad():
        wanted = theirs(source, decoder_input_ids=prompt, output_hidden_states=True).decoder_hidden_states
    assert len(states) == len(wanted)
    for ours, other in zip(states, wanted, strict=True):
        assert distance(ours, other) < CLOSE


def test_without_a_cache_a_text_has_the_same_logits(name: str, folder: Path) -> None:
    network, source, prompt = native(name, folder), SOURCES[2][None], PROMPTS[2][None]
    with torch.no_grad():
        wanted = model(name)(source, decoder_input_ids=prompt, use_cache=False).logits
    logits = network.decoder(prompt, torch.arange(prompt.shape[1])[None], source=encoded(network, source))
    assert distance(logits, wanted) < CLOSE
