"""Attention over a cache, for all score variants (soft cap, bias, sinks) and all kinds of cache layers.

N rows, F tokens fed, T tokens that they may attend to, H query heads, K heads of keys and values (G = H / K
queries share one), D features of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.cache.layer import KeyValues
from genctl.decode.runtime import TokenPlaces
from genctl.kernels import ops


class Mask:
    """Which tokens each fed token attends to in one pass: those before it, without padding, within a window.

    A row's columns in a cache are its padding, which holds nothing, and then its tokens in order.
    """

    def __init__(self, past: int, fed: int, mask: Tensor | None, device: torch.device) -> None:
        self.past = past  # columns before those fed
        self.fed = fed
        self.mask = None if mask is None else mask.bool()  # [N, past + F], False where there is padding
        self.device = device
        self._made: dict[tuple[int, int | None], Tensor | None] = {}

    def of(self, columns: int, window: int | None) -> Tensor | None:
        """Which of the newest `columns` the fed tokens attend to: bool [N or 1, 1, F, columns].

        None if each attends to all columns up to its own.
        """
        key = columns, window
        if key not in self._made:
            self._made[key] = self._make(columns, window)
        return self._made[key]

    def columns(self, count: int, window: int | None) -> dict[str, Any]:
        """Arguments of `kernels.ops.attention`: which of the newest `count` columns hold a token, bool [N, count]."""
        mask = None if self.mask is None else self.mask[:, self.past + self.fed - count :]
        return {"mask": mask, "causal": True, "window": self._width(window)}

    def _width(self, window: int | None) -> int | None:
        """A window of 1 is ignored after the prefill, as in transformers (see `decode.runtime.cut_bound`)."""
        return None if window == 1 and self.past else window

    def _make(self, columns: int, window: int | None) -> Tensor | None:
        total = self.past + self.fed
        window = self._width(window)
        narrow = window is not None and columns > window
        if self.mask is None and not narrow and (self.fed == 1 or columns == self.fed):
            return None
        keys = torch.arange(total - columns, total, device=self.device)
        queries = torch.arange(self.past, total, device=self.device)[:, None]
        seen = keys <= queries  # [F, columns]
        if window is not None:
            seen = seen & (keys > queries - window)
        if self.mask is None:
            return seen[None, None]
        # padding attends to itself, or its softmax would be over nothing
        return (seen & self.mask[:, None, None, total - columns :]) | (keys == queries)


class SlotMask(Mask):
    """Masks over the slots of buffers, one for each window size: bool [N, 1, 1, C], the fed token's slot included."""

    def __init__(self, slots: Mapping[int | None, Tensor]) -> None:
        some = next(iter(slots.values()))
        super().__init__(some.shape[-1] - 1, 1, None, some.device)
        self.slots = slots

    def of(self, columns: int, window: int | None) -> Tensor | None:
        """The mask of layers with this window, for all of their columns."""
        return self.slots[window]

    def columns(self, count: int, window: int | None) -> dict[str, Any]:
        """As `Mask.columns`. The fed token's column may be anywhere among the others."""
        return {"mask": self.slots[window][:, 0, 0], "causal": False}


def places_mask(mask: Tensor | None) -> SlotMask:
    """The mask for tokens that each have their own place, from bool [N, C], the columns that each token sees."""
    assert mask is not None
    return SlotMask({None: mask[:, None, None]})


