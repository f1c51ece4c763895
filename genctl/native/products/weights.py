"""Weights for the compiled products.

float32, bfloat16 and float16 are read as they lie, [O, I] or transposed. 8 and 4 bits are made here (`quantized`).

N rows, I features in, O features out.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch
from torch import Tensor

from genctl.native import quantized
from genctl.native.kernels import GROUP
from genctl.native.products.library import TYPES, Library

_PLAIN, _ACROSS, _CODES8, _CODES4 = range(4)  # forms of products.h


class _Weight(ctypes.Structure):
    """`Weight` of products.h."""

    _fields_: ClassVar[Any] = [
        ("form", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("in_", ctypes.c_int64),
        ("out", ctypes.c_int64),
        ("w", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("range", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class CompiledProduct:
    """y = x Wᵀ + b by the library: a row has the same bits alone and among others, with any number of threads."""

    def __init__(
        self, library: Library, weight: Tensor, bias: Tensor | None = None, quantize: str | None = None
    ) -> None:
        """weight [O, I] of a type in `TYPES`; `quantize` is None, "int8" or "int4" (I a multiple of 32)."""
        self.call, self.size = library.product, weight.shape[0]
        self.form = f"{quantize or str(weight.dtype).removeprefix('torch.')} by {library.variant}"
        self.copies = quantize is not None
        fields = _Weight(in_=weight.shape[1], out=weight.shape[0])
        held: tuple[Tensor, ...]
        if quantize == "int8":
            codes, scales = quantized.int8_codes(weight)
            scales /= 127  # x is quantised to 127 steps, too, and scaled by its largest number
            held = (codes, scales)
            fields.form, fields.w, fields.scale = _CODES8, codes.data_ptr(), scales.data_ptr()
        elif quantize == "int4":
            codes, ranges = _nibbles(weight)
            held = (codes, ranges)
            fields.form, fields.w, fields.range = _CODES4, codes.data_ptr(), ranges.data_ptr()
        else:
            across = not weight.is_contiguous() and weight.t().is_contiguous()
            lies = weight if across else weight.contiguous()
            held = (lies,)
            fields.form, fields.type, fields.w = _ACROSS if across else _PLAIN, TYPES[weight.dtype], lies.data_ptr()
        self.held = held if bias is None else (*held, bias)
        self.wide_bias = None if bias is None else bias.float().contiguous()
        if self.wide_bias is not None:
            fields.bias = self.wide_bias.data_ptr()
        self.fields, self.address = fields, ctypes.addressof(fields)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O] of the same type."""
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.size))
        rows = y.numel() // self.size
        self.call(self.address, x.data_ptr(), y.data_ptr(), rows, TYPES[x.dtype], torch.get_num_threads())
        return y

    def tensors(self) -> tuple[Tensor, ...]:
        """The weight in its form, and the bias."""
        return self.held


def _nibbles(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [O, I] -> codes uint8 [O, I / 64, 32], ranges bfloat16 [O, 2, I / 32]; I is rounded up to 64.

    A byte holds number k of a group of 32 in its lower half, and number k of the next group in its upper half.
    """
    codes, scales = quantized.int4_codes(weight)  # [O, I], [I / 32, O, 2]
    size, width = codes.shape
    full = -(-width // (2 * GROUP))
    ranges = torch.zeros(size, 2, 2 * full, dtype=torch.bfloat16)
    ranges[:, :, : width // GROUP] = scales.permute(1, 2, 0)
    packed = torch.zeros(size, full, GROUP, dtype=torch.uint8)
    groups = codes.view(size, -1, GROUP)
    packed |= groups[:, ::2].to(torch.uint8)
    packed[:, : groups.shape[1] // 2] |= groups[:, 1::2].to(torch.uint8) << 4
    return packed, ranges


def int4_bytes(size: int, width: int) -> int:
    """Bytes of a weight [O, I] in 4 bits: of 64 numbers, 32 bytes of codes, and two scales and zeros of 2 bytes."""
    return size * -(-width // (2 * GROUP)) * (GROUP + 8)
