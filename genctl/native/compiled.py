"""Weights for the compiled products.

float32, bfloat16 and float16 weights are used as stored, [O, I] or transposed. 8-bit weights are made here (see
`quantized`), and 4-bit ones, which are put side by side like the blocks of GGUF files (see `blocks`).

N rows, I features in, O features out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from genctl.kernels.library import TYPES, Library

if TYPE_CHECKING:
    from genctl.native.blocks import Blocks

_PLAIN, _ACROSS, _CODES8, _BLOCKS8, _BLOCKS4 = range(5)  # forms of products.h
_SCALES = {"halves": 0, "ranges": 1, "sixteens": 2, "shorts": 3}  # as in products.h
MOST_TOGETHER = 4  # as in products.h


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

    is_compiled = True

    def __init__(
        self, library: Library, weight: Tensor | Blocks, bias: Tensor | None = None, quantize: str | None = None
    ) -> None:
        """weight [O, I] of a type in `TYPES`; `quantize` is None, "int8" or "int4" (I a multiple of 32).

        Blocks keep their own form.
        """
        self.call, self.size = library.products, weight.shape[0]
        fields = _Weight(in_=weight.shape[1], out=weight.shape[0])
        held: tuple[Tensor, ...]
        if quantize == "int4" and isinstance(weight, Tensor):
            from genctl.native.blocks import int4_blocks

            weight = int4_blocks(weight)
        if not isinstance(weight, Tensor):
            form = weight.kind
            codes, scales = weight.panels()
            held = (codes, scales)
            fields.form, fields.type = _BLOCKS8 if weight.how.bits == 8 else _BLOCKS4, _SCALES[weight.how.scales]
            fields.w = codes.data_ptr()
            fields.range = fields.scale = scales.data_ptr()  # the library reads one of them
        elif quantize == "int8":
            from genctl.native.quantized import int8_codes

            codes, scales = int8_codes(weight)
            scales /= 127  # x is quantised to 127 steps, too, and scaled by its largest number
            held = (codes, scales)
            fields.form, fields.w, fields.scale = _CODES8, codes.data_ptr(), scales.data_ptr()
            form = quantize
        else:
            form = str(weight.dtype).removeprefix("torch.")
            across = not weight.is_contiguous() and weight.t().is_contiguous()
            lies = weight if across else weight.contiguous()
            held = (lies,)
            fields.form, fields.type, fields.w = _ACROSS if across else _PLAIN, TYPES[weight.dtype], lies.data_ptr()
        self.form = f"{form} by {library.variant}"
        self.held = held if bias is None else (*held, bias)
        self.wide_bias = None if bias is None else bias.float().contiguous()
        if self.wide_bias is not None:
            fields.bias = self.wide_bias.data_ptr()
        self.fields = fields
        self.together = CompiledProducts([self])

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O] of the same type."""
        return self.together(x)

    def tensors(self) -> tuple[Tensor, ...]:
        """The weight in its form, and the bias."""
        return self.held


class CompiledProducts:
    """Products of the same x in one call, with their outputs side by side: x is widened or quantised once."""

    def __init__(self, parts: Sequence[CompiledProduct]) -> None:
        """`parts` have weights of one form."""
        # not the parts, because a part may hold this object
        self.held = [(part.fields, part.held, part.wide_bias) for part in parts]
        self.call, self.count = parts[0].call, len(parts)
        self.size = sum(part.size for part in parts)
        self.width = parts[0].fields.in_
        self.addresses = (ctypes.c_void_p * len(parts))(*(ctypes.addressof(part.fields) for part in parts))

    @staticmethod
    def fits(parts: Sequence[object]) -> bool:
        """Whether one call computes all of them."""
        forms = {(part.fields.form, part.fields.type) if isinstance(part, CompiledProduct) else None for part in parts}
        return len(parts) <= MOST_TOGETHER and len(forms) == 1 and None not in forms

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O1 + O2 + …] of the same type. Raises ValueError for another width."""
        if x.shape[-1] != self.width:
            raise ValueError(f"x has {x.shape[-1]} features, the weight {self.width}")
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.size))
        rows, type_ = y.numel() // self.size, TYPES[x.dtype]
        threads = torch.get_num_threads()
        self.call(self.addresses, self.count, x.data_ptr(), y.data_ptr(), rows, type_, threads)
        return y
