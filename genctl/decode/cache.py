"""What may be done to a cache: grow, select rows, merge lanes, crop, fork, describe.

Keys and values are `[rows, heads, length, head_dim]`. transformers' cache classes stay (every model takes them); the
layers that only grow are replaced by `GrowingLayer`, which appends in place instead of copying everything at each step.
Rows of different lengths share a cache aligned to the right: the shorter ones are padded on the left and masked.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
)

STEP = 64  # a buffer that is full grows by half, and by at least this many columns


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """A full-attention layer whose buffer has room: appending copies only what is new."""

    keys: Tensor
    values: Tensor

    def __init__(self, room: int = 0) -> None:
        super().__init__()
        self.room = room  # columns to keep free beyond the first write, where the final length is known
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            length = 0
        else:
            length = self.keys.shape[-2] if self.keys.dim() == 4 else 0
        new = length + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < new:
            self._grow(key_states, value_states, length, new)
        assert self._buffers is not None
        keys, values = self._buffers
        keys[:, :, length:new] = key_states
        values[:, :, length:new] = value_states
        self.keys, self.values = keys[:, :, :new], values[:, :, :new]
        return self.keys, self.values

    def _grow(self, key_states: Tensor, value_states: Tensor, length: int, new: int) -> None:
        capacity = new + (self.room if length == 0 else max(STEP, length // 2))
        self.room = 0 if length == 0 else self.room
        buffers = []
        for old, like in ((self.keys, key_states), (self.values, value_states)):
            rows, heads, _, dim = like.shape
            buffer = like.new_empty(rows, heads, capacity, dim)
            if length:
                buffer[:, :, :length] = old
            buffers.append(buffer)
        self._buffers = (buffers[0], buffers[1])

    def hold(self, keys: Tensor, values: Tensor, room: int = 0) -> None:
        """Take over `keys` and `values` as the content; they are copied into a buffer with `room` free columns."""
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.keys, self.values = keys, values
        self._buffers, self.room = None, 0
        if room:
            length = keys.shape[-2]
            self._grow(keys, values, length, length + room)
            assert self._buffers is not None
            self.keys, self.values = self._buffers[0][:, :, :length], self._buffers[1][:, :, :length]

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.is_initialized:
            length = self.keys.shape[-2] - abs(tokens_to_remove)
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]


def new_cache(config: Any, *, encoder_decoder: bool = False, room: int = 0) -> Cache:
    """An empty cache for a model of this config; `room` is how many columns will be added after the prefill."""
    self_attention = _dynamic(config, room)
    return EncoderDecoderCache(self_attention, _dynamic(config, 0)) if encoder_decoder else self_attention


def _dynamic(config: Any, room: int) -> Cache:
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    cache.layers = [GrowingLayer(room) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def length_of(cache: Cache) -> int:
    """Columns (tokens) in the self-attention part; 0 where only recurrent states are kept."""
    part = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    for layer in part.layers:
        if isinstance(layer, DynamicLayer):
            return int(layer.get_seq_length())
    return 0


def mergeable(cache: Cache) -> bool:
    """Whether rows of several lanes may live in one cache of this kind."""
    parts = [cache.self_attention_cache] if isinstance(cache, EncoderDecoderCache) else [cache]
    known = (GrowingLayer, DynamicSlidingWindowLayer, DummyLayer, LinearAttentionCacheLayerMixin)
    return all(isinstance(layer, known) or type(layer) is DynamicLayer for part in parts for layer in part.layers)


def self_part(cache: Cache) -> Cache:
    """The part that grows: the whole cache, or an encoder-decoder's self-attention."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def select(cache: Cache, rows: Tensor, *, room: int = 0, drop: int = 0) -> Cache:
    """A new cache holding `rows` (int64 [N], repeats allowed) of this one, without its first `drop` columns.

    The old cache is left as it was, so a prefix can be forked any number of times. Cross-attention is not touched:
    see `forward.Sources`.
    """
    return _with_layers(cache, [_select_layer(layer, rows, room, drop) for layer in cache.layers])


