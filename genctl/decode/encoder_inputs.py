"""The encoder side of a batch of an encoder-decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from genctl.decode import cache as caches
from genctl.decode.cache import Cache
from genctl.decode.types import Source


@dataclass
class Sources:
    """The encoder side of a batch: one row for each decoder row. Never reordered between the rows of one prompt."""

    states: Tensor  # [N, S, H]; views of one row where a prompt has several
    mask: Tensor | None  # int64 [N, S], None when nothing is padded
    cross: Cache | None  # the cross-attention cache, computed once per prompt
    grouped: bool = False  # whether `cross` has one row for each prompt, for as many decoder rows each


def join_sources(
    sources: Sequence[Source], cross: Sequence[Cache | None], counts: Sequence[int], *, group: bool = False
) -> Sources:
    """The encoder side of a batch from one prompt each: lane i has `counts[i]` rows.

    One prompt: a view of its single row, `counts[0]` times. Several: copied once, padded on the right and masked; with
    `group`, if all counts are equal, with one row for each prompt.
    """
    if len(sources) == 1:
        states = sources[0].states.expand(counts[0], -1, -1)
        if cross[0] is None:  # read again in every pass, and not every architecture reads a view
            states = states.contiguous()
        return Sources(states, None, None if cross[0] is None else _expand(cross[0], counts[0]))
    longest = max(source.states.shape[1] for source in sources)
    rows = sum(counts)
    like = sources[0].states
    states = like.new_zeros(rows, longest, like.shape[2])
    mask = torch.zeros(rows, longest, dtype=torch.long, device=like.device)
    at = 0
    for source, count in zip(sources, counts, strict=True):
        length = source.states.shape[1]
        states[at : at + count, :length] = source.states
        mask[at : at + count, :length] = 1
        at += count
    full = all(source.states.shape[1] == longest for source in sources)
    joined = None
    group = group and counts[0] > 1 and len(set(counts)) == 1
    if all(part is not None for part in cross):
        wide = [1] * len(counts) if group else counts
        joined = _join_cross([part for part in cross if part is not None], wide, longest)
    return Sources(states, None if full else mask, joined, group and joined is not None)


def _expand(cross: Cache, count: int) -> Cache:
    layers = []
    for layer in cross.layers:
        new = caches.GrowingLayer()
        new.hold(layer.keys.expand(count, -1, -1, -1), layer.values.expand(count, -1, -1, -1))
        layers.append(new)
    return caches.with_layers(cross, layers)


def _join_cross(cross: Sequence[Cache], counts: Sequence[int], longest: int) -> Cache:
    layers = []
    for parts in zip(*(cache.layers for cache in cross), strict=True):
        held = []
        for name in ("keys", "values"):
            like = getattr(parts[0], name)
            joined = like.new_zeros(sum(counts), like.shape[1], longest, like.shape[3])
            at = 0
            for part, count in zip(parts, counts, strict=True):
                tensor = getattr(part, name)
                joined[at : at + count, :, : tensor.shape[2]] = tensor
                at += count
            held.append(joined)
        new = caches.GrowingLayer()
        new.hold(held[0], held[1])
        layers.append(new)
    return caches.with_layers(cross[0], layers)
