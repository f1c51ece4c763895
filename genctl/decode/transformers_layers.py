"""transformers' caches, and the layers that genctl does not replace by its own: recurrent states, empty ones.

genctl's layers are registered as transformers' here, so that its caches accept them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from genctl.decode.layers import GrowingLayer, SlidingLayer

DynamicLayer.register(GrowingLayer)
_KINDS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DummyLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def new_cache(config: Any, *, encoder_decoder: bool, room: int, whole: bool) -> Cache:
    """See `cache.new_cache`."""
    self_attention = _dynamic(config, room, whole)
    if not encoder_decoder:
        return self_attention
    # every decoder layer sees the whole source, whatever window it looks back at its own text with
    return EncoderDecoderCache(self_attention, Cache(layers=[GrowingLayer() for _ in self_attention.layers]))


def _dynamic(config: Any, room: int, whole: bool) -> Cache:
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    cache.layers = [_own(layer, room, whole) for layer in cache.layers]
    # T5 and its kin: what the config calls its layers are the encoder's
    count = getattr(config, "num_decoder_layers", None)
    if type(count) is int and count > 0 and {type(layer) for layer in cache.layers} == {GrowingLayer}:
        cache.layers = [GrowingLayer(room) for _ in range(count)]
    return cache


def _own(layer: Any, room: int, whole: bool) -> Any:
    if type(layer) is DynamicLayer or (whole and type(layer) is DynamicSlidingWindowLayer):
        return GrowingLayer(room)
    return SlidingLayer(layer.sliding_window, room) if type(layer) is DynamicSlidingWindowLayer else layer


def is_recurrent(layer: Any) -> bool:
    """Whether a layer keeps a state of constant size."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def has_columns(layer: Any) -> bool:
    """Whether a layer keeps keys and values."""
    return isinstance(layer, DynamicLayer)


def mergeable(layer: Any) -> bool:
    """Whether rows of several lanes may share a layer: only layers with known contents.

    An architecture may define layers of its own, which hold more.
    """
    return type(layer) in _KINDS


def croppable(layer: Any) -> bool:
    """Whether tokens can be removed: not from recurrent states, and from unknown layers only if they define `crop`."""
    if isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.is_recurrent_states_initialized.values()):
        return False
    return type(layer) in _KINDS or "crop" in vars(type(layer))


def hold(layer: Any, keys: Tensor, values: Tensor, length: int) -> None:
    """Fill a layer of transformers with these columns, the newest of `length`."""
    DynamicLayer.lazy_initialization(layer, keys, values)
    layer.keys, layer.values = keys, values
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = length


def select(layer: Any, rows: Tensor, drop: int) -> Any:
    """A new layer with `rows` (int64 [N]) of this one, without its first `drop` columns."""
    if isinstance(layer, DummyLayer):
        return layer
    if type(layer) not in _KINDS:  # it knows best how to reorder what it holds
        new = copy.deepcopy(layer)
        new.reorder_cache(rows)
        return new
    new = copy.copy(layer)
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        _map_states(new, lambda state: state.index_select(0, rows.to(state.device)))
    if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
        return new
    keys, values = layer.keys, layer.values
    if isinstance(layer, DynamicSlidingWindowLayer):
        new.cumulative_length = layer.cumulative_length - drop
        surplus = max(keys.shape[-2] - new.cumulative_length, 0)
        keys, values = keys[:, :, surplus:], values[:, :, surplus:]
        new.keys, new.values = keys.index_select(0, rows), values.index_select(0, rows)
    else:
        new.keys, new.values = keys[:, :, drop:].index_select(0, rows), values[:, :, drop:].index_select(0, rows)
    return new


def merge(layers: Sequence[Any]) -> Any:
    """One layer with the rows of all, aligned to the right; shorter ones are padded with zeros on the left."""
    first = layers[0]
    if isinstance(first, DummyLayer):
        return first
    new = copy.copy(first)
    if isinstance(first, LinearAttentionCacheLayerMixin):
        for name in ("conv_states", "recurrent_states"):
            states = [getattr(layer, name) for layer in layers]
            joined = {i: None if states[0][i] is None else torch.cat([state[i] for state in states]) for i in states[0]}
            setattr(new, name, joined)
    if not isinstance(first, DynamicLayer) or not first.is_initialized:
        return new
    if isinstance(first, DynamicSlidingWindowLayer):
        new.cumulative_length = max(layer.cumulative_length for layer in layers)
    length = max(layer.keys.shape[-2] for layer in layers)

    def aligned(name: str) -> Tensor:
        parts = [getattr(layer, name) for layer in layers]
        # zeros: a masked column still meets the values, and 0 x NaN is NaN
        return torch.cat([functional.pad(part, (0, 0, length - part.shape[-2], 0)) for part in parts])

    new.keys, new.values = aligned("keys"), aligned("values")
    return new


def _map_states(layer: Any, change: Any) -> None:
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name)
        setattr(layer, name, {i: None if state is None else change(state) for i, state in states.items()})
    for name in (
        "is_conv_states_initialized",
        "is_recurrent_states_initialized",
        "has_previous_state",
        "conv_kernel_size",
    ):
        setattr(layer, name, dict(getattr(layer, name)))
