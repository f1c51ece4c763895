"""What may be done to a cache: fork, select rows, merge lanes, crop, keep in another form.

Keys and values are `[rows, heads, length, head_dim]`. transformers' cache classes stay (every model takes them); the
layers that hold keys and values are genctl's own (`layers`). Rows of different lengths share a cache aligned to the
right: the shorter ones are padded on the left and masked.
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
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from genctl.decode.layers import STEP, GrowingLayer, QuantizedLayer, SlidingLayer, StaticLayer

__all__ = ["STEP", "GrowingLayer", "QuantizedLayer", "SlidingLayer", "StaticLayer"]

_KINDS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DummyLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
FORMS = {"static": StaticLayer, "quantized": QuantizedLayer}  # how full-attention layers may be kept instead


def new_cache(config: Any, *, encoder_decoder: bool = False, room: int = 0, whole: bool = False) -> Cache:
    """An empty cache for a model of this config; `room` is how many columns will be added after the prefill.

    `whole` keeps every column of windows too, so that any number of tokens can be taken back (see `narrowed`).
    """
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


def kept_as(cache: Cache, form: str, room: int = 0) -> Cache:
    """The cache with its growing self-attention layers in another form: static, quantized, offloaded; else as it is.

    A static layer is allocated with `room` for so many columns more.
    Sliding windows, recurrent states and cross-attention stay what they are: they do not grow. Offloading needs an
    accelerator, and means nothing without.
    """
    part = self_part(cache)
    if form == "offloaded":
        layer = next((layer for layer in part.layers if isinstance(layer, GrowingLayer)), None)
        if layer is not None and layer.is_initialized and layer.device.type == "cuda":
            part.offloading, part.only_non_sliding, part.prefetch_stream = True, True, torch.Stream()
            for number in range(len(part.layers)):
                part.offload(number, True)
    elif form in FORMS:
        part.layers = [_reformed(layer, FORMS[form], room) for layer in part.layers]
    return cache


def refill(cache: Cache, fresh: Cache) -> None:
    """Put what `fresh` holds, of the same rows, into `cache`, in the form that each of its layers has. In place."""
    for number, (old, new) in enumerate(zip(cache.layers, fresh.layers, strict=True)):
        form = next((form for form in FORMS.values() if type(old) is form), None)
        if form is not None:
            room = max(old.buffers[0].shape[-2] - new.length, 0)
            new = _reformed(new, form, room)
        cache.layers[number] = new


def _reformed(layer: Any, form: type[GrowingLayer], room: int) -> Any:
    if type(layer) is not GrowingLayer:
        return layer
    new = form()
    if layer.is_initialized:
        new.hold(*layer.content(), room=room if form.fixed else 0)
    return new


def narrowed(cache: Cache, config: Any) -> Cache:
    """A cache that was made `whole`, with its windows let go of what no later token can see. In place."""
    for part, made in zip(_parts(cache), _parts(new_cache(config, encoder_decoder=_is_double(cache))), strict=True):
        for number, (layer, wanted) in enumerate(zip(part.layers, made.layers, strict=True)):
            if type(layer) is GrowingLayer and isinstance(wanted, SlidingLayer) and layer.is_initialized:
                wanted.hold(*layer.content())
                part.layers[number] = wanted
    return cache


def _is_double(cache: Cache) -> bool:
    return isinstance(cache, EncoderDecoderCache)


def _parts(cache: Cache) -> list[Cache]:
    return [cache.self_attention_cache, cache.cross_attention_cache] if _is_double(cache) else [cache]


def fixed(cache: Cache) -> bool:
    """Whether a layer is allocated once, so that its room has to be said exactly."""
    return any(getattr(layer, "fixed", False) for layer in self_part(cache).layers)


def length_of(cache: Cache) -> int:
    """Columns (tokens) in the self-attention part; 0 where only recurrent states are kept."""
    for layer in self_part(cache).layers:
        if isinstance(layer, DynamicLayer):
            return int(layer.get_seq_length())
    return 0


def mergeable(cache: Cache) -> bool:
    """Whether rows of several lanes may live in one cache of this kind."""
    return all(map(_known, self_part(cache).layers))


def _known(layer: Any) -> bool:
    """Whether this module knows all that a layer holds: not one that an architecture defines for itself."""
    return isinstance(layer, GrowingLayer) or type(layer) in _KINDS


def self_part(cache: Cache) -> Cache:
    """The part that grows: the whole cache, or an encoder-decoder's self-attention."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def select(cache: Cache, rows: Tensor, *, room: int = 0, drop: int = 0) -> Cache:
    """A new cache holding `rows` (int64 [N], repeats allowed) of this one, without its first `drop` columns.

    The old cache is left as it was, so a prefix can be forked any number of times. Cross-attention is not touched:
    see `sources.Sources`.
    """
    return with_layers(cache, [select_layer(layer, rows, room, drop) for layer in cache.layers])


