"""A prompt cached once for all rows that continue it: the same tokens as with a copy for each row."""

from __future__ import annotations

import pytest
import torch

from genctl import events
from genctl.decode.batch import Batch
from genctl.decode.cache import growing, shared
from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.loop import decode
from genctl.decode.types import Lane
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from genctl.transformers.runtime import TransformersRuntime
from tests import runtimes
from tests.decode.driver import written
from tests.tiny import HEADS, HIDDEN, SEQ2SEQ, tiny

PROMPT = tuple(torch.randint(5, 300, (90,), generator=torch.Generator().manual_seed(4)).tolist())
SHARES = ("gpt2", "gpt_neox", "llama", "qwen3", "gemma3", "opt", "phi", "gptj", "falcon")
COPIES = ("mistral", "bloom", "gemma2")  # a window, or scores that are changed


def lanes() -> list[Lane]:
    return [
        Lane("beams", PROMPT, Beam(4), 12, returned=4),
        Lane("samples", PROMPT, Sample(True, 3), 9, seed=5, returned=3),
        Lane("greedy", PROMPT, Sample(), 14),
        Lane("other", PROMPT[:40], Beam(2), 20, returned=2),
    ]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the cache was a shared one, at each step."""
    found: list[bool] = []
    arrange = Batch.arrange

    def watched(self: Batch) -> None:
        arrange(self)
        if self.states:
            assert self.kv.cache is not None
            found.append(self.kv.cache.is_shared)

    monkeypatch.setattr(Batch, "arrange", watched)
    return found


@pytest.mark.parametrize("arch", [*SHARES, *COPIES])
def test_rows_of_one_prompt_get_the_same_tokens_shared_and_copied(
    arch: str, seen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = runtimes.native(tiny(arch))
    wanted = written(TransformersRuntime(tiny(arch)), lanes(), 1)
    assert not any(seen)
    for width in (1, 2, 3):
        seen.clear()
        assert written(forward, lanes(), width) == wanted
        assert any(seen) == (arch in SHARES)
    monkeypatch.setattr(growing, "LEAST_SHARED", 10**9)
    seen.clear()
    assert written(forward, lanes(), 1) == wanted
    assert not any(seen)


@pytest.mark.parametrize("arch", ["llama", "mixtral", "jamba", "mamba", "gemma2"])
def test_transformers_models_keep_a_copy_for_each_row(arch: str, seen: list[bool]) -> None:
    model = tiny(arch)
    one = written(TransformersRuntime(model), lanes(), 1)
    for width in (2, 3):
        assert written(TransformersRuntime(model), lanes(), width) == one
    assert seen
    assert not any(seen)


def test_short_prompts_are_not_worth_it(seen: list[bool]) -> None:
    list(decode(runtimes.native(tiny("gpt2")), [Lane("a", PROMPT[:63], Beam(3), 5)]))
    assert seen
    assert not any(seen)
    list(decode(runtimes.native(tiny("gpt2")), [Lane("a", PROMPT[:64], Beam(3), 5)]))
    assert any(seen)


def test_the_shared_part_is_one_tensor_and_counted_once() -> None:
    told = list(decode(runtimes.native(tiny("llama")), [Lane("a", PROMPT, Beam(4), 6)], watch=True))
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


def test_reordering_moves_only_what_differs_between_rows() -> None:
    layer = GrowingLayer()
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
def test_a_batch_of_beams_gives_what_each_source_gives_alone(arch: str) -> None:
    lanes = [Lane(str(number), (2,), Beam(3), 6, source=ids, returned=3) for number, ids in enumerate(SOURCES)]
    alone = {lane.name: written(TransformersRuntime(tiny(arch)), [lane])[lane.name] for lane in lanes}
    assert written(TransformersRuntime(tiny(arch)), lanes, 3) == alone
