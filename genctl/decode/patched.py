"""Shared prompts and grouped sources for transformers' models: for one pass, their attention is ours (see `shared`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from genctl.decode.shared import SharedLayer, attend, is_shared


class Attention:
    """Stands in for transformers' "sdpa" during a pass over a cache with shared layers, or whose sources are `grouped`.

    `reached` counts the layers whose attention went through here as it must: a model that computes attention by itself
    would see the own columns only, or too few rows.
    """

    def __init__(self, cache: Cache, grouped: bool = False) -> None:
        self.cache = cache
        self.grouped = grouped
        double = isinstance(cache, EncoderDecoderCache)
        self.layers = () if double else cache.layers
        shared = sum(isinstance(layer, SharedLayer) for layer in self.layers)
        self.wanted = len(cache.cross_attention_cache.layers) if double else shared
        self.reached = 0
        self.plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """query [R, H·G, 1, D]; key and value [R, H, S, D]. Returns [R, 1, H·G, D]."""
        if self.grouped and len(key) < len(query):
            self.reached += 1
            return self._grouped(module, query, key, value, attention_mask, **kwargs)
        number = getattr(module, "layer_idx", None)
        layer = self.layers[number] if self.layers and number is not None else None
        if not isinstance(layer, SharedLayer) or key.data_ptr() != layer.buffers[0].data_ptr():
            return self.plain(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]  # transformers is untyped here
        self.reached += 1
        unusual = any(kwargs.get(name) is not None for name in _BENDS)
        if attention_mask is not None or query.shape[2] > 1 or unusual or key.shape != value.shape:
            keys, values = layer.content()
            return self.plain(module, query, keys, values, attention_mask, **kwargs)  # type: ignore[no-any-return]  # transformers is untyped here
        return attend(query, layer.prompt, (key, value), kwargs.get("scaling")), None

    def _grouped(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """query [P·B, H·G, 1, D]; key and value [P, H, S, D]; the mask is the same for the B rows of a source."""
        rows, heads, fed, size = query.shape
        each = rows // len(key)
        if fed > 1:
            keys, values = key.repeat_interleave(each, 0), value.repeat_interleave(each, 0)
            return self.plain(module, query, keys, values, attention_mask, **kwargs)  # type: ignore[no-any-return]  # transformers is untyped here
        asked = query.view(len(key), each, heads, size).transpose(1, 2)
        if attention_mask is not None and len(attention_mask) == rows:
            attention_mask = attention_mask[::each]
        made, _ = self.plain(module, asked, key, value, attention_mask, **{**kwargs, "is_causal": False})
        return made.reshape(rows, 1, heads, -1), None


_BENDS = ("softcap", "s_aux", "sliding_window", "position_bias")  # arguments that change the scores of attention


@contextmanager
def attending(cache: Any, *, grouped: bool = False) -> Iterator[Attention | None]:
    """For one pass: attention that knows the shared columns of `cache`, and cross-attention with a row for each source.

    Nothing is changed for other caches.
    """
    if not isinstance(cache, Cache) or not (grouped or is_shared(cache)):
        yield None
        return
    attention = Attention(cache, grouped)
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention  # of this instance only: the library's own table stays
    try:
        yield attention
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
