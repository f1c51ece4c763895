"""Weights in blocks, as GGUF files hold them, and in 4 bits: a number is code · scale, or code · scale + offset.

The layouts are those of ggml (github.com/ggml-org/ggml/blob/master/src/ggml-common.h). Nothing is rounded: a scale of
Q4_K, the product of a float16 and of 6 bits, is a float32.

O features out, I features in, G = I / 32, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genctl.native import pages
from genctl.native.quantized import AT_ONCE, GROUP, Unpacked, int4_codes

LANES = 16  # outputs that lie side by side
HALF = 8  # what is added to codes of 4 bits that have no offset, or whose offset is that of code 8
Scales = Literal["halves", "ranges", "sixteens", "shorts"]  # as products.h numbers them


_DTYPES = {
    "halves": torch.float16,
    "ranges": torch.float32,
    "sixteens": torch.float32,
    "shorts": torch.bfloat16,
}


class Kind(NamedTuple):
    """A type of tensors. Both functions read blocks uint8 [B, `bytes`].

    Scales are float16 [B, g] ("halves"); float32 [B, g, 2], scales and offsets ("ranges"); the same, scales of 16
    numbers each ("sixteens"); bfloat16 [B, g, 2], the offset is that of code 8 ("shorts").
    """

    numbers: int  # of a block
    bytes: int
    bits: int  # of a code as it is held here
    scales: Scales
    read_codes: Callable[[Tensor], Tensor]  # [B, numbers], int8; uint8 in 4 bits
    read_scales: Callable[[Tensor], Tensor]


class Blocks:
    """A matrix [O, I] in a form of `KINDS`, where it lies in the file, or of `INT4`."""

    def __init__(self, kind: str, raw: Tensor, width: int) -> None:
        """raw uint8 [O, bytes of a row]."""
        self.kind, self.raw, self.width = kind, raw, width
        self.how = INT4 if kind == "int4" else KINDS[kind]
        self.shape = torch.Size((len(raw), width))

    def _blocks(self, rows: slice) -> Tensor:
        return self.raw[rows].reshape(-1, self.how.bytes)

    def codes(self, rows: slice = slice(None)) -> Tensor:
        """[o, I]."""
        return self.how.read_codes(self._blocks(rows)).view(-1, self.width)

    def scales(self, rows: slice = slice(None)) -> Tensor:
        """[o, G] or [o, G, 2], as `Kind.scales` says."""
        scales = self.how.read_scales(self._blocks(rows))
        return scales.reshape(-1, self.width // GROUP, *scales.shape[2:])

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        """float32 [o, I]."""
        codes, scales = self.codes(rows).float(), self.scales(rows).float()
        if self.how.scales == "sixteens":
            return (codes.view(-1, GROUP // 2) * scales.view(-1, 1)).view(-1, self.width)
        groups = codes.view(*scales.shape[:2], GROUP)
        if self.how.scales == "halves":
            return ((groups - (HALF if self.how.bits == 4 else 0)) * scales[..., None]).flatten(1)
        return ((groups - (HALF if self.how.scales == "shorts" else 0)) * scales[..., :1] + scales[..., 1:]).flatten(1)

    def panels(self) -> tuple[Tensor, Tensor]:
        """Codes and scales as the compiled library reads them, with `LANES` outputs side by side (see products.h).

        Codes [O / 16, I / 4, 64], in 4 bits [O / 16, I / 4, 32]; scales [O / 16, G, 16] or [O / 16, G, 2, 16].
        """
        count, groups = -(-len(self.raw) // LANES), self.width // GROUP
        eight = self.how.bits == 8
        codes = torch.empty(count, self.width // 4, 64 if eight else 32, dtype=torch.int8 if eight else torch.uint8)
        shape = (count, groups, LANES) if self.how.scales == "halves" else (count, groups, 2, LANES)
        scales = torch.empty(shape, dtype=_DTYPES[self.how.scales])
        step, mapped = max(1, AT_ONCE // (LANES * self.width)), pages.mapped_files()
        for begin in range(0, count, step):  # in slices, so that what lies between is small
            part, rows = slice(begin, begin + step), slice(LANES * begin, LANES * (begin + step))
            lanes = _whole(self.codes(rows)).view(-1, LANES, self.width // 4, 4).transpose(1, 2).flatten(2)
            codes[part] = lanes if eight else lanes[..., :32] | lanes[..., 32:] << 4
            scales[part] = _whole(self.scales(rows)).view(-1, LANES, *shape[1:-1]).movedim(1, -1)
            pages.release(self.raw[rows], mapped)
        return codes, scales


class Embeddings:
    """Embeddings [V, E] in blocks, where they lie in the file: the rows of a step's tokens are unpacked."""

    device = torch.device("cpu")

    def __init__(self, blocks: Blocks, dtype: torch.dtype) -> None:
        self.blocks, self.dtype, self.shape = blocks, dtype, blocks.shape

    def rows(self, tokens: Tensor) -> Tensor:
        """tokens [N, F] -> [N, F, E]."""
        raw = self.blocks.raw[tokens.flatten()]
        numbers = Blocks(self.blocks.kind, raw, self.blocks.width).numbers()
        return numbers.to(self.dtype).view(*tokens.shape, -1)

    def tensors(self) -> tuple[Tensor, ...]:
        """The bytes of the file."""
        return (self.blocks.raw,)


