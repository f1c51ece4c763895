"""Weights in blocks, as GGUF files hold them, and in 4 bits: a number is code · scale, or code · scale + offset.

The layouts are those of ggml (github.com/ggml-org/ggml/blob/master/src/ggml-common.h). Nothing is rounded, and a number
takes as many bits of memory as of the file.

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
_EIGHT = torch.arange(8, dtype=torch.uint8)  # made once: each step unpacks the rows of its tokens
_TWOS = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
_SIGNS = torch.tensor([1.0, -1.0], dtype=torch.float16)
Scales = Literal["halves", "ranges", "shorts", "sixes", "sixteens"]  # as products.h numbers them


class Kind(NamedTuple):
    """A type of tensors. Both functions read blocks uint8 [B, `bytes`]."""

    numbers: int  # of a block
    bytes: int
    bits: int  # of a code
    scales: Scales
    halves: slice  # bytes: a scale, or a scale and an offset, of 16 bits each
    read_codes: Callable[[Tensor], Tensor]  # uint8 [B, numbers], from 0 on; int8 in 8 bits
    factors: Callable[[Tensor], Tensor] | None = None  # [B, 8, 2]: what scales and offsets are multiplied by

    @property
    def middle(self) -> int:
        """The code of 0, or of the offset."""
        return 0 if self.bits == 8 or self.scales in ("ranges", "sixes") else 1 << self.bits - 1


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
        """float32 [o, G, 1], or [o, G, 2]: scales and offsets, or the scales of 16 numbers each ("sixteens")."""
        scales, factors = self._short(rows).float(), self._factors(rows)
        return (scales if factors is None else scales * factors.float()).flatten(1, 2)

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        """float32 [o, I]."""
        codes, scales = self.codes(rows).float() - self.how.middle, self.scales(rows)
        if self.how.scales == "sixteens":
            return (codes.view(-1, GROUP // 2) * scales.view(-1, 1)).view(-1, self.width)
        numbers = codes.view(*scales.shape[:2], GROUP) * scales[..., :1]
        return (numbers if scales.shape[2] == 1 else numbers + scales[..., 1:]).flatten(1)

    def _short(self, rows: slice) -> Tensor:
        """Scales and offsets as they lie, 16 bits: [o, blocks of a row, 1, 1 or 2]; offsets of "sixes" are negative."""
        raw = self._blocks(rows)[:, self.how.halves].contiguous()
        short = raw.view(torch.bfloat16 if self.how.scales == "shorts" else torch.float16)
        if self.how.scales == "sixes":
            short = short * _SIGNS
        return short.view(-1, self.width // self.how.numbers, 1, short.shape[1])

    def _factors(self, rows: slice) -> Tensor | None:
        """[o, blocks of a row, 8, 2]."""
        if self.how.factors is None:
            return None
        return self.how.factors(self._blocks(rows)).view(-1, self.width // self.how.numbers, 8, 2)

    def panels(self) -> tuple[Tensor, Tensor]:
        """Codes and scales as the compiled library reads them, with `LANES` outputs side by side (see products.h).

        uint8: codes [O / 16, I / 32, 64 bits], scales [O / 16, blocks of a row, bytes of 16 blocks' scales].
        """
        count, groups, blocks = -(-len(self.raw) // LANES), self.width // GROUP, self.width // self.how.numbers
        step, mapped = max(1, AT_ONCE // (LANES * self.width)), pages.mapped_files()
        codes = torch.empty(count, groups, 64 * self.how.bits, dtype=torch.uint8)
        rest = self.how.bytes - self.how.numbers * self.how.bits // 8  # of a block, beside its codes
        scales = torch.empty(count, blocks, LANES * rest, dtype=torch.uint8)
        for begin in range(0, count, step):  # in slices, so that what lies between is small
            part, rows = slice(begin, begin + step), slice(LANES * begin, LANES * (begin + step))
            lanes = _whole(self.codes(rows)).view(-1, LANES, groups, 8, 4).permute(0, 2, 3, 1, 4).flatten(3)
            codes[part] = lanes.flatten(2).view(torch.uint8) if self.how.bits == 8 else _packed(lanes, self.how.bits)
            scales[part] = torch.cat(self._side_by_side(rows), -1)
            pages.release(self.raw[rows], mapped)
        return codes, scales

    def _side_by_side(self, rows: slice) -> list[Tensor]:
        """Parts of the scales of `LANES` outputs, uint8 [o / 16, blocks of a row, …]."""
        short, factors = _beside(self._short(rows)).view(torch.uint8), self._factors(rows)
        if factors is None:
            return [short]
        wide = _beside(factors)
        if self.how.scales == "sixteens":
            return [wide.view(torch.uint8), short]
        packed = _packed(wide.view(*wide.shape[:2], 4, 64), 6)
        return [packed[..., :64], short, packed[..., 64:]]


def _beside(rows: Tensor) -> Tensor:
    """[o, …, a, b] -> [o / 16, …, a · b · 16], lanes last."""
    return _whole(rows).view(-1, LANES, *rows.shape[1:]).movedim(1, -1).flatten(-3).contiguous()


def _packed(codes: Tensor, bits: int) -> Tensor:
    """codes uint8 [M, G, q, 64] -> uint8 [M, G, 8 q bits]: as `codes_of` of lanes.h unpacks them."""
    more = bits - 4
    parts = [codes[..., :32] & 15 | codes[..., 32:] << 4]
    if more:
        shifts = torch.arange(0, 8, more, dtype=torch.uint8)[:, None]
        high = codes.view(*codes.shape[:2], -1, len(shifts), 64)
        parts.insert(0, (high >> 4 << shifts).sum(3, dtype=torch.uint8))
    return torch.cat([part.flatten(2) for part in parts], -1)


class Embeddings:
    """Embeddings [V, E] in blocks or 16 bits, where they lie in the file: the rows of a step's tokens are unpacked."""

    device = torch.device("cpu")

    def __init__(self, held: Blocks | Tensor, dtype: torch.dtype) -> None:
        self.held, self.dtype, self.shape = held, dtype, held.shape

    def rows(self, tokens: Tensor) -> Tensor:
        """tokens [N, F] -> [N, F, E]."""
        if isinstance(self.held, Tensor):
            return torch.nn.functional.embedding(tokens, self.held).to(self.dtype)
        raw = self.held.raw[tokens.flatten()]
        numbers = Blocks(self.held.kind, raw, self.held.width).numbers()
        return numbers.to(self.dtype).view(*tokens.shape, -1)

    def tensors(self) -> tuple[Tensor, ...]:
        """The bytes of the file."""
        return (self.held if isinstance(self.held, Tensor) else self.held.raw,)


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


def _nibbles(raw: Tensor) -> Tensor:
    """[B, 16 or 32] -> uint8 [B, 32 or 64]: the lower halves of all bytes, then the upper ones."""
    return torch.cat([raw & 15, raw >> 4], -1)


def _fifth(raw: Tensor) -> Tensor:
    """Four bytes, each bit of which is the fifth of a code -> 0 or 16, uint8 [B, 32]."""
    return ((raw[..., None] >> _EIGHT & 1) << 4).flatten(1)


def _six_bits(raw: Tensor) -> Tensor:
    """Blocks of Q4_K or Q5_K -> factors of scales and of offsets, uint8 [B, 8, 2]."""
    low, middle, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scale = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1)
    least = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
    return torch.stack([scale, least], 2)


