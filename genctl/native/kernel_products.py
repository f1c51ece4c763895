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


# Chosen by measuring on an H100 and an H200. Sums are cut where there are too few tiles of outputs for a GPU.
TOKENS, OUTPUTS = 16, 64  # of a tile of a product
PROGRAMS, LEAST_PIECE = {"floats": 128, "int8": 128, "int4": 384}, 512
# tiles of tokens of a program, and sums of all of them, at most
MOST_TIMES, MOST_SUMS = 8, 128 * 128
# inputs of a tile, at most, and tiles that are loaded at once: with two weights, and of more tokens than four tiles
LOADED = {"floats": (256, 3), "int8": (256, 6), "int4": (256, 5)}
LOADED_GATED = {"floats": (128, 5), "int8": (256, 3), "int4": (256, 4)}
LOADED_MANY = {"floats": (64, 4), "int8": (128, 4), "int4": (128, 4)}
BYTES = {"int8": 1.0, "int4": 0.5}  # of a weight


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


def cut(product: Product, tiles: int, outputs: int, *, x_bytes: int, shared: int, count: int, gated: bool) -> Tile:
    """`tiles` tiles of `outputs`, for `count` tokens.

    `x_bytes` are those of a number of x, `shared` those of memory that a program has.
    """
    width, kind = product.width, product.kind
    least = 64 if kind == "int4" else 32  # a pair of groups
    most, stages = (LOADED_GATED if gated else LOADED)[kind]
    if kind == "floats":
        most = 2 * most // x_bytes  # what fits; the interpreter's tests have float32
    most = most if gated else most * OUTPUTS // outputs
    inputs = _inputs(width, least, most)
    splits = max(1, min(PROGRAMS[kind] // tiles, width // LEAST_PIECE))
    piece = -(-width // (splits * inputs)) * inputs
    times = min(MOST_TIMES, MOST_SUMS // (outputs * TOKENS), power(-(-count // TOKENS)))
    if count > 4 * TOKENS:
        most, stages = LOADED_MANY[kind]
        inputs = min(inputs, _inputs(width, least, most))
    bytes_ = BYTES.get(kind, float(x_bytes))
    size = ((2 if gated else 1) * outputs * bytes_ + times * TOKENS * x_bytes) * inputs
    return Tile(outputs, TOKENS, inputs, -(-width // piece), piece, max(1, min(stages, int(shared // size))), times)


def _inputs(width: int, least: int, most: int) -> int:
    """Of a tile, from `least` to `most`: the most that divide the width of a weight."""
    sizes = [size for size in (256, 128, 64, 32) if least <= size <= max(least, most)]
    return next(size for size in sizes if not width % size or size == least)


def power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()
