"""Block-quantised weights, of GGUF files and of `--quantize int4`: weight = code · scale, or code · scale + offset.

GGUF layouts are those of ggml (github.com/ggml-org/ggml/blob/master/src/ggml-common.h). Nothing is rounded again, and
a weight takes as many bits in memory as in the file.

`GgufFile` maps such a file. O features out, I features in, G = I / 32, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from genctl.kernels import ops
from genctl.native import pages
from genctl.native.pages import DTYPES
from genctl.native.plan import GgufTensors
from genctl.native.quantized import AT_ONCE, GROUP, Unpacked, int4_codes

LANES = 16  # outputs that are interleaved
_EIGHT = torch.arange(8, dtype=torch.uint8)  # a constant: each step unpacks the rows of its tokens
_TWOS = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
_SIGNS = torch.tensor([1.0, -1.0], dtype=torch.float16)
Scales = Literal["halves", "ranges", "shorts", "sixes", "sixteens"]  # as products.h numbers them


class Kind(NamedTuple):
    """A block format. `low`, `high` and `halves` are byte offsets of parts in a block (`Layout` of products.h)."""

    numbers: int  # of a block
    bytes: int
    bits: int  # of a code
    scales: Scales
    low: int  # the lower four bits of the codes, or all eight
    high: int  # the upper bits of the codes
    halves: int  # a scale, or a scale and an offset, of 16 bits each

    @property
    def middle(self) -> int:
        """The value subtracted from a code before it is scaled."""
        return 0 if self.bits == 8 or self.scales in ("ranges", "sixes") else 1 << self.bits - 1

    def codes(self, raw: Tensor) -> Tensor:
        """Blocks uint8 [B, `bytes`] -> unsigned codes uint8 [B, `numbers`]; signed int8 if they have 8 bits."""
        if self.bits == 8:
            return raw[:, self.low :].contiguous().view(torch.int8)
        run = 16 if self.numbers == GROUP else 64 if self.bits == 6 else 32  # bytes: low halves first, then high
        pairs = raw[:, self.low : self.low + self.numbers // 2].reshape(-1, self.numbers // 2 // run, run)
        codes = torch.cat([pairs & 15, pairs >> 4], -1).flatten(1)
        if self.bits == 4:
            return codes
        high = raw[:, self.high : self.high + self.numbers * (self.bits - 4) // 8]
        if self.bits == 6:
            above = high.reshape(-1, 2, 1, 32) >> _TWOS & 3
        elif self.numbers == GROUP:
            above = high[..., None] >> _EIGHT & 1
        else:
            above = high[:, None] >> _EIGHT[:, None] & 1
        return codes | above.flatten(1) << 4

    def factors(self, raw: Tensor) -> Tensor | None:
        """Factors of a block's scale and offset, or of the scales of 16 numbers each, [B, 8, 2]; None without any."""
        if self.scales == "sixteens":
            return raw[:, 192:208].contiguous().view(torch.int8).view(-1, 8, 2)
        if self.scales != "sixes":
            return None
        low, middle, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
        scale = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1)
        least = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
        return torch.stack([scale, least], 2)


