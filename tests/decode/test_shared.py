"""A prompt kept once for all rows that continue it: the same tokens as with a copy for each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from genctl import events
from genctl.decode import cache as caches
from genctl.decode import patched, shared
from genctl.decode.batch import Batch
from genctl.decode.forward import Forward
from genctl.decode.layers import GrowingLayer
from genctl.decode.loop import decode
from genctl.decode.runtime import ModelRuntime
from genctl.decode.sources import join_sources
from genctl.decode.types import Lane
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.tiny import HEADS, HIDDEN, SEQ2SEQ, tiny

PROMPT = tuple(torch.randint(5, 300, (90,), generator=torch.Generator().manual_seed(4)).tolist())
SHARES = ("gpt2", "gpt_neox", "llama", "qwen3", "gemma3", "opt", "phi", "mixtral", "jamba")
COMPUTES_ITSELF = ("gptj", "gemma2", "bloom", "falcon")


def lanes() -> list[Lane]:
    return [
        Lane("beams", PROMPT, Beam(4), 12, returned=4),
        Lane("samples", PROMPT, Sample(True, 3), 9, seed=5, returned=3),
        Lane("greedy", PROMPT, Sample(), 14),
        Lane("other", PROMPT[:40], Beam(2), 20, returned=2),
    ]


def results(forward: ModelRuntime, width: int) -> dict[str, list[Any]]:
    told = decode(forward, lanes(), width=width)
    return {e.lane: [h.tokens for h in e.hypotheses] for e in told if isinstance(e, events.Finished)}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the cache was a shared one, at each step."""
    found: list[bool] = []
    arrange = Batch._arrange_cache

    def watched(self: Batch) -> None:
        arrange(self)
        assert self.cache is not None
        found.append(shared.is_shared(self.cache))

    monkeypatch.setattr(Batch, "_arrange_cache", watched)
    return found


@pytest.mark.parametrize("arch", [*SHARES, *COMPUTES_ITSELF, "mistral", "mamba"])
def test_rows_of_one_prompt_get_the_same_tokens_shared_and_copied(
    arch: str, seen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(arch)
    one = results(Forward(model), 1)
    assert any(seen) == (arch in SHARES)
    seen.clear()
    for width in (2, 3):
        assert results(Forward(model), width) == one
    assert any(seen) == (arch in SHARES)
    monkeypatch.setattr(shared, "LEAST", 10**9)
    seen.clear()
    assert results(Forward(model), 1) == one
    assert not any(seen)


@pytest.mark.parametrize("arch", [*SHARES[:-2], "gptj", "falcon", "mistral", "bloom", "gemma2"])
def test_a_native_model_shares_wherever_nothing_is_added_to_its_scores(arch: str, seen: list[bool]) -> None:
    forward = runtimes.native(tiny(arch))
    wanted = results(Forward(tiny(arch)), 1)
    seen.clear()
    for width in (1, 2, 3):
        assert results(forward, width) == wanted
    assert any(seen) == (arch not in ("mistral", "bloom", "gemma2"))


def test_short_prompts_are_not_worth_it(seen: list[bool]) -> None:
    list(decode(Forward(tiny("gpt2")), [Lane("a", PROMPT[:63], Beam(3), 5)]))
    assert seen
    assert not any(seen)
    list(decode(Forward(tiny("gpt2")), [Lane("a", PROMPT[:64], Beam(3), 5)]))
    assert any(seen)


def test_the_shared_part_is_one_tensor_and_counted_once() -> None:
    told = list(decode(Forward(tiny("llama")), [Lane("a", PROMPT, Beam(4), 6)], watch=True))
    layer = [e for e in told if isinstance(e, events.CacheRead)][-1].layers[0]
    columns = 2 * 2 * HIDDEN // HEADS * 4  # keys and values of two heads in float32
    assert layer["shape"] == [4, 2, 95, 8]
    assert layer["shared"] == 90
    assert layer["bytes"] == (90 + 4 * 5) * columns


def test_attention_in_two_parts_is_attention() -> None:
    torch.manual_seed(0)
    for heads, groups in ((4, 1), (2, 3), (1, 8)):
        layer = GrowingLayer()
        layer.hold(torch.randn(1, heads, 70, 16), torch.randn(1, heads, 70, 16))
        both = shared.SharedLayer(layer, 5, 8)
        for _ in range(3):
            both.update(torch.randn(5, heads, 1, 16), torch.randn(5, heads, 1, 16))
        query = torch.randn(5, heads * groups, 1, 16)
        keys, values = (part.repeat_interleave(groups, 1) for part in both.content())
        wanted = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=0.3).transpose(1, 2)
        assert torch.allclose(shared.attend(query, both.prompt, both._columns(), 0.3), wanted, atol=1e-5)