def continued(cache: Cache, rows: Tensor, room: int) -> Cache:
    """Like `select` of all rows, but static layers that were allocated with this room go on in their own buffers."""
    return with_layers(cache, [_continued(layer, rows, room) for layer in cache.layers])


def _continued(layer: Any, rows: Tensor, room: int) -> Any:
    lent = layer.lend(room) if type(layer) is StaticLayer and layer.is_initialized else None
    return select_layer(layer, rows, room, 0) if lent is None else lent


def reorder(cache: Cache, rows: Tensor, since: int) -> Cache:
    """Row i becomes row `rows[i]` (int64 [N], as many as there are), where rows are equal before column `since`.

    Layers with buffers of their own move what is behind it, in place (a window, which forgets what is before it, moves
    all that it has); the others are selected as a whole.
    """
    layers = []
    for layer in cache.layers:
        if isinstance(layer, GrowingLayer) and layer.is_initialized:
            layer.reorder(rows, 0 if isinstance(layer, SlidingLayer) else since)
            layers.append(layer)
        else:
            layers.append(select_layer(layer, rows, 0, 0))
    return with_layers(cache, layers)


def merge(caches: Sequence[Cache], *, room: int = 0) -> Cache:
    """One cache with the rows of all, aligned to the right; shorter ones are padded with zeros on the left."""
    if len(caches) == 1:
        return caches[0]
    return with_layers(
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
    """Whether tokens can be taken back: recurrent states cannot forget, and other layers only if they say how."""
    return all(map(_forgets, self_part(cache).layers))


def _forgets(layer: Any) -> bool:
    if isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.is_recurrent_states_initialized.values()):
        return False
    return _known(layer) or "crop" in vars(type(layer))


def with_layers(cache: Cache, layers: list[Any]) -> Cache:
    """A cache of the same class with other layers."""
    new = copy.copy(cache)
    new.layers = layers
    return new


def select_layer(layer: Any, rows: Tensor, room: int, drop: int) -> Any:
    """One layer's part of `select`."""
    if isinstance(layer, DummyLayer):
        return layer
    if isinstance(layer, GrowingLayer):
        return layer.select(rows, room=room, drop=drop) if layer.is_initialized else copy.copy(layer)
    if not _known(layer):  # it knows best how to reorder what it holds
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


def _merge_layers(layers: Sequence[Any], room: int) -> Any:
    first = layers[0]
    if isinstance(first, DummyLayer):
        return first
    if isinstance(first, GrowingLayer):
        return first.merge(layers[1:], room) if first.is_initialized else copy.copy(first)
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
    held = []
    for name in ("keys", "values"):
        like = getattr(first, name)
        # zeros, not empty: a masked column still meets the values, and 0 x NaN is NaN
        buffer = like.new_zeros(rows, like.shape[1], length, like.shape[3])
        at = 0
        for layer in layers:
            part = getattr(layer, name)
            buffer[at : at + part.shape[0], :, length - part.shape[-2] : length] = part
            at += part.shape[0]
        held.append(buffer)
    new.keys, new.values = held
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
