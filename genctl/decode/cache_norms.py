"""The norms of keys and values in a cache, position by position: they show attention sinks.

The norm of one position is the L2 norm over head_dim, averaged over heads and rows. The first token, which
receives surplus attention (Xiao et al. 2023, arXiv:2309.17453), has much shorter keys and values than all others (Gu et
al. 2024, arXiv:2410.10781, section 3).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.cache_observer import CacheObserver
from genctl.decode.runtime import ModelRuntime


def observed_cache(forward: ModelRuntime) -> Cache | None:
    """The cache after the newest pass of an observed run; else None. It is not a copy."""
    observer = forward.watch
    return observer.passed.cache if isinstance(observer, CacheObserver) and observer.passed is not None else None


def norms(cache: Cache, *, cross: bool = False) -> tuple[int, list[dict[str, Any]]]:
    """The number of positions, and for each layer `{"layer", "keys", "values"}`, a number for each position.

    None marks positions that a window dropped. Layers with a state instead of positions are left out. `cross` reads an
    encoder-decoder's cross-attention, whose positions are the source's.
    """
    entries = []
    total = 0
    for number, layer in enumerate((cache.cross or ()) if cross else cache.layers):
        if not layer.is_initialized:
            continue
        keys, values = layer.content()
        seen = max(layer.get_seq_length(), int(keys.shape[-2]))
        total = max(total, seen)
        gone = [None] * (seen - int(keys.shape[-2]))
        entries.append({"layer": number, "keys": [*gone, *_lengths(keys)], "values": [*gone, *_lengths(values)]})
    return total, entries


def _lengths(states: Tensor) -> list[float]:
    """states [rows, heads, length, head_dim] -> `length` numbers."""
    lengths: list[float] = states.float().norm(dim=-1).mean((0, 1)).tolist()
    return lengths
