"""The angles of rotary positions, and how they are stretched for longer contexts.

Every formula is that of transformers' `modeling_rope_utils`, in the same order of operations, so that angles are equal
to the last bit: at position 100,000 the last bit of a frequency is an angle of 0.01.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genctl.kernels import ops
from genctl.native.spec import Rope


class Rotary:
    """Turns queries and keys by their positions.

    N rows, F tokens, r = `rope.size` features that turn.
    """

    def __init__(self, rope: Rope, device: torch.device) -> None:
        self.rope = rope
        self.device = device
        self.fixed = None if rope.depends_on_length else _frequencies(rope).to(device)
        # numbers for each pair of features, on the device: [r/2]
        self.powers = _powers(rope.size).to(device)
        self.stretched: tuple[Tensor, Tensor] | None = None  # frequencies of short and of long texts
        if rope.kind == "longrope":  # LongRoPE (Ding et al. 2024, arXiv:2402.13753): two sets of searched factors
            plain = rope.theta**self.powers
            short, long = (plain.new_tensor(factors) for factors in (rope.short_factor, rope.long_factor))
            self.stretched = 1.0 / (short * plain), 1.0 / (long * plain)

    def angles(self, positions: Tensor, *, first: bool) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines f32 [N, 1, F, r] for positions int64 [N, F].

        If angles depend on the length of the text: a prompt (`first`) counts with its own length, and each later token
        as the end of its text. So a row never depends on its neighbours, and a draft token is rotated as if it came
        alone.
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
        """Radians for each position in texts of these lengths: int64 [N, F] -> f32 [N, F, r/2]."""
        rope = self.rope
        if self.stretched is not None:
            short, long = self.stretched
            return torch.where((lengths > rope.original)[..., None], long, short)
        # dynamic NTK scaling (emozilla 2023): the base grows with the length beyond the context
        beyond = (rope.factor * lengths.clamp(min=rope.context).float() / rope.context) - (rope.factor - 1)
        base = rope.theta * beyond ** (rope.size / (rope.size - 2))
        return 1.0 / (base[..., None] ** self.powers)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [N, H, F, D] -> the same with its first r features turned; cos and sin as `angles` gives them."""
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
    """Radians for each position, f32 [r/2], where they are the same at every length."""
    plain = 1.0 / (rope.theta ** _powers(rope.size))
    if rope.divisors:
        return plain / plain.new_tensor(rope.divisors)
    if rope.kind == "linear":  # positions are pressed together (kaiokendev 2023)
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Llama 3.1: slow frequencies are divided by the factor, fast ones stay, those between are blended."""
    slow, fast = rope.original / rope.low_freq_factor, rope.original / rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > slow, plain / rope.factor, plain)
    share = (rope.original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - share) * scaled / rope.factor + share * scaled
    return torch.where(~(wavelength < fast) & ~(wavelength > slow), blended, scaled)


def _yarn(rope: Rope) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071), section 3.2: a ramp over the features between stretched and not."""

    def feature(rotations: float) -> float:  # which one turns so often over the original context
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