def merge(caches: Sequence[Cache], *, room: int = 0) -> Cache:
    """One cache with the rows of all, aligned to the right; shorter ones are padded with zeros on the left."""
    if len(caches) == 1:
        return caches[0]
    return _with_layers(
        caches[0], [_merge_layers(layers, room) for layers in zip(*(c.layers for c in caches), strict=True)]
    )


def crop(cache: Cache, columns: int) -> None:
    """Forget the newest `columns` tokens of every row, in place.

    Layers that were told to remember more than they need (`rewindable`) are cut back to it, even where nothing is
    forgotten.
    """
    for layer in self_part(cache).layers:
        if columns or getattr(layer, "record_past", False):
            layer.crop(-columns)


def rewindable(cache: Cache) -> Cache:
    """Have windows and convolutions keep what they would drop, until the next `crop`. In place; returns the cache."""
    for layer in self_part(cache).layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    return cache


def croppable(cache: Cache) -> bool:
    """Whether tokens can be taken back: recurrent states cannot forget."""
    return all(
        not (isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.is_recurrent_states_initialized.values()))
        for layer in self_part(cache).layers
    )


def _with_layers(cache: Cache, layers: list[Any]) -> Cache:
    new = copy.copy(cache)
    new.layers = layers
    return new


def _select_layer(layer: Any, rows: Tensor, room: int, drop: int) -> Any:
    if isinstance(layer, DummyLayer):
        return layer
    new = copy.copy(layer)
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        _map_states(new, lambda state: state.index_select(0, rows.to(state.device)))
    if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
        if not isinstance(layer, (DynamicLayer, LinearAttentionCacheLayerMixin)):
            new = copy.deepcopy(layer)
            new.reorder_cache(rows)
        return new
    keys, values = layer.keys, layer.values
    if isinstance(layer, DynamicSlidingWindowLayer):
        new.cumulative_length = layer.cumulative_length - drop
        surplus = max(keys.shape[-2] - new.cumulative_length, 0)
        keys, values = keys[:, :, surplus:], values[:, :, surplus:]
        new.keys, new.values = keys.index_select(0, rows), values.index_select(0, rows)
    elif isinstance(layer, GrowingLayer):
        length = keys.shape[-2] - drop
        held = []
        for old in (keys, values):
            buffer = old.new_empty(len(rows), old.shape[1], length + room, old.shape[3])
            torch.index_select(old[:, :, drop:], 0, rows, out=buffer[:, :, :length])
            held.append(buffer)
        new._buffers = (held[0], held[1])
        new.keys, new.values = held[0][:, :, :length], held[1][:, :, :length]
    elif type(layer) is DynamicLayer or isinstance(layer, LinearAttentionCacheLayerMixin):
        new.keys, new.values = keys[:, :, drop:].index_select(0, rows), values[:, :, drop:].index_select(0, rows)
    else:  # a kind that knows best how to reorder itself
        new = copy.deepcopy(layer)
        new.reorder_cache(rows)
    return new


def _merge_layers(layers: Sequence[Any], room: int) -> Any:
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
    rows = sum(layer.keys.shape[0] for layer in layers)
    length = max(layer.keys.shape[-2] for layer in layers)
    growing = isinstance(first, GrowingLayer)
    held = []
    for name in ("keys", "values"):
        like = getattr(first, name)
        # zeros, not empty: a masked column still meets the values, and 0 x NaN is NaN
        buffer = like.new_zeros(rows, like.shape[1], length + (room if growing else 0), like.shape[3])
        at = 0
        for layer in layers:
            part = getattr(layer, name)
            buffer[at : at + part.shape[0], :, length - part.shape[-2] : length] = part
            at += part.shape[0]
        held.append(buffer)
    if growing:
        new._buffers = (held[0], held[1])
    new.keys, new.values = held[0][:, :, :length], held[1][:, :, :length]
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
