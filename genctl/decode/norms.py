"""How long the keys and values in a cache are, position by position: where attention sinks can be seen.

The norm of one position is the L2 norm over head_dim, averaged over heads and rows. The first token, at which attention
goes when it is not needed elsewhere (Xiao et al. 2023, arXiv:2309.17453), stands out: its keys and values are much
shorter than all others (Gu et al. 2024, arXiv:2410.10781, section 3).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from genctl.decode import cache as caches
from genctl.decode.cache import Cache
from genctl.decode.layers import GrowingLayer
from genctl.decode.runtime import ModelRuntime
from genctl.decode.watch import Watcher


def watched(forward: ModelRuntime) -> Cache | None:
    """The cache as the newest pass left it, while a watched run is under way; else None. It is not a copy."""
    watcher = forward.watch
    return watcher.passed.cache if isinstance(watcher, Watcher) and watcher.passed is not None else None


def norms(cache: Cache, *, cross: bool = False) -> tuple[int, list[dict[str, Any]]]:
    """How many positions there are, and for each layer `{"layer", "keys", "values"}`, a number for each position.

    None stands where a window has let a position go. Layers that keep a state instead of positions are left out.
    `cross` reads an encoder-decoder's other part, whose positions are the source's.
    """
    part = caches.self_part(cache)
    if cross:
        part = cache.cross_attention_cache if caches.is_double(cache) else None
    found = []
    total = 0
    for number, layer in enumerate(part.layers if part is not None else ()):
        if not caches.has_columns(layer) or not layer.is_initialized:
            continue
        keys, values = layer.content() if isinstance(layer, GrowingLayer) else (layer.keys, layer.values)
        seen = max(int(layer.get_seq_length()), int(keys.shape[-2]))
        total = max(total, seen)
        gone = [None] * (seen - int(keys.shape[-2]))
        found.append({"layer": number, "keys": [*gone, *_lengths(keys)], "values": [*gone, *_lengths(values)]})
    return total, found


def _lengths(states: Tensor) -> list[float]:
    """states [rows, heads, length, head_dim] -> `length` numbers."""
    found: list[float] = states.float().norm(dim=-1).mean((0, 1)).tolist()
    return found
