"""Encoder-decoders through the whole loop: the tokens of `generate()`, alone, batched, with beams, in each cache."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.types import Lane
from genctl.native.decoder import Stack
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.native import test_generate
from tests.native.seq2seq_variations import FAMILIES, VARIATIONS, model
from tests.tiny import EOS
from tests.versions import CACHE, cache_of

SOURCES = [
    tuple(torch.randint(3, 280, (length,), generator=torch.Generator().manual_seed(length)).tolist())
    for length in (6, 17, 11)
]
NEW = 12


def ours(name: str, lanes: list[Lane], width: int) -> dict[str, list[list[int]]]:
    return test_generate.written(model(name), lanes, width)


def start(name: str) -> tuple[int, ...]:
    return (int(model(name).config.decoder_start_token_id),)


@cache
def generated(name: str, source: tuple[int, ...], **options: Any) -> list[list[int]]:
    ids = torch.tensor([source])
    given = {"do_sample": False, "max_new_tokens": NEW, "attention_mask": torch.ones_like(ids), **options}
    # generate() counts the encoder's layers for the cache of T5's decoder
    given[CACHE] = EncoderDecoderCache(DynamicCache(), DynamicCache())
    found = []
    for row in model(name).generate(ids, **given)[:, 1:].tolist():
        found.append(row[: row.index(EOS) + 1] if EOS in row else row)
    return found


def lanes(name: str, make: Any = Sample, **fields: Any) -> list[Lane]:
    return [
        Lane(str(n), start(name), make(), NEW, eos=(EOS,), source=source, **fields) for n, source in enumerate(SOURCES)
    ]


@pytest.mark.parametrize("name", VARIATIONS)
def test_greedy_alone_and_together(name: str) -> None:
    wanted = {str(n): generated(name, source) for n, source in enumerate(SOURCES)}
    assert ours(name, lanes(name), 1) == wanted
    assert ours(name, lanes(name), 3) == wanted


@pytest.mark.parametrize("penalty", [0.4, 2.0])
@pytest.mark.parametrize("name", FAMILIES)
def test_beams_alone_and_together(name: str, penalty: float) -> None:
    wanted = {
        str(n): generated(name, source, num_beams=4, num_return_sequences=4, length_penalty=penalty)
        for n, source in enumerate(SOURCES)
    }
    made = lanes(name, lambda: Beam(4, length_penalty=penalty), returned=4)
    assert ours(name, made, 1) == wanted
    assert ours(name, lanes(name, lambda: Beam(4, length_penalty=penalty), returned=4), 12) == wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_forms_of_cache(name: str) -> None:
    wanted = {str(n): generated(name, source) for n, source in enumerate(SOURCES)}
    assert ours(name, lanes(name, cache="static"), 3) == wanted
    assert ours(name, lanes(name, cache="offloaded"), 2) == wanted
    assert ours(name, lanes(name, use_cache=False), 2) == wanted
    rounded = ours(name, lanes(name, cache="quantized"), 3)
    assert rounded == ours(name, lanes(name, cache="quantized"), 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_lane_that_joins_later_is_padded(name: str) -> None:
    """Texts of two lengths share a pass, whatever positions the family has."""
    first = [Lane("0", start(name), Sample(), 3, eos=(), source=SOURCES[0])]
    rest = [Lane(str(n), start(name), Sample(), NEW, eos=(), source=SOURCES[n]) for n in (1, 2)]
    runtime = runtimes.native(model(name))
    told = list(decode(runtime, [*first, *rest], width=2))
    found = {e.lane: list(e.hypotheses[0].tokens) for e in told if isinstance(e, events.Finished)}
    for lane in rest:
        assert lane.source is not None
        wanted = model(name).generate(torch.tensor([lane.source]), max_new_tokens=NEW, eos_token_id=-1, do_sample=False)
        assert found[lane.name] == wanted[0, 1:].tolist()
    assert runtime.forwards < 3 + NEW + 3  # they shared passes


@pytest.mark.parametrize("name", FAMILIES)
def test_resuming_and_rereading_give_the_tokens_of_one_reading(name: str) -> None:
    """A prompt that continues a saved one; rows that are read again; hidden states by position."""
    runtime = runtimes.native(model(name))
    source = runtime.encode(SOURCES[1])
    text = (*start(name), 7, 9, 11, 30, 12)
    saved = runtime.prefill(text[:4], source, hidden=True, whole=True)
    whole = runtime.prefill(text, source, hidden=True)
    prefix, reused = runtime.resume(saved, text, source, hidden=True)
    assert reused == 4
    assert prefix is not None
    assert prefix.hidden is not None
    assert torch.allclose(prefix.logits, whole.logits, atol=1e-4)
    assert torch.allclose(prefix.hidden, whole.hidden, atol=1e-4)
    assert runtime.resume(saved, text, runtime.encode(SOURCES[1]), hidden=True) == (None, 0)
    other, reused = runtime.resume(saved, (5, *text[1:]), source, hidden=True)
    assert reused == 0
    assert other is not None
    assert not torch.allclose(other.logits, whole.logits, atol=1e-2)
    rows = torch.tensor([[*text, 41], [*text, 42]])
    again = runtime.reread(rows, prefix)
    for row in range(2):
        alone = runtime.prefill(rows[row].tolist(), source)
        for ours_, wanted in zip(again.layers, alone.cache.layers, strict=True):
            assert torch.allclose(ours_.content()[0][row], wanted.content()[0][0], atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_beams_of_two_sources_hold_each_source_once(name: str) -> None:
    runtime = runtimes.native(model(name))
    runtime.steps = None  # see test_steps: a list of calls reads the same
    shapes = set()
    plain = Stack._source

    def seen(self: Any, shared: Any, w: Any, layer: Any) -> Any:
        keys, values = plain(self, shared, w, layer)
        shapes.add((int(shared.source.shape[0]), 1 if keys.stride(0) == 0 else int(keys.shape[0])))
        return keys, values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stack, "_source", seen)
        list(decode(runtime, lanes(name, lambda: Beam(4), returned=1)[:2], width=8))
        list(decode(runtime, lanes(name, lambda: Beam(4), returned=1)[:1], width=4))
    assert shapes == {(1, 1), (4, 1), (8, 2)}


def test_bfloat16_is_as_near_as_transformers() -> None:
    source = torch.tensor([SOURCES[1]])
    for name in FAMILIES:
        feed = torch.tensor([[*start(name), 7, 9]])
        half = copy.deepcopy(model(name)).bfloat16()
        network = runtimes.native(half).model
        with torch.no_grad():
            exact = model(name)(source, decoder_input_ids=feed).logits
            theirs = half(source, decoder_input_ids=feed).logits.float()
        assert network.encoder is not None
        mine = network.decoder(feed, torch.arange(3)[None], source=network.encoder(source)).float()
        assert network.dtype == torch.bfloat16
        assert (mine - exact).abs().max() < 2 * (theirs - exact).abs().max()


@pytest.mark.parametrize("text", [[2, 7, 9], [2, 0, 9], [0]], ids=str)
def test_padding_inside_of_a_source_has_no_position(text: list[int]) -> None:
    """M2M-100 numbers only the other tokens of a source; in a text written token by token each has its position."""
    theirs, runtime, past = model("m2m_100"), runtimes.native(model("m2m_100")), None
    source, cache = torch.tensor([[5, 0, 9, 17, 0, 4]]), runtime.new_cache()
    assert theirs.config.pad_token_id == 0
    assert runtime.encoder is not None
    states = runtime.encoder(source)
    with torch.no_grad():
        held = theirs.get_encoder()(source)
        assert torch.allclose(states, held.last_hidden_state, atol=1e-4)
        for place, token in enumerate(text):
            feed = torch.tensor([[token]])
            output = theirs(encoder_outputs=held, decoder_input_ids=feed, use_cache=True, **{CACHE: past})
            past, positions = cache_of(output), torch.tensor([[place]])
            found = runtime.decoder(feed, positions, cache.layers, source=states, cross=cache.cross, past=place)
            assert torch.allclose(found, output.logits, atol=1e-4)