class PlacedLayer:
    """A full-attention layer in a pass whose tokens go to `places`: each of the N rows of the pass is a token."""

    prompt: tuple[Tensor, Tensor] | None = None  # see `layer.KeyValues`

    def __init__(self, layer: GrowingLayer, places: TokenPlaces) -> None:
        self.layer, self.places = layer, places

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Write a column for each token, `[N, heads, 1, head_dim]`; returns `content()`."""
        first, _ = self.layer.extend(self.places.new)
        for buffer, new in zip(self.layer.buffers, (key_states, value_states), strict=True):
            buffer[self.places.rows, :, first + self.places.columns] = new[:, :, 0]
        return self.content()

    def content(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the cache row of each token, `[N, heads, length, head_dim]`."""
        keys, values = self.layer.content()
        return keys[self.places.rows], values[self.places.rows]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: KeyValues | None,
    visible: Mask,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the fed tokens. Their keys and values are appended to `layer`, if there is a cache.

    query [N, H, F, D], key and value [N, K, F, D], bias f32 [N or 1, H, 1, past + F] -> [N, F, H·D]. `sinks` [H] are
    scores of one more column, which every token sees and whose value is 0 (Xiao et al. 2023, arXiv:2309.17453).
    """
    prompt = None
    if layer is not None:
        key, value = layer.update(key, value)
        prompt = layer.prompt
    library = ops.compiled(query)
    if library is not None and key.dtype == query.dtype:
        parts = [(key, value)] if prompt is None else [prompt, (key, value)]  # a prompt that rows share is read once
        count = sum(keys.shape[2] for keys, _ in parts)
        seen_columns = {"bias": None if bias is None else bias[..., -count:], **visible.columns(count, window)}
        return ops.attention(library, query, parts, scaling=scaling, softcap=softcap, sinks=sinks, **seen_columns)
    if layer is not None and prompt is not None:
        plain = query.shape[2] == 1 and visible.mask is None and softcap is None and bias is None and sinks is None
        if plain:  # the prompt's columns are read once for all rows that continue it
            from genctl.decode.cache.shared import attend

            return attend(query, prompt, (key, value), scaling).flatten(2)
        key, value = layer.content()
    seen = visible.of(key.shape[2], window)
    if softcap is not None or bias is not None or sinks is not None:
        mixed = _by_hand(query, key, value, seen, scaling, softcap, bias, sinks, fed=visible.fed)
    else:
        mixed = _fused(query, key, value, seen, scaling, fed=visible.fed)
    return mixed.transpose(1, 2).flatten(2)


def cross_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, *, scaling: float) -> Tensor:
    """Attention to all tokens of a source.

    query [N, H, F, D], key and value [P, H, S, D] -> [N, F, H·D]. N / P consecutive rows attend to one row of the
    source: they become further queries on it, so no key is copied. `seen` is None, a mask bool [N, 1, 1, S] that
    is the same for all rows of a source, or a bias [1, H, F, S] if N = P.
    """
    if len(key) > 1 and key.stride(0) == 0:  # one row, viewed as many
        key, value = key[:1], value[:1]
    library = ops.compiled(query)
    if library is not None:
        mask = None if seen is None or seen.dtype != torch.bool else seen[:, 0, 0]
        bias = seen if mask is None else None
        return ops.attention(library, query, [(key, value)], causal=False, mask=mask, bias=bias, scaling=scaling)
    rows, heads, fed, size = query.shape
    each = rows // len(key)
    if each > 1:
        query = query.view(-1, each, heads, fed, size).transpose(1, 2).reshape(-1, heads, each * fed, size)
        seen = None if seen is None else seen[::each]
    mixed = F.scaled_dot_product_attention(query, key, value, seen, scale=scaling)  # [P, H, N / P · F, D]
    if each > 1:
        mixed = mixed.view(-1, heads, each, fed, size).transpose(1, 2).reshape(rows, heads, fed, size)
    return mixed.transpose(1, 2).flatten(2)


def _fused(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scaling: float, *, fed: int) -> Tensor:
    """softmax(q kᵀ · scaling) v by torch's kernel. [N, H, F, D]"""
    rows, heads, _, size = query.shape
    groups = heads // key.shape[1]
    if fed == 1 and groups > 1:  # queries that share a head become its F tokens, so no key is read twice
        query = query.reshape(rows, -1, groups, size)
        return F.scaled_dot_product_attention(query, key, value, seen, scale=scaling).reshape(rows, heads, 1, size)
    causal = seen is None and fed > 1
    return F.scaled_dot_product_attention(
        query, key, value, seen, is_causal=causal, scale=scaling, enable_gqa=groups > 1
    )


def _by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    scaling: float,
    softcap: float | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    *,
    fed: int,
) -> Tensor:
    """The same as two matrix products, for scores with a soft cap, a bias or sinks. [N, H, F, D]"""
    rows, heads, _, size = query.shape
    kv_heads = key.shape[1]
    if seen is None and fed > 1:
        seen = torch.ones(fed, key.shape[2], dtype=torch.bool, device=key.device).tril(key.shape[2] - fed)[None, None]
    grouped = query.reshape(rows, kv_heads, -1, size)  # [N, K, G·F, D]
    scores = (grouped @ key.transpose(-1, -2) * scaling).view(rows, heads, fed, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias[..., -scores.shape[-1] :].to(scores.dtype)
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(rows, -1, fed, -1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(value.dtype)
    return (weights.reshape(rows, kv_heads, -1, key.shape[2]) @ value).view(rows, heads, fed, size)
