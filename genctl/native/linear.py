"""Matrix products y = x Wᵀ + b for every form of weights.

The compiled library uses float32, bfloat16 and float16 weights as stored in the file, [O, I] or transposed, for one row
and for many. Weights are quantised to 8 or 4 bits while the file is read (see `quantized`); 4-bit weights are laid out
like the blocks of GGUF files (see `blocks`), which are not requantised. Without the library, torch multiplies.

N rows, F tokens fed to each, I features in, O features out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from genctl.kernels.ops import TYPES, Library, library
from genctl.native import pages

if TYPE_CHECKING:
    from genctl.native.blocks import Blocks


_PLAIN, _IN_OUT, _CODES8 = range(3)  # forms of products.h; the form of blocks is their number of bits
_SCALES = {"halves": 0, "ranges": 1, "shorts": 2, "sixes": 3, "sixteens": 4}  # as in products.h
MOST_TOGETHER = 4  # as in products.h


class _Weight(ctypes.Structure):
    """`Weight` of products.h."""

    _fields_: ClassVar[Any] = [
        *[(name, ctypes.c_int32) for name in ("form", "type")],
        *[(name, ctypes.c_int64) for name in ("in_", "out")],
        *[(name, ctypes.c_void_p) for name in ("w", "scale", "range", "bias")],
    ]


class CompiledProduct:
    """y = x Wᵀ + b by the library. A row's result is bit-identical for any batch and any number of threads."""

    is_compiled = True

    def __init__(
        self, library: Library, weight: Tensor | Blocks, bias: Tensor | None = None, quantize: str | None = None
    ) -> None:
        """weight [O, I] of a type in `TYPES`; `quantize` is None, "int8" or "int4" (I a multiple of 32).

        Blocks are not quantised again.
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
            fields.form, fields.type = weight.how.bits, _SCALES[weight.how.scales]
            fields.w, fields.range = codes.data_ptr(), scales.data_ptr()
        elif quantize == "int8":
            from genctl.native.quantized import int8_codes

            codes, scales = int8_codes(weight)
            scales /= 127  # x is also quantised to 127 steps, scaled by its largest magnitude
            held = (codes, scales)
            fields.form, fields.w, fields.scale = _CODES8, codes.data_ptr(), scales.data_ptr()
            form = quantize
        else:
            form = str(weight.dtype).removeprefix("torch.")
            in_out = not weight.is_contiguous() and weight.t().is_contiguous()
            lies = weight if in_out else weight.contiguous()
            held = (lies,)
            fields.form, fields.type, fields.w = _IN_OUT if in_out else _PLAIN, TYPES[weight.dtype], lies.data_ptr()
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
        """The stored weight, and the bias."""
        return self.held


class CompiledProducts:
    """Products of the same x in one call, with their outputs side by side: x is widened or quantised once."""

    def __init__(self, parts: Sequence[CompiledProduct]) -> None:
        """All `parts` must have the same form."""
        # not the parts themselves: a part may hold this object
        self.held = [(part.fields, part.held, part.wide_bias) for part in parts]
        self.call, self.count = parts[0].call, len(parts)
        self.size = sum(part.size for part in parts)
        self.width = parts[0].fields.in_
        self.addresses = (ctypes.c_void_p * len(parts))(*(ctypes.addressof(part.fields) for part in parts))

    @staticmethod
    def fits(parts: Sequence[object]) -> bool:
        """Whether one call can compute all of them."""
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


class Linear(Protocol):
    """A product with a weight [O, I] and perhaps a bias [O]."""

    form: str  # of its weight, which determines the kernel
    is_compiled: bool  # whether the library computes it

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, F, I] -> [N, F, O]."""
        ...

    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensors."""
        ...


class Plain:
    """torch's own product."""

    form = "plain"
    is_compiled = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        return F.linear(x, self.weight, self.bias)

    def tensors(self) -> tuple[Tensor, ...]:
        """Weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class Joined:
    """Products of the same x: one call if the library computes them, else one after the other."""

    def __init__(self, parts: Sequence[Linear], sizes: Sequence[int]) -> None:
        """`sizes` are the widths of the outputs; a single part may compute several."""
        self.parts, self.sizes = tuple(parts), list(sizes)
        self.form = " and ".join(dict.fromkeys(part.form for part in parts))
        self.is_compiled = all(part.is_compiled for part in parts)
        self.one: Linear | CompiledProducts | None = parts[0] if len(parts) == 1 else None
        if self.one is None and CompiledProducts.fits(parts):
            self.one = CompiledProducts([part for part in parts if isinstance(part, CompiledProduct)])

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """x [N, F, I] -> one tensor [N, F, O] for each size."""
        if self.one is not None:
            return torch.split(self.one(x), self.sizes, -1)
        return [part(x) for part in self.parts]

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of all parts."""
        return tuple(tensor for part in self.parts for tensor in part.tensors())