def _whole(rows: Tensor) -> Tensor:
    """Rows up to the next multiple of `LANES`, with zeros."""
    missing = -len(rows) % LANES
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


class BlocksPlain(Unpacked):
    """Blocks where nothing is compiled: they stay in the file, and are unpacked for each product."""

    def __init__(self, blocks: Blocks, bias: Tensor | None = None, *, coded: bool = False) -> None:
        super().__init__(blocks.shape, bias, coded=coded)
        self.form, self.blocks = f"plain, {blocks.kind}", blocks

    def numbers(self, part: slice) -> Tensor:
        """float32 [o, I]."""
        return self.blocks.numbers(part)

    def tensors(self) -> tuple[Tensor, ...]:
        """The bytes of the file, and the bias."""
        return (self.blocks.raw,) if self.bias is None else (self.blocks.raw, self.bias)


def int4_blocks(weight: Tensor) -> Blocks:
    """weight [O, I] in 4 bits: a block is a scale, a zero, and 16 bytes with the codes of `quantized.int4_codes`."""
    codes, ranges = int4_codes(weight)
    groups = codes.view(torch.uint8).view(len(codes), -1, GROUP)
    bytes_ = [ranges.transpose(0, 1).contiguous().view(torch.uint8), groups[..., :16] | groups[..., 16:] << 4]
    return Blocks("int4", torch.cat(bytes_, -1).flatten(1), weight.shape[1])


def _halves(raw: Tensor) -> Tensor:
    """Bytes of float16 numbers [B, 2 n] -> [B, n]."""
    return raw.contiguous().view(torch.float16)


def _nibbles(raw: Tensor) -> Tensor:
    """[B, 16 or 32] -> uint8 [B, 32 or 64]: the lower halves of all bytes, then the upper ones."""
    return torch.cat([raw & 15, raw >> 4], -1)


def _fifth(raw: Tensor) -> Tensor:
    """Four bytes, each bit of which is the fifth of a code -> 0 or 16, uint8 [B, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((raw[..., None] >> shifts & 1) << 4).flatten(1)


def _six_bits(raw: Tensor) -> Tensor:
    """The first 16 bytes of a block of Q4_K or Q5_K -> scales and offsets f32 [B, 8, 2]."""
    short, packed = _halves(raw[:, :4]).float(), raw[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1)
    least = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
    return torch.stack([short[:, :1] * scale, -short[:, 1:] * least], 2)


def _q5_k_codes(raw: Tensor) -> Tensor:
    high, low = raw[:, 16:48], _nibbles(raw[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    bits = high[:, None] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return (low | bits << 4).flatten(1).to(torch.int8)


def _q6_k_codes(raw: Tensor) -> Tensor:
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    high = raw[:, 128:192].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    return ((low | high << 4).flatten(1).to(torch.int8)) - 32


def _q6_k_scales(raw: Tensor) -> Tensor:
    scales = raw[:, 192:208].contiguous().view(torch.int8).float() * _halves(raw[:, 208:]).float()
    return scales.view(-1, 8, 2)


KINDS = {
    "Q8_0": Kind(
        32, 34, 8, "halves", lambda raw: raw[:, 2:].contiguous().view(torch.int8), lambda raw: _halves(raw[:, :2])
    ),
    "Q4_0": Kind(32, 18, 4, "halves", lambda raw: _nibbles(raw[:, 2:]), lambda raw: _halves(raw[:, :2])),
    "Q4_1": Kind(
        32, 20, 4, "ranges", lambda raw: _nibbles(raw[:, 4:]), lambda raw: _halves(raw[:, :4]).float()[:, None]
    ),
    "Q5_0": Kind(
        32,
        22,
        8,
        "halves",
        lambda raw: (_nibbles(raw[:, 6:]) | _fifth(raw[:, 2:6])).to(torch.int8) - 16,
        lambda raw: _halves(raw[:, :2]),
    ),
    "Q5_1": Kind(
        32,
        24,
        8,
        "ranges",
        lambda raw: (_nibbles(raw[:, 8:]) | _fifth(raw[:, 4:8])).to(torch.int8),
        lambda raw: _halves(raw[:, :4]).float()[:, None],
    ),
    "Q4_K": Kind(256, 144, 4, "ranges", lambda raw: _nibbles(raw[:, 16:].reshape(-1, 4, 32)).flatten(1), _six_bits),
    "Q5_K": Kind(256, 176, 8, "ranges", _q5_k_codes, _six_bits),
    "Q6_K": Kind(256, 210, 8, "sixteens", _q6_k_codes, _q6_k_scales),
}
INT4 = Kind(  # of `--quantize int4`
    32,
    20,
    4,
    "shorts",
    lambda raw: _nibbles(raw[:, 4:]),
    lambda raw: raw[:, :4].contiguous().view(torch.bfloat16)[:, None],
)
