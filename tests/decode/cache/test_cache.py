"""A cache as a whole: what it reports of its layers, what a transformers model receives, saving and loading."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache, LinearAttentionLayer

from genctl.decode.cache.cache import Cache, new_cache
from genctl.decode.cache.foreign import ForeignLayer
from genctl.decode.runtime import Pass
from genctl.transformers.runtime import TransformersRuntime
from tests.tiny import SEQ2SEQ, tiny

IDS = tuple(range(5, 19))


class Doubling(DynamicLayer):
    """A layer that an architecture might define: it keeps more than keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.sums = key_states.sum((1, 2, 3))
        keys, values = super().update(key_states, value_states)
        return keys, values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        assert self.sums is not None
        self.sums = self.sums[beam_idx]


def read(arch: str, **options: Any) -> Cache:
    """The cache of a tiny model after `IDS`."""
    forward = TransformersRuntime(tiny(arch))
    source = forward.encode(IDS) if forward.is_encoder_decoder else None
    cache = forward.prefill((2,) if source is not None else IDS, source, **options).cache
    assert cache is not None
    return cache


def test_rows_of_an_unknown_layer_are_selected_by_itself_on_a_copy_and_never_merged() -> None:
    layer = ForeignLayer(Doubling())
    layer.layer.update(torch.arange(4.0).view(2, 1, 2, 1), torch.zeros(2, 1, 2, 1))
    cache = Cache([layer])
    chosen = cache.select(torch.tensor([1, 1, 0])).layers[0].for_model
    assert chosen.sums.tolist() == [5, 5, 1]
    assert chosen.keys[:, 0, :, 0].tolist() == [[2, 3], [2, 3], [0, 1]]
    assert layer.layer.sums.tolist() == [1, 5]
    assert not cache.is_mergeable
    assert not cache.is_croppable  # its `crop` is that of another class, which knows nothing of the sums


def test_a_recurrent_state_cannot_be_cut_back_once_it_has_been_written() -> None:
    layer = ForeignLayer(LinearAttentionLayer())
    cache = Cache([*new_cache([None]).layers, layer])
    assert cache.is_recurrent
    assert cache.is_mergeable
    assert cache.is_croppable
    layer.layer.update_recurrent_state(torch.ones(1, 2, 3))
    assert not cache.is_croppable


@pytest.mark.parametrize("arch", ["llama", "gemma2", "jamba"])
def test_a_model_is_given_the_layers_as_they_are_now(arch: str) -> None:
    cache = read(arch)
    assert isinstance(cache.for_model, DynamicCache)
    rows = cache.select(torch.tensor([0, 0]))
    assert rows.for_model.layers == [layer.for_model for layer in rows.layers]
    assert cache.for_model.layers == [layer.for_model for layer in cache.layers]
    assert len({id(layer) for one in (cache, rows) for layer in one.for_model.layers}) == 2 * len(cache.layers)


def test_an_encoder_decoder_is_given_both_parts_and_rows_are_selected_of_its_own() -> None:
    cache = read(SEQ2SEQ[0])
    assert isinstance(cache.for_model, EncoderDecoderCache)
    assert cache.for_model.cross_attention_cache.layers == cache.cross
    assert {part["kind"] for part in cache.describe()} == {"full", "cross-attention"}
    rows = cache.select(torch.tensor([0, 0]))
    assert rows.cross is None
    assert cache.cross is not None
    assert rows.with_cross(cache.cross).for_model.is_updated == dict.fromkeys(range(len(cache.cross)), True)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "jamba", "mamba", SEQ2SEQ[0]])
def test_a_cache_that_is_loaded_goes_on_as_the_one_that_was_saved(arch: str) -> None:
    forward, cache = TransformersRuntime(tiny(arch)), read(arch, whole=True)
    states = {name: tensor.clone() for name, tensor in cache.state_dict().items()}  # as on disk
    loaded = forward.new_cache(whole=True)
    loaded.load_state_dict({name: tensor.clone() for name, tensor in states.items()}, len(IDS))
    again = loaded.state_dict()
    assert again.keys() == states.keys()
    assert all(torch.equal(again[name], states[name]) for name in states)
    assert loaded.length == cache.length
    if forward.is_encoder_decoder:
        return
    feed = torch.tensor([[7]])
    assert torch.equal(forward(Pass(feed, loaded)).logits, forward(Pass(feed, cache)).logits)
