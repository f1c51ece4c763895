"""Positions: rotations of queries and keys, sinusoids added to embeddings, and biases on the scores.

N rows, F tokens fed to each, T tokens that they may see, H heads.

All rotation formulas are those of transformers' `modeling_rope_utils`, in the same order of operations, so
angles are equal to the last bit: at position 100,000 the last bit of a frequency is an angle of 0.01.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from genctl.kernels import ops
from genctl.native.attention import Mask, SlotMask
from genctl.native.spec import Relative, Rope


def sinusoids(positions: int, features: int) -> Tensor:
    """f32 [positions, features]: sines in the first half, cosines in the second (Vaswani et al. 2017, section 3.5).

    Features that are neighbours in the paper's table are half a table apart here, as in transformers.
    """
    exponents = 2 * (torch.arange(features, dtype=torch.float64) // 2) / features
    angles = torch.arange(positions, dtype=torch.float64)[:, None] / 10000.0**exponents
    return torch.cat([angles[:, 0::2].sin(), angles[:, 1::2].cos()], -1).float()


def fairseq_sinusoids(positions: int, features: int, padding: int) -> Tensor:
    """f32 [positions, features]: fairseq's variant, with different spacing of frequencies; the row of padding is 0."""
    half = features // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.int64).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(positions, dtype=torch.int64).float()[:, None] * frequencies
    table = torch.cat([angles.sin(), angles.cos()], -1)
    table[padding] = 0
    return table


# -- ALiBi -------------------------------------------------------------------------------------------------------------


def alibi(slopes: Tensor, positions: Tensor) -> Tensor:
    """Attention with linear biases (Press et al. 2022, arXiv:2108.12409): slope · position of the key.

    slopes [H], positions int64 [N or 1, T] -> [N or 1, H, 1, T]. The query's own position is left out: it would
    subtract the same number from all its scores, which does not change the softmax.
    """
    return slopes[:, None, None] * positions[:, None, None]


def alibi_slopes(heads: int) -> Tensor:
    """f32 [H]: 2^(-8/n), 2^(-16/n), … for n heads; else those of the next lower power of 2, then values in between."""
    power = 2 ** math.floor(math.log2(heads))
    base = torch.tensor(2 ** (-(2 ** -(math.log2(power) - 3))), dtype=torch.float32)
    slopes = base ** torch.arange(1, 1 + power, dtype=torch.int32)
    if power == heads:
        return slopes
    base = torch.tensor(2 ** (-(2 ** -(math.log2(2 * power) - 3))), dtype=torch.float32)
    between = base ** torch.arange(1, 1 + 2 * (heads - power), 2, dtype=torch.int32)
    return torch.cat([slopes, between])


def mpt_slopes(heads: int) -> Tensor:
    """The same for MPT: if n is no power of 2, every other slope of the next higher power, then those in between."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 1.0 / torch.pow(2, torch.arange(1, power + 1, dtype=torch.float32) * (8 / power))
    return slopes if power == heads else torch.cat([slopes[1::2], slopes[::2]])[:heads]


# -- distances ---------------------------------------------------------------------------------------------------------


class Distances:
    """The bias on a head's scores for each distance between key and query."""

    def __init__(self, table: Tensor, relative: Relative, *, causal: bool) -> None:
        far = self.farthest = relative.farthest
        distances = torch.arange(-far, far + 1, device=table.device)
        self.values = table[_buckets(distances, relative, causal)].t().contiguous()  # [H, 2 * farthest + 1]

    def mask(self, past: int, fed: int, mask: Tensor | None, device: torch.device) -> RelativeMask:
        """The mask of `fed` tokens after `past` others, with these biases. `mask`: see `Mask`."""
        return RelativeMask(past, fed, mask, device, self)

    def bias(self, past: int, fed: int) -> Tensor:
        """The biases of `fed` queries, which follow `past` keys and are keys too: [1, H, F, past + F]."""
        keys = torch.arange(past + fed, device=self.values.device)
        return self.at(keys - keys[past:, None])

    def at(self, distances: Tensor) -> Tensor:
        """The biases for distances key - query int64 [F, T]: [1, H, F, T]."""
        return self.values[:, distances.clamp(-self.farthest, self.farthest) + self.farthest][None]


