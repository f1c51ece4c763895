"""Operations on a cache: fork, select rows, merge lanes, crop, convert to another form.

Keys and values are `[rows, heads, length, head_dim]`, in genctl's own layers (`layers`). A native model's cache is a
list of them (`LayerCache`); transformers' models need transformers' cache classes, and may have other layers
(`transformers_layers`, imported when one occurs). Rows of different lengths share a cache aligned to the right: the
shorter ones are padded on the left and masked.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from genctl.decode.layers import STEP, GrowingLayer, QuantizedLayer, SlidingLayer, SlottedLayer, StaticLayer
from genctl.errors import UsageError

__all__ = ["STEP", "GrowingLayer", "QuantizedLayer", "SlidingLayer", "StaticLayer"]

Cache: TypeAlias = Any  # a LayerCache, or one of transformers' caches: what has `layers`, or two such parts

FORMS = {"static": StaticLayer, "quantized": QuantizedLayer}  # how full-attention layers may be kept instead


class LayerCache:
    """The cache of a native decoder: one layer of keys and values for each layer of the model."""

    def __init__(self, windows: Sequence[int | None], room: int = 0) -> None:
        self.layers: list[Any] = [GrowingLayer(room) if size is None else SlidingLayer(size, room) for size in windows]

    def get_seq_length(self) -> int:
        """Columns stored, those that windows dropped included."""
        return int(self.layers[0].get_seq_length()) if self.layers else 0


class SourcedCache:
    """The cache of a native encoder-decoder: self-attention, and cross-attention, which never grows."""

    def __init__(self, self_attention_cache: LayerCache, cross_attention_cache: LayerCache) -> None:
        self.self_attention_cache = self_attention_cache
        self.cross_attention_cache = cross_attention_cache

    def get_seq_length(self) -> int:
        """Columns stored of its own text."""
        return self.self_attention_cache.get_seq_length()


def new_cache(config: Any, *, encoder_decoder: bool = False, room: int = 0, whole: bool = False) -> Cache:
    """An empty cache for a transformers model of this config; `room` is how many columns follow the prefill.

    `whole` keeps every column of windows too, so that any number of tokens can be removed (see `narrowed`).
    """
    from genctl.decode import transformers_layers

    return transformers_layers.new_cache(config, encoder_decoder=encoder_decoder, room=room, whole=whole)


def kept_as(cache: Cache, form: str, room: int = 0) -> Cache:
    """The cache with its growing self-attention layers in another form: static, quantized, offloaded; else unchanged.

    A static layer is allocated with `room` for so many columns more. Sliding windows, recurrent states and
    cross-attention do not grow and stay as they are. Offloading needs an accelerator, and has no effect without one.
    Raises UsageError for offloading a native model's cache on a GPU.
    """
    part = self_part(cache)
    if form == "offloaded":
        layer = next((layer for layer in part.layers if isinstance(layer, GrowingLayer)), None)
        if layer is not None and layer.is_initialized and layer.device.type == "cuda":
            if isinstance(part, LayerCache):
                hint = "leave out --runtime native, or choose another --cache"
                raise UsageError("cache_implementation = offloaded runs on transformers' classes", hint=hint)
            part.offloading, part.only_non_sliding, part.prefetch_stream = True, True, torch.Stream()
            for number in range(len(part.layers)):
                part.offload(number, True)
    elif form in FORMS:
        part.layers = [_reformed(layer, FORMS[form], room) for layer in part.layers]
    return cache


def refill(cache: Cache, fresh: Cache) -> None:
    """Put the rows of `fresh` into `cache`, in the form of each of its layers. In place."""
    for number, (old, new) in enumerate(zip(cache.layers, fresh.layers, strict=True)):
        form = next((form for form in FORMS.values() if type(old) is form), None)
        if form is not None:
            room = max(old.buffers[0].shape[-2] - new.length, 0)
            new = _reformed(new, form, room)
        cache.layers[number] = new


def slotted(cache: Cache) -> Cache:
    """Prepare the growing layers for steps of one shape, in place."""
    cache.layers = [_reformed(layer, SlottedLayer, 0) for layer in cache.layers]
    return cache


def _reformed(layer: Any, form: type[GrowingLayer], room: int) -> Any:
    if type(layer) not in (GrowingLayer, SlottedLayer) or isinstance(layer, form):
        return layer
    new = form()
    if layer.is_initialized:
        keys, values = layer.content()
        new.hold(keys, values, room if form.fixed else 0)
    return new


def narrowed(cache: Cache, like: Cache) -> Cache:
    """Drop the columns of windows that no later token can see, from a cache with `whole`. In place.

    `like` is an empty cache of the same model without `whole`.
    """
    for part, empty in zip(parts(cache), parts(like), strict=True):
        for number, (layer, window) in enumerate(zip(part.layers, empty.layers, strict=True)):
            if type(layer) is GrowingLayer and isinstance(window, SlidingLayer) and layer.is_initialized:
                window.hold(*layer.content())
                part.layers[number] = window
    return cache


def is_double(cache: Cache) -> bool:
    """Whether it is an encoder-decoder's: self-attention and cross-attention."""
    return hasattr(cache, "cross_attention_cache")


def parts(cache: Cache) -> list[Cache]:
    """The cache, or an encoder-decoder's two."""
    return [cache.self_attention_cache, cache.cross_attention_cache] if is_double(cache) else [cache]