def _q5_k_codes(raw: Tensor) -> Tensor:
    high, low = raw[:, 16:48], _nibbles(raw[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    bits = high[:, None] >> _EIGHT[:, None] & 1
    return (low | bits << 4).flatten(1)


def _q6_k_codes(raw: Tensor) -> Tensor:
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    high = raw[:, 128:192].reshape(-1, 2, 1, 32) >> _TWOS & 3
    return (low | high << 4).flatten(1)


_FIRST, _PAIR = slice(0, 2), slice(0, 4)
KINDS = {
    "Q8_0": Kind(32, 34, 8, "halves", _FIRST, lambda raw: raw[:, 2:].contiguous().view(torch.int8)),
    "Q4_0": Kind(32, 18, 4, "halves", _FIRST, lambda raw: _nibbles(raw[:, 2:])),
    "Q4_1": Kind(32, 20, 4, "ranges", _PAIR, lambda raw: _nibbles(raw[:, 4:])),
    "Q5_0": Kind(32, 22, 5, "halves", _FIRST, lambda raw: _nibbles(raw[:, 6:]) | _fifth(raw[:, 2:6])),
    "Q5_1": Kind(32, 24, 5, "ranges", _PAIR, lambda raw: _nibbles(raw[:, 8:]) | _fifth(raw[:, 4:8])),
    "Q4_K": Kind(
        256, 144, 4, "sixes", _PAIR, lambda raw: _nibbles(raw[:, 16:].reshape(-1, 4, 32)).flatten(1), _six_bits
    ),
    "Q5_K": Kind(256, 176, 5, "sixes", _PAIR, _q5_k_codes, _six_bits),
    "Q6_K": Kind(
        *(256, 210, 6, "sixteens", slice(208, 210), _q6_k_codes),
        lambda raw: raw[:, 192:208].contiguous().view(torch.int8).view(-1, 8, 2),
    ),
}
INT4 = Kind(32, 20, 4, "shorts", _PAIR, lambda raw: _nibbles(raw[:, 4:]))  # of `--quantize int4`
