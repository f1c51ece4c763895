"""The encoder side of a batch of an encoder-decoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.types import Source, Sources


def join_sources(
    sources: Sequence[Source],
    cross: Sequence[Sequence[GrowingLayer] | None],
    counts: Sequence[int],
    *,
    group: bool = False,
) -> Sources:
    """The encoder side of a batch from one prompt each: lane i has `counts[i]` rows.

    One prompt: a view of its single row, `counts[0]` times. Several: copied once, padded on the right and masked. With
    `group`, where all counts are equal, cross-attention has one row for each prompt.
    """
    longest = max(source.states.shape[1] for source in sources)
    held = [part for part in cross if part is not None]
    joined = _join_cross(held, [1] * len(counts) if group else counts, longest) if len(held) == len(cross) else None
    states = _padded([source.states[:, None] for source in sources], counts, longest)[:, 0]
    if len(sources) == 1 and joined is None:  # every pass reads it again, and not every architecture accepts a view
        states = states.contiguous()
    mask = None
    if any(source.states.shape[1] < longest for source in sources):
        ones = [torch.ones_like(source.ids)[:, None, :, None] for source in sources]
        mask = _padded(ones, counts, longest)[:, 0, :, 0]
    return Sources(states, mask, joined)


def _join_cross(cross: Sequence[Sequence[GrowingLayer]], counts: Sequence[int], longest: int) -> list[GrowingLayer]:
    joined: list[GrowingLayer] = []
    for parts in zip(*cross, strict=True):
        layer = GrowingLayer()
        keys, values = zip(*(part.content() for part in parts), strict=True)
        layer.hold(_padded(keys, counts, longest), _padded(values, counts, longest))
        joined.append(layer)
    return joined


def _padded(parts: Sequence[Tensor], counts: Sequence[int], longest: int) -> Tensor:
    """Parts [1, G, length, D], each repeated `counts` times, over zeros; a view if there is only one part."""
    rows = []
    for part, count in zip(parts, counts, strict=True):
        short = longest - part.shape[2]
        rows.append((functional.pad(part, (0, 0, 0, short)) if short else part).expand(count, -1, -1, -1))
    return rows[0] if len(rows) == 1 else torch.cat(rows)