def test_what_transformers_calls_attention_is_put_back() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    forward = Forward(tiny("gpt2"))
    cache = shared.share(forward.prefill(PROMPT, None).cache, 2, 4)
    with patched.attending(cache):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    assert not ALL_ATTENTION_FUNCTIONS._local_mapping


def test_reordering_moves_only_what_differs_between_rows() -> None:
    layer = caches.GrowingLayer()
    layer.hold(torch.arange(24.0).view(3, 1, 8, 1), torch.zeros(3, 1, 8, 1), room=4)
    where = layer.buffers[0].data_ptr()
    layer.reorder(torch.tensor([2, 2, 0]), 5)
    assert layer.buffers[0].data_ptr() == where
    assert layer.keys[:, 0, :, 0].tolist() == [
        [0, 1, 2, 3, 4, 21, 22, 23],
        [8, 9, 10, 11, 12, 21, 22, 23],
        [16, 17, 18, 19, 20, 5, 6, 7],
    ]


SOURCES = [(11, 48, 205, 93), (5, 60, 250, 7, 31, 77, 8), (299, 3, 150)]


@pytest.mark.parametrize("arch", SEQ2SEQ)
@pytest.mark.parametrize("counts", [[3, 3, 3], [2, 2], [2, 3]])
def test_rows_of_several_sources_attend_to_one_row_of_each(arch: str, counts: list[int]) -> None:
    forward = Forward(tiny(arch))
    prefixes = [forward.prefill((2,), forward.encode(ids)) for ids in SOURCES[: len(counts)]]
    assert forward.groups(prefixes[0])
    rows = [place for place, count in enumerate(counts) for _ in range(count)]
    parts = [caches.select(caches.self_part(prefixes[place].cache), torch.tensor([0])) for place in rows]
    feed = torch.arange(5, 5 + len(rows))[:, None]
    found = []
    for group in (False, True):
        sources = join_sources(
            [prefix.source for prefix in prefixes if prefix.source is not None],
            [prefix.cache.cross_attention_cache for prefix in prefixes],
            counts,
            group=group,
        )
        assert sources.grouped == (group and len(set(counts)) == 1)
        assert sources.cross is not None
        held = {len(layer.keys) for layer in sources.cross.layers}
        assert held == {len(counts) if sources.grouped else len(rows)}
        cache = caches.merge(parts, room=2)
        output = forward(feed, cache, positions=torch.ones(1, 1, dtype=torch.long), sources=sources)
        found.append(output.logits)
    torch.testing.assert_close(found[0], found[1], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("arch", SEQ2SEQ)
def test_a_batch_of_beams_keeps_one_row_for_each_source(arch: str) -> None:
    lanes = [Lane(str(number), (2,), Beam(3), 6, source=ids, returned=3) for number, ids in enumerate(SOURCES)]
    alone = {lane.name: run(Forward(tiny(arch)), [lane])[lane.name] for lane in lanes}
    assert run(Forward(tiny(arch)), lanes, width=3) == alone


def run(forward: Forward, lanes: list[Lane], **how: Any) -> dict[str, Any]:
    return {
        event.lane: [one.tokens for one in event.hypotheses]
        for event in decode(forward, lanes, **how)
        if isinstance(event, events.Finished)
    }
