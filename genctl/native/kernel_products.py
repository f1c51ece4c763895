"""Products on a GPU: by a Triton kernel (see `kernel_decoder`), or by torch where the kernels do not compute a decoder.

Weights in 8 and 4 bits have the codes and
scales that they have on the CPU, and x is rounded as there.

A kernel's product is cut into tiles and pieces by kind and shape of its weight alone, so the sums of a row have one
order for any number of rows.

N rows, I features in, O features out, G = I / 32 groups.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from genctl.native.quantized import GROUP, Int8Plain, Unpacked, int4_codes


class KernelProduct:
    """y = x Wᵀ + b with a weight in the type of x."""

    is_compiled = False
    kind = "floats"  # the FORM of the kernels
    by_kernels = True
    scales: Tensor | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [O, I]."""
        self.weight, self.bias = weight.contiguous(), bias
        self.wide_bias = None if bias is None else bias.float().contiguous()
        self.size, self.width = weight.shape
        self.form = f"{str(weight.dtype).removeprefix('torch.')} by kernels"

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        return F.linear(x, self.weight, self.bias)

    def tensors(self) -> tuple[Tensor, ...]:
        """Weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class Int8Product(Int8Plain):
    """Weights in 8 bits: codes int8 [O, I], scales f32 [O]."""

    kind = "int8"

    def __init__(self, weight: Tensor, bias: Tensor | None, *, by_kernels: bool) -> None:
        """weight [O, I]."""
        super().__init__(weight, bias)
        self.weight, self.by_kernels = self.codes, by_kernels
        self.wide_bias = None if bias is None else bias.float().contiguous()
        self.size, self.width = weight.shape
        self.form = "int8 by kernels" if by_kernels else "int8 by torch"


class Int4Product(Unpacked):
    """Weights in 4 bits: uint8 [O, G / 2, 32], where a byte has a code of a group and, above it, one of the next group.

    scales int32 [O, G]: two bfloat16 numbers, a scale and above it a zero.
    """

    kind = "int4"

    def __init__(self, weight: Tensor, bias: Tensor | None, *, by_kernels: bool) -> None:
        """weight [O, I]; I is a multiple of 32."""
        super().__init__(weight.shape, bias, weight.device, coded=True)
        self.weight, self.scales = _packed(*int4_codes(weight))
        self.wide_bias = None if bias is None else bias.float().contiguous()
        self.by_kernels = by_kernels
        self.form = "int4 by kernels" if by_kernels else "int4 by torch"

    def numbers(self, part: slice) -> Tensor:
        """float32 [o, I]."""
        bytes_ = self.weight[part]
        codes = torch.stack([bytes_ & 15, bytes_ >> 4], 2).flatten(1, 2)[:, : self.width // GROUP].float()
        scale, zero = self.scales[part].view(torch.bfloat16).float().view(*codes.shape[:2], 2, 1).unbind(2)
        return ((codes - 8) * scale + zero).flatten(1)

    def tensors(self) -> tuple[Tensor, ...]:
        """Codes, scales and bias."""
        held = (self.weight, self.scales)
        return held if self.bias is None else (*held, self.bias)


Product: TypeAlias = KernelProduct | Int8Product | Int4Product


def quantized(kind: str, weight: Tensor, bias: Tensor | None, *, by_kernels: bool) -> Int8Product | Int4Product:
    """weight [O, I] in "int8" or "int4"; in 8 bits also where I is no multiple of 32."""
    made = Int4Product if kind == "int4" and weight.shape[1] % GROUP == 0 else Int8Product
    return made(weight, bias, by_kernels=by_kernels)


def _packed(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """What `int4_codes` returns -> uint8 [O, G / 2, 32], int32 [O, G]."""
    groups = codes.view(torch.uint8).view(len(codes), -1, GROUP)
    if groups.shape[1] % 2:
        groups = torch.cat([groups, torch.zeros_like(groups[:, :1])], 1)
    bytes_ = groups[:, ::2] | groups[:, 1::2] << 4
    return bytes_, scales.transpose(0, 1).flatten().view(torch.int32).view(len(codes), -1)


# Chosen by measuring on an H100. Sums are cut where there are too few tiles of outputs for the processors of a GPU.
TOKENS, OUTPUTS = 16, 64  # of a tile of a product: wider tiles have other bits
PROGRAMS, LEAST_PIECE = 128, 512
INPUTS, STAGES = 256, 3  # of a tile, at most, and tiles that are loaded at once
GATED_INPUTS, GATED_STAGES = 128, 5  # with two weights
# Not measured yet: a processor computes more for each byte of these weights, by the instructions that were counted
ROUNDED_PROGRAMS = 2 * PROGRAMS
ROUNDED = {"int8": (256, 3), "int4": (256, 5)}  # two programs or more fit a processor, where one does above
GATED_ROUNDED = {"int8": (128, 4), "int4": (256, 4)}
BYTES = {"int8": 1.0, "int4": 0.5}  # of a weight
TIMES = {"floats": 4, "int8": 4, "int4": 1}  # tiles of tokens of a program, where many are read; not measured


class Tile(NamedTuple):
    """How a product is cut: sizes of a tile, pieces of its sum, and tiles that are loaded at once.

    A program has `times` tiles of tokens. That and `stages` change no bit.
    """

    outputs: int
    tokens: int
    inputs: int
    splits: int
    piece: int  # inputs of a piece
    stages: int
    times: int


def outputs_of(product: Product) -> int:
    """Of a tile: x is rounded for each."""
    return 2 * OUTPUTS if product.kind == "int4" else OUTPUTS


def cut(
    product: Product, tiles: int, outputs: int, *, x_bytes: int, shared: int, many: bool, gated: bool = False
) -> Tile:
    """`tiles` tiles of `outputs`; `x_bytes` are those of a number of x, `shared` those of memory that a program has.

    `many` tokens share what is read of a weight.
    """
    width, kind = product.width, product.kind
    if kind == "floats":
        most, stages = (GATED_INPUTS, GATED_STAGES) if gated else (INPUTS * OUTPUTS // outputs, STAGES)
        most, bytes_, programs, tokens, least = 2 * most // x_bytes, float(x_bytes), PROGRAMS, TOKENS, 32
    else:
        most, stages = (GATED_ROUNDED if gated else ROUNDED)[kind]
        most = most * 2 * OUTPUTS // max(2 * OUTPUTS, outputs)
        bytes_, programs = BYTES[kind], ROUNDED_PROGRAMS
        tokens, least = (TOKENS // 2, 64) if kind == "int4" else (TOKENS, 32)  # a pair of groups at least
    sizes = [size for size in (256, 128, 64, 32) if least <= size <= max(least, most)]
    inputs = next(size for size in sizes if not width % size or size == least)
    splits = max(1, min(programs // tiles, width // LEAST_PIECE))
    piece = -(-width // (splits * inputs)) * inputs
    times = TIMES[kind] if many else 1
    size = ((2 if gated else 1) * outputs * bytes_ + times * tokens * x_bytes) * inputs
    return Tile(outputs, tokens, inputs, -(-width // piece), piece, max(1, min(stages, int(shared // size))), times)