def _buckets(distances: Tensor, relative: Relative, causal: bool) -> Tensor:
    """int64 [...], key - query -> bucket. A decoder needs only keys before a query (Raffel et al. 2020, section 2.1).

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
    exact = count // 2  # this many near distances have a bucket each
    share = torch.log(distances.clamp(min=1).float() / exact) / math.log(relative.farthest / exact)
    shared = (exact + (share * (count - exact)).long()).clamp(max=count - 1)
    return first + torch.where(distances < exact, distances, shared)


class RelativeMask(Mask):
    """A mask that is added to the scores: a bias by distance, -inf where a token does not attend."""

    def __init__(self, past: int, fed: int, mask: Tensor | None, device: torch.device, distances: Distances) -> None:
        super().__init__(past, fed, mask, device)
        self.distances = distances

    def columns(self, count: int, window: int | None) -> dict[str, Any]:
        """As `Mask.columns`, with the bias of the newest `count` columns."""
        return {**super().columns(count, window), "bias": self.distances.bias(self.past, self.fed)[..., -count:]}

    def _make(self, columns: int, window: int | None) -> Tensor:
        """[N or 1, H, F, columns]."""
        bias = self.distances.bias(self.past, self.fed)
        seen = super()._make(columns, window)
        if seen is None and self.fed > 1:
            seen = torch.ones(self.fed, columns, dtype=torch.bool, device=self.device).tril(self.past)
        return bias if seen is None else bias.masked_fill(~seen, -math.inf)


class RelativeSlotMask(SlotMask):
    """Like `RelativeMask`, over the slots of buffers; `places` int64 [1] is the column of the fed token per window."""

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
        """As `SlotMask.columns`, with the bias of each column."""
        return {**super().columns(count, window), "bias": self.biases[window]}


class Rotary:
    """Rotates queries and keys by their positions.

    N rows, F tokens, r = `rope.size` features that are rotated.
    """

    def __init__(self, rope: Rope, device: torch.device) -> None:
        self.rope = rope
        self.device = device
        self.fixed = None if rope.depends_on_length else _frequencies(rope).to(device)
        # one exponent for each pair of features, on the device: [r/2]
        self.powers = _powers(rope.size).to(device)
        self.stretched: tuple[Tensor, Tensor] | None = None  # frequencies of short and of long texts
        if rope.kind == "longrope":  # LongRoPE (Ding et al. 2024, arXiv:2402.13753): two sets of searched factors
            plain = rope.theta**self.powers
            short, long = (plain.new_tensor(factors) for factors in (rope.short_factor, rope.long_factor))
            self.stretched = 1.0 / (short * plain), 1.0 / (long * plain)

    def angles(self, positions: Tensor, *, first: bool) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines f32 [N, 1, F, r] for positions int64 [N, F].

        If angles depend on the length of the text: tokens of a prompt (`first`) use its whole length, and each later
        token the length up to itself. So a row never depends on other rows, and a draft token is rotated as if it
        were fed alone.
        """
        if self.fixed is not None:
            frequencies = self.fixed
        else:
            lengths = positions.amax(-1, keepdim=True).expand_as(positions) + 1 if first else positions + 1
            frequencies = self._frequencies_of_length(lengths)
        angles = positions[..., None].float() * frequencies  # [N, F, r/2]
        library = ops.compiled(angles)
        cos, sin = (angles.cos(), angles.sin()) if library is None else ops.turns(library, angles)
        cos, sin = cos * self.rope.attention_factor, sin * self.rope.attention_factor
        if self.rope.interleaved:  # (a, b) -> (a cos - b sin, b cos + a sin), a and b neighbours
            cos, sin = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
        else:  # a in the first half of the head, b at the same place of the second
            cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        return cos[:, None], sin[:, None]

    def _frequencies_of_length(self, lengths: Tensor) -> Tensor:
        """Radians per position in texts of these lengths: int64 [N, F] -> f32 [N, F, r/2]."""
        rope = self.rope
        if self.stretched is not None:
            short, long = self.stretched
            return torch.where((lengths > rope.original)[..., None], long, short)
        # dynamic NTK scaling (emozilla 2023): the base grows with the length beyond the context
        beyond = (rope.factor * lengths.clamp(min=rope.context).float() / rope.context) - (rope.factor - 1)
        base = rope.theta * beyond ** (rope.size / (rope.size - 2))
        return 1.0 / (base[..., None] ** self.powers)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [N, H, F, D] -> x with its first r features rotated; cos and sin are those of `angles`."""
        size = self.rope.size
        part = x if size == x.shape[-1] else x[..., :size]
        if self.rope.interleaved:
            partner = part.reshape(*part.shape[:-1], -1, 2).flip(-1).flatten(-2)
        else:
            partner = part.roll(size // 2, -1)
        turned = part * cos + partner * sin
        return turned if part is x else torch.cat([turned, x[..., size:]], -1)


def _powers(size: int) -> Tensor:
    """0, 2/r, 4/r, … below 1, float32 [r/2]."""
    return torch.arange(0, size, 2, dtype=torch.int64).float() / size


def _frequencies(rope: Rope) -> Tensor:
    """Radians per position, f32 [r/2], for kinds that do not depend on the length."""
    plain = 1.0 / (rope.theta ** _powers(rope.size))
    if rope.divisors:
        return plain / plain.new_tensor(rope.divisors)
    if rope.kind == "linear":  # positions are interpolated (kaiokendev 2023)
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Llama 3.1: low frequencies are divided by the factor, high ones are kept, those in between are blended."""
    slow, fast = rope.original / rope.low_freq_factor, rope.original / rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > slow, plain / rope.factor, plain)
    share = (rope.original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - share) * scaled / rope.factor + share * scaled
    return torch.where(~(wavelength < fast) & ~(wavelength > slow), blended, scaled)


def _yarn(rope: Rope) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071), section 3.2: a ramp over the features, from original to stretched."""

    def feature(rotations: float) -> float:  # the pair that makes this many rotations over the original context
        return (rope.size * math.log(rope.original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = feature(rope.beta_fast), feature(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    high += 0.001 if low == high else 0
    ramp = (torch.arange(rope.size // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    powers = rope.theta ** _powers(rope.size)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