Weight: TypeAlias = "Tensor | Blocks"
Make = Callable[[Tensor, Tensor | None], Linear]


def maker(dtype: torch.dtype, quantize: str | None, width: int, *, compiled: bool = True) -> Make | None:
    """A function that makes products on the CPU for weights [O, `width`] of a type; None for torch's own product."""
    found = library() if compiled and dtype in TYPES else None
    if quantize is None:
        return None if found is None else partial(CompiledProduct, found)
    from genctl.native.quantized import GROUP, Int8Product

    if quantize == "int4" and width % GROUP:
        quantize = "int8"
    if found is not None:
        return partial(CompiledProduct, found, quantize=quantize)
    if quantize == "int8":
        return Int8Product
    from genctl.native.blocks import BlocksPlain, int4_blocks

    coded = not compiled and library() is not None and dtype in TYPES
    return lambda weight, bias: BlocksPlain(int4_blocks(weight), bias, coded=coded)


class Products:
    """Makes the products of one model. `quantize` is None, "int8", "int4" or "gguf"; `pack` False: torch's products.

    With "gguf" all weights keep the file's form. `compiled` False: torch also multiplies quantised weights, with the
    library's rounding. `kernels`: make products for the Triton kernels of a GPU.
    """

    def __init__(
        self, quantize: str | None = None, *, pack: bool = True, compiled: bool = True, kernels: bool = False
    ) -> None:
        self.quantize, self.pack, self.compiled, self.kernels = quantize, pack, compiled, kernels
        self.rounds = quantize if quantize != "gguf" else None  # quantise while weights are read

    @property
    def is_compiled(self) -> bool:
        """Whether the library multiplies; it accepts weights and activations of different types."""
        return self.compiled and self.pack and not self.kernels and library() is not None

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """weight [O, I], bias [O]."""
        return self._made(weight, bias, self.rounds)

    def joined(self, *parts: tuple[Weight, Tensor | None]) -> Joined:
        """Products of the same x: one with stacked weights where that saves reading or quantising x again."""
        sizes = [weight.shape[0] for weight, _ in parts]
        biases = [bias for _, bias in parts if bias is not None]
        if self.rounds is not None or (
            self.kernels and len(biases) in (0, len(parts))
        ):  # x is read, or quantised, once
            weights = [weight for weight, _ in parts if isinstance(weight, Tensor)]
            one = self.linear(torch.cat(weights), torch.cat(biases) if biases else None)
            for weight in weights:
                pages.replaced(weight)
            return Joined([one], sizes)
        return Joined([self.linear(*part) for part in parts], sizes)

    def split(self, weight: Weight, bias: Tensor | None, sizes: Sequence[int]) -> Joined:
        """A product with one matrix, whose output is split into these `sizes`."""
        return Joined([self.linear(weight, bias)], sizes)

    def head(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """The product for logits: int8 if others are int4."""
        return self._made(weight, bias, None if self.rounds is None else "int8")

    def _made(self, weight: Weight, bias: Tensor | None, quantize: str | None) -> Linear:
        if not isinstance(weight, Tensor):
            found = library() if self.compiled else None
            if found is not None:
                return CompiledProduct(found, weight, bias)
            from genctl.native.blocks import BlocksPlain

            return BlocksPlain(weight, bias, coded=not self.compiled and library() is not None)
        if self.kernels or (quantize is not None and weight.device.type != "cpu"):
            from genctl.native.quantized import KernelProduct, on_gpu

            if quantize is None:
                return KernelProduct(weight, bias)
            rounded = on_gpu(quantize, weight, bias, by_kernels=self.kernels)
            pages.replaced(weight)
            return rounded
        on_cpu = self.pack and weight.device.type == "cpu"
        make = maker(weight.dtype, quantize, weight.shape[1], compiled=self.compiled) if on_cpu else None
        product = (make or Plain)(weight, bias)
        if quantize is not None:
            pages.replaced(weight)
        return product
