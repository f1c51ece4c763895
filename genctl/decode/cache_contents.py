"""The contents of a cache, layer by layer: kinds, shapes and bytes of its tensors."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from genctl.decode import cache as caches
from genctl.decode.cache import Cache
from genctl.decode.layers import GrowingLayer
from genctl.decode.shared_prompt import SharedLayer

CROSS, RECURRENT, SLIDING, FULL = "cross-attention", "recurrent state", "sliding window", "full"


def describe(cache: Cache | None, cross: Cache | None = None) -> list[dict[str, Any]]:
    """The parts of a cache in the order of the layers, each `{"layer", "kind", "shape", "dtype", "device", "bytes"}`.

    `shape` is that of the keys, `[rows, heads, length, head_dim]` (a recurrent state has its own shape); values of
    another shape add `value_shape`. `bytes` counts everything stored for the part, scales of quantised numbers
    included, and nothing twice: rows that are views of one row count once. If rows share a prompt of 64 tokens or more,
    `shape` has all columns, `bytes` counts the prompt's once, and `shared` is their number. A buffer's free columns
    count only in a static layer (see `reserved`), which adds `filled`, its columns in use. A hybrid layer has two
    parts. `cross` is an encoder-decoder's other part if the rows of several prompts were joined.
    """
    if cache is None:
        return []
    own = caches.self_part(cache)
    if cross is None and caches.is_double(cache):
        cross = cache.cross_attention_cache
    entries: list[dict[str, Any]] = []
    for number, layer in enumerate(own.layers):
        if isinstance(layer, GrowingLayer):
            entries += [_attention(number, layer)] if layer.is_initialized else []
            continue
        from genctl.decode import transformers_layers

        if transformers_layers.is_recurrent(layer):
            entries += _recurrent(number, layer)
        if transformers_layers.has_columns(layer) and layer.is_initialized:
            entries.append(_attention(number, layer))
    for number, layer in enumerate(cross.layers if cross is not None else ()):
        if layer.is_initialized:
            entries.append({**_attention(number, layer), "kind": CROSS})
    return entries


def reserved(cache: Cache | None) -> int:
    """Bytes of the growing layers' buffers, free columns included; other layers count as they are."""
    if cache is None:
        return 0
    total = 0
    for part in caches.parts(cache):
        for number, layer in enumerate(part.layers):
            if isinstance(layer, GrowingLayer):
                total += sum(_bytes(buffer) for buffer in layer.buffers)
                total += sum(_bytes(part) for part in layer.prompt) if isinstance(layer, SharedLayer) else 0
                continue
            from genctl.decode import transformers_layers

            if transformers_layers.is_recurrent(layer):
                total += sum(entry["bytes"] for entry in _recurrent(number, layer))
            if transformers_layers.has_columns(layer) and layer.is_initialized:
                total += _attention(number, layer)["bytes"]
    return total


def _attention(number: int, layer: Any) -> dict[str, Any]:
    own = isinstance(layer, GrowingLayer)
    tensors = layer.stored() if own else (layer.keys, layer.values)
    window = getattr(layer, "sliding_window", None)
    keys, values = tensors[0], tensors[len(tensors) // 2]
    entry: dict[str, Any] = {
        "layer": number,
        "kind": layer.kind if own else FULL if window is None else SLIDING,
        "shape": _held(keys),
        "dtype": str(keys.dtype).removeprefix("torch."),
        "device": str(keys.device),
        "bytes": sum(_bytes(tensor) for tensor in tensors),
    }
    if _held(values) != entry["shape"]:
        entry["value_shape"] = _held(values)
    if isinstance(layer, SharedLayer):  # the prompt is stored once, whatever the number of rows
        entry["shape"][2] += layer.columns
        entry["bytes"] += sum(_bytes(part) for part in layer.prompt)
        entry["shared"] = layer.columns
    if own and layer.fixed:
        entry["filled"] = layer.length
    if window is not None:
        entry["window"] = window
    return entry


def _recurrent(number: int, layer: Any) -> list[dict[str, Any]]:
    states = {
        f"{name}{index or ''}": state
        for name in ("conv", "recurrent")
        for index, state in getattr(layer, f"{name}_states").items()
        if state is not None
    }
    if not states:
        return []
    shown = states.get("recurrent", next(iter(states.values())))
    return [
        {
            "layer": number,
            "kind": RECURRENT,
            "shape": _held(shown),
            "dtype": str(shown.dtype).removeprefix("torch."),
            "device": str(shown.device),
            "bytes": sum(_bytes(state) for state in states.values()),
            "states": {name: _held(state) for name, state in states.items()},
        }
    ]


def _held(tensor: Tensor) -> list[int]:
    """The shape in memory: a dimension with stride 0 counts once."""
    return [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def _bytes(tensor: Tensor) -> int:
    return math.prod(_held(tensor)) * tensor.element_size()
