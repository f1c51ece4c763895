"""Positions that are no rotations (see `rope`): sines that are added to embeddings, and biases of the scores.

N rows, F tokens fed to each, T tokens that they may see, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from genctl.native.attention import Mask, SlotMask
from genctl.native.spec import Relative


def sinusoids(positions: int, features: int) -> Tensor:
    """f32 [positions, features]: sines in the first half, cosines in the second (Vaswani et al. 2017, section 3.5).

    Neighbouring features of the paper's table are half a table apart here, as transformers has it.
    """
    exponents = 2 * (torch.arange(features, dtype=torch.float64) // 2) / features
    angles = torch.arange(positions, dtype=torch.float64)[:, None] / 10000.0**exponents
    return torch.cat([angles[:, 0::2].sin(), angles[:, 1::2].cos()], -1).float()


def fairseq_sinusoids(positions: int, features: int, padding: int) -> Tensor:
    """f32 [positions, features]: the same as fairseq computes it, with one frequency less; the row of padding is 0."""
    half = features // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.int64).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(positions, dtype=torch.int64).float()[:, None] * frequencies
    table = torch.cat([angles.sin(), angles.cos()], -1)
    table[padding] = 0
    return table


# -- ALiBi -------------------------------------------------------------------------------------------------------------


def alibi(slopes: Tensor, positions: Tensor) -> Tensor:
    """Attention with linear biases (Press et al. 2022, arXiv:2108.12409): slope · position of the key.

    slopes [H], positions int64 [N or 1, T] -> [N or 1, H, 1, T]. A query's own position would subtract the
    same number from all its scores, which does not change their softmax.
    """
    return slopes[:, None, None] * positions[:, None, None]


def alibi_slopes(heads: int) -> Tensor:
    """f32 [H]: 2^(-8/n), 2^(-16/n), … for n heads; where n is no power of 2, between those of the next lower one."""
    power = 2 ** math.floor(math.log2(heads))
    base = torch.tensor(2 ** (-(2 ** -(math.log2(power) - 3))), dtype=torch.float32)
    slopes = base ** torch.arange(1, 1 + power, dtype=torch.int32)
    if power == heads:
        return slopes
    base = torch.tensor(2 ** (-(2 ** -(math.log2(2 * power) - 3))), dtype=torch.float32)
    between = base ** torch.arange(1, 1 + 2 * (heads - power), 2, dtype=torch.int32)
    return torch.cat([slopes, between])


def mpt_slopes(heads: int) -> Tensor:
    """The same for MPT: where n is no power of 2, every other one of the next higher one, and then those between."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 1.0 / torch.pow(2, torch.arange(1, power + 1, dtype=torch.float32) * (8 / power))
    return slopes if power == heads else torch.cat([slopes[1::2], slopes[::2]])[:heads]


# -- distances ---------------------------------------------------------------------------------------------------------


class Distances:
    """The bias of a head's scores for each distance of a key from its query."""

    def __init__(self, table: Tensor, relative: Relative, *, causal: bool) -> None:
        far = self.farthest = relative.farthest
        distances = torch.arange(-far, far + 1, device=table.device)
        self.values = table[_buckets(distances, relative, causal)].t().contiguous()  # [H, 2 * farthest + 1]

    def mask(self, past: int, fed: int, mask: Tensor | None, device: torch.device) -> RelativeMask:
        """What `fed` tokens see after `past` others, with these biases. `mask`: see `Mask`."""
        return RelativeMask(past, fed, mask, device, self)

    def bias(self, past: int, fed: int) -> Tensor:
        """Of `fed` queries, which come after `past` keys and are keys too: [1, H, F, past + F]."""
        keys = torch.arange(past + fed, device=self.values.device)
        return self.at(keys - keys[past:, None])

    def at(self, distances: Tensor) -> Tensor:
        """Of distances key - query int64 [F, T]: [1, H, F, T]."""
        return self.values[:, distances.clamp(-self.farthest, self.farthest) + self.farthest][None]


def _buckets(distances: Tensor, relative: Relative, causal: bool) -> Tensor:
    """int64 [...], key - query -> bucket. A decoder needs those before a query only (Raffel et al. 2020, section 2.1).

    The operations are those of transformers' `_relative_position_bucket`, in the same order.
    """
    count = relative.buckets
    first = torch.zeros_like(distances)
    if causal:
        distances = -distances.clamp(max=0)
    else:
        count //= 2
        first = (distances > 0).long() * count
        distances = distances.abs()
    exact = count // 2  # so many near distances have a bucket each
    share = torch.log(distances.clamp(min=1).float() / exact) / math.log(relative.farthest / exact)
    shared = (exact + (share * (count - exact)).long()).clamp(max=count - 1)
    return first + torch.where(distances < exact, distances, shared)


class RelativeMask(Mask):
    """A mask of numbers that are added to the scores: a bias by distance, -inf where a token does not attend."""

    def __init__(self, past: int, fed: int, mask: Tensor | None, device: torch.device, distances: Distances) -> None:
        super().__init__(past, fed, mask, device)
        self.distances = distances

    def columns(self, count: int, window: int | None) -> dict[str, Any]:
        """With the bias of the newest `count` columns."""
        return {**super().columns(count, window), "bias": self.distances.bias(self.past, self.fed)[..., -count:]}

    def _make(self, columns: int, window: int | None) -> Tensor:
        """[N or 1, H, F, columns]."""
        bias = self.distances.bias(self.past, self.fed)
        seen = super()._make(columns, window)
        if seen is None and self.fed > 1:
            seen = torch.ones(self.fed, columns, dtype=torch.bool, device=self.device).tril(self.past)
        return bias if seen is None else bias.masked_fill(~seen, -math.inf)


class RelativeSlotMask(SlotMask):
    """As `RelativeMask`, over the slots of buffers; `places` int64 [1] are the columns of the fed token."""

    def __init__(
        self, slots: Mapping[int | None, Tensor], places: Mapping[int | None, Tensor], distances: Distances
    ) -> None:
        super().__init__(slots)
        columns = {window: torch.arange(each.shape[-1], device=each.device) for window, each in slots.items()}
        self.biases = {window: distances.at((columns[window] - places[window])[None]) for window in slots}

    def of(self, columns: int, window: int | None) -> Tensor | None:
        """[N, H, 1, C]."""
        key = columns, window
        if key not in self._made:
            self._made[key] = self.biases[window].masked_fill(~self.slots[window], -math.inf)
        return self._made[key]

    def columns(self, count: int, window: int | None) -> dict[str, Any]:
        """With the bias of each column."""
        return {**super().columns(count, window), "bias": self.biases[window]}