def fixed(cache: Cache) -> bool:
    """Whether a layer is allocated once, so that its room must be exact."""
    return any(getattr(layer, "fixed", False) for layer in self_part(cache).layers)


def length_of(cache: Cache) -> int:
    """Columns (tokens) in the self-attention part; 0 if there are only recurrent states."""
    for layer in self_part(cache).layers:
        if has_columns(layer):
            return int(layer.get_seq_length())
    return 0


def mergeable(cache: Cache) -> bool:
    """Whether rows of several lanes may share one cache of this kind."""
    layers = [layer for layer in self_part(cache).layers if not isinstance(layer, GrowingLayer)]
    if not layers:
        return True
    from genctl.decode import transformers_layers

    return all(map(transformers_layers.mergeable, layers))


def has_columns(layer: Any) -> bool:
    """Whether a layer keeps keys and values, not a state of constant size."""
    if isinstance(layer, GrowingLayer):
        return True
    from genctl.decode import transformers_layers

    return transformers_layers.has_columns(layer)


def self_part(cache: Cache) -> Cache:
    """The part that grows: the whole cache, or an encoder-decoder's self-attention."""
    return cache.self_attention_cache if is_double(cache) else cache


def select(cache: Cache, rows: Tensor, *, room: int = 0, drop: int = 0) -> Cache:
    """A new cache with `rows` (int64 [N], repeats allowed) of this one, without its first `drop` columns.

    The old cache is unchanged, so a prefix can be forked any number of times. Cross-attention is not touched: see
    `encoder_inputs.Sources`.
    """
    return with_layers(cache, [select_layer(layer, rows, room, drop) for layer in cache.layers])


def continued(cache: Cache, rows: Tensor, room: int) -> Cache:
    """Like `select` of all rows, but static layers that were allocated with this room continue in their own buffers."""
    return with_layers(cache, [_continued(layer, rows, room) for layer in cache.layers])


def _continued(layer: Any, rows: Tensor, room: int) -> Any:
    lent = layer.lend(room) if type(layer) is StaticLayer and layer.is_initialized else None
    return select_layer(layer, rows, room, 0) if lent is None else lent


def reorder(cache: Cache, rows: Tensor, since: int) -> Cache:
    """Row i becomes row `rows[i]` (int64 [N], as many as there are), if rows are equal before column `since`.

    Layers with their own buffers move the columns after it, in place (a window moves all its columns); the others are
    selected as a whole.
    """
    layers = []
    for layer in cache.layers:
        if isinstance(layer, GrowingLayer) and layer.is_initialized:
            layer.reorder(rows, 0 if isinstance(layer, SlidingLayer) else since)
            layers.append(layer)
        else:
            layers.append(select_layer(layer, rows, 0, 0))
    return with_layers(cache, layers)


def keep(cache: Cache, rows: Sequence[int], index: Tensor, *, room: int = 0, drop: int = 0) -> Cache:
    """Like `select` of `rows`, which is `index` too, but in place where a layer can: the old cache is used up."""
    ahead = all(row >= place for place, row in enumerate(rows))
    layers = []
    for layer in cache.layers:
        if ahead and isinstance(layer, GrowingLayer) and layer.is_initialized and not layer.fixed:
            layer.keep(rows, drop)
        else:
            layer = select_layer(layer, index, room, drop)
        layers.append(layer)
    return with_layers(cache, layers)


def merge(caches: Sequence[Cache], *, room: int = 0) -> Cache:
    """One cache with the rows of all, aligned to the right; shorter ones are padded with zeros on the left.

    The first one is used up: where rows have left it (see `keep`), the others are written to their places.
    """
    if len(caches) == 1:
        return caches[0]
    return with_layers(
        caches[0], [_merge_layers(layers, room) for layers in zip(*(c.layers for c in caches), strict=True)]
    )


def crop(cache: Cache, columns: int) -> None:
    """Remove the newest `columns` tokens of every row, in place.

    Layers that record past columns (`rewindable`) are cut back to what they need, even if nothing is removed.
    """
    for layer in self_part(cache).layers:
        if columns or getattr(layer, "record_past", False):
            layer.crop(-columns)


def rewindable(cache: Cache) -> Cache:
    """Let windows and convolutions keep what they would drop, until the next `crop`. In place; returns the cache."""
    for layer in self_part(cache).layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    return cache


def croppable(cache: Cache) -> bool:
    """Whether tokens can be removed: not from recurrent states, and from unknown layers only if they define `crop`."""
    layers = [layer for layer in self_part(cache).layers if not isinstance(layer, GrowingLayer)]
    if not layers:
        return True
    from genctl.decode import transformers_layers

    return all(map(transformers_layers.croppable, layers))


def with_layers(cache: Cache, layers: list[Any]) -> Cache:
    """A cache of the same class with other layers."""
    new = copy.copy(cache)
    new.layers = layers
    return new


def select_layer(layer: Any, rows: Tensor, room: int, drop: int) -> Any:
    """One layer's part of `select`."""
    if isinstance(layer, GrowingLayer):
        return layer.select(rows, room=room, drop=drop) if layer.is_initialized else copy.copy(layer)
    from genctl.decode import transformers_layers

    return transformers_layers.select(layer, rows, drop)


def _merge_layers(layers: Sequence[Any], room: int) -> Any:
    first = layers[0]
    if isinstance(first, GrowingLayer):
        return first.merge(layers[1:], room) if first.is_initialized else copy.copy(first)
    from genctl.decode import transformers_layers

    return transformers_layers.merge(layers)