class Blocks:
    """A matrix [O, I] in a format of `KINDS`, mapped from the file, or in `INT4`."""

    def __init__(self, kind: str, raw: Tensor, width: int) -> None:
        """raw uint8 [O, bytes of a row]."""
        self.kind, self.raw, self.width = kind, raw, width
        self.how = INT4 if kind == "int4" else KINDS[kind]
        self.shape = torch.Size((len(raw), width))

    def codes(self, rows: slice = slice(None)) -> Tensor:
        """[o, I]."""
        return self.how.codes(self.raw[rows].reshape(-1, self.how.bytes)).view(-1, self.width)

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
        """The stored 16-bit scales and offsets: [o, blocks of a row, 1, 1 or 2]; offsets of "sixes" are negated."""
        size = 2 if self.how.scales in ("halves", "sixteens") else 4
        raw = self.raw[rows].reshape(-1, self.how.bytes)[:, self.how.halves : self.how.halves + size].contiguous()
        short = raw.view(torch.bfloat16 if self.how.scales == "shorts" else torch.float16)
        if self.how.scales == "sixes":
            short = short * _SIGNS
        return short.view(-1, self.width // self.how.numbers, 1, short.shape[1])

    def _factors(self, rows: slice) -> Tensor | None:
        """[o, blocks of a row, 8, 2]."""
        factors = self.how.factors(self.raw[rows].reshape(-1, self.how.bytes))
        return None if factors is None else factors.view(-1, self.width // self.how.numbers, 8, 2)

    def panels(self) -> tuple[Tensor, Tensor]:
        """Codes and scales in the compiled library's layout, with `LANES` outputs interleaved (see products.h).

        uint8: codes [O / 16, I / 32, 64 bits], scales [O / 16, blocks of a row, bytes of 16 blocks' scales].
        """
        count, groups, blocks = -(-len(self.raw) // LANES), self.width // GROUP, self.width // self.how.numbers
        step, mapped = max(1, AT_ONCE // (LANES * self.width)), pages.mapped_files()
        codes = torch.empty(count, groups, 64 * self.how.bits, dtype=torch.uint8)
        rest = self.how.bytes - self.how.numbers * self.how.bits // 8  # of a block, beside its codes
        scales = torch.empty(count, blocks, LANES * rest, dtype=torch.uint8)
        for begin in range(0, count, step):  # in slices, to keep temporaries small
            part, rows = slice(begin, begin + step), slice(LANES * begin, LANES * (begin + step))
            lanes = _whole(self.codes(rows)).view(-1, LANES, groups, 8, 4).permute(0, 2, 3, 1, 4).flatten(3)
            codes[part] = lanes.flatten(2).view(torch.uint8) if self.how.bits == 8 else _packed(lanes, self.how.bits)
            scales[part] = torch.cat(self._side_by_side(rows), -1)
            pages.release(self.raw[rows], mapped)
        return codes, scales

    def _side_by_side(self, rows: slice) -> list[Tensor]:
        """Parts of the scales, interleaved over `LANES` outputs, uint8 [o / 16, blocks of a row, …]."""
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
    """codes uint8 [M, G, q, 64] -> uint8 [M, G, 8 q bits], the layout that `codes_of` of lanes.h unpacks."""
    more = bits - 4
    parts = [codes[..., :32] & 15 | codes[..., 32:] << 4]
    if more:
        shifts = torch.arange(0, 8, more, dtype=torch.uint8)[:, None]
        high = codes.view(*codes.shape[:2], -1, len(shifts), 64)
        parts.insert(0, (high >> 4 << shifts).sum(3, dtype=torch.uint8))
    return torch.cat([part.flatten(2) for part in parts], -1)


class Embeddings:
    """Embeddings [V, E] in blocks or 16 bits, mapped from the file; only the rows of a step's tokens are unpacked."""

    device = torch.device("cpu")

    def __init__(self, held: Blocks | Tensor, dtype: torch.dtype) -> None:
        self.held, self.dtype, self.shape = held, dtype, held.shape
        if isinstance(held, Blocks):
            how, scales = held.how, get_args(Scales).index(held.how.scales)
            self.layout = ops.Layout(how.numbers, how.bytes, how.bits, scales, how.low, how.high, how.halves)

    def rows(self, tokens: Tensor) -> Tensor:
        """tokens [N, F] -> [N, F, E]."""
        if isinstance(self.held, Tensor):
            return torch.nn.functional.embedding(tokens, self.held).to(self.dtype)
        found, held = ops.library(), self.held
        if found is None:
            numbers = Blocks(held.kind, held.raw[tokens.flatten()], held.width).numbers()
        else:
            numbers = ops.unpack(found, self.layout, held.raw, tokens, held.width)
        return numbers.to(self.dtype).view(*tokens.shape, -1)

    def tensors(self) -> tuple[Tensor, ...]:
        """The bytes or 16-bit numbers of the file."""
        return (self.held if isinstance(self.held, Tensor) else self.held.raw,)


def _whole(rows: Tensor) -> Tensor:
    """Pad with rows of zeros to the next multiple of `LANES`."""
    missing = -len(rows) % LANES
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


class BlocksPlain(Unpacked):
    """Blocks without the compiled library: they stay mapped, and are unpacked for each product."""

    def __init__(self, blocks: Blocks, bias: Tensor | None = None, *, coded: bool = False) -> None:
        super().__init__(blocks.shape, bias, coded=coded)
        self.form, self.blocks, self.held = f"plain, {blocks.kind}", blocks, (blocks.raw,)

    def numbers(self, part: slice) -> Tensor:
        """float32 [o, I]."""
        return self.blocks.numbers(part)


def int4_blocks(weight: Tensor) -> Blocks:
    """weight [O, I] in 4 bits: a block is a scale, a zero, and 16 bytes with the codes of `quantized.int4_codes`."""
    codes, ranges = int4_codes(weight)
    groups = codes.view(torch.uint8).view(len(codes), -1, GROUP)
    bytes_ = [ranges.transpose(0, 1).contiguous().view(torch.uint8), groups[..., :16] | groups[..., 16:] << 4]
    return Blocks("int4", torch.cat(bytes_, -1).flatten(1), weight.shape[1])


KINDS = {
    "Q8_0": Kind(32, 34, 8, "halves", low=2, high=0, halves=0),
    "Q4_0": Kind(32, 18, 4, "halves", low=2, high=0, halves=0),
    "Q4_1": Kind(32, 20, 4, "ranges", low=4, high=0, halves=0),
    "Q5_0": Kind(32, 22, 5, "halves", low=6, high=2, halves=0),
    "Q5_1": Kind(32, 24, 5, "ranges", low=8, high=4, halves=0),
    "Q4_K": Kind(256, 144, 4, "sixes", low=16, high=0, halves=0),
    "Q5_K": Kind(256, 176, 5, "sixes", low=48, high=16, halves=0),
    "Q6_K": Kind(256, 210, 6, "sixteens", low=0, high=128, halves=208),
}
INT4 = Kind(32, 20, 4, "shorts", low=4, high=0, halves=0)  # of `--quantize int4`


class GgufFile:
    """A GGUF file of one or several parts. Its header has been checked (see `models.gguf`).

    `check_tensor` is called once with each name and tensor, and may raise; for blocks it gets the scales.
    """

    def __init__(
        self, files: Sequence[Path], tensors: GgufTensors, check_tensor: Callable[[str, Tensor], object] | None = None
    ) -> None:
        self.tensors, self.check_tensor = tensors, check_tensor
        self.checked: set[str] = set()
        self.memory = [pages.memory_of(path) for path in files]

    def blocks(self, name: str) -> Blocks | None:
        """A matrix in a format of `KINDS`; None for any other tensor."""
        place = self.tensors.places[name]
        if place.dtype not in KINDS or len(place.shape) != 2:
            return None
        raw = self._bytes(place).view(place.shape[0], -1)
        blocks = Blocks(place.dtype, self._in_halves(name, raw), place.shape[1])
        self._look(name, blocks.scales)
        return blocks

    def matrix(self, name: str) -> Blocks | Tensor | None:
        """A matrix as stored, in a format of `KINDS` or in 16 bits; None for any other tensor."""
        place = self.tensors.places[name]
        if place.dtype in ("F16", "BF16") and len(place.shape) == 2:
            return self.tensor(name)
        return self.blocks(name)

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored if it holds floating-point numbers; else unpacked to float32."""
        place = self.tensors.places[name]
        if place.dtype in DTYPES:
            found = self._bytes(place).view(DTYPES[place.dtype]).view(place.shape)
        elif (blocks := self.blocks(name)) is not None:
            return blocks.numbers()
        else:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize

            raw = self._bytes(place).view(*place.shape[:-1], -1)
            found = torch.from_numpy(dequantize(raw.numpy(), GGMLQuantizationType[place.dtype])).view(place.shape)
        self._look(name, lambda: found)
        found = self._in_halves(name, found)
        return found.float() - 1 if self.tensors.from_one and name.endswith("_norm.weight") else found

    def _bytes(self, place: Any) -> Tensor:
        """uint8 [bytes of a tensor]; a copy if the tensor is not aligned in the file."""
        memory, begin, end = self.memory[place.part], place.begin, place.end
        if begin % 4 or begin == end:
            return torch.frombuffer(bytearray(memory[begin:end]) or bytearray(1), dtype=torch.uint8)[: end - begin]
        return torch.frombuffer(memory, dtype=torch.uint8, count=end - begin, offset=begin)

    def _in_halves(self, name: str, rows: Tensor) -> Tensor:
        """Permute rows of queries or keys from interleaved pairs to pairs half a head apart; others are unchanged."""
        heads = self.tensors.neighbours.get(name)
        if heads is None:
            return rows
        turned, rest = rows.tensor_split([heads * self.tensors.head_dim])
        pairs = turned.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(turned.shape)
        in_halves = torch.cat([pairs, rest]) if len(rest) else pairs
        pages.release(rows, pages.mapped_files())
        return in_halves

    def _look(self, name: str, numbers: Callable[[], Tensor]) -> None:
        if self.check_tensor is not None and name not in self.checked:
            self.checked.add(name)
            self.check_tensor(name, numbers())
