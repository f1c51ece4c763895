"""Matrix products y = x Wᵀ + b, by how their weights are held.

A step of one row is as fast as its weights can be read: float32 and bfloat16 stay mapped from the file, in no copy.
Where several rows share a pass the arithmetic counts too, and the weights are packed for it when such a pass first
comes. 8 and 4 bits are made while the weights are read. What runs follows from the shapes and from what the CPU can do,
never from a clock.

N rows, F tokens fed to each, I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from genctl.native import kernels, pages, quantized
from genctl.native.products.library import TYPES, library
from genctl.native.products.weights import CompiledProduct

SMALL = 1 << 18  # numbers in a weight below which a plain product is as fast: a call of oneDNN costs 20 µs more
SLICE = 1 << 22  # numbers of a weight that are float32 at a time, while panels are made of it


class Linear(Protocol):
    """A product with a weight [O, I] and perhaps a bias [O]."""

    form: str  # how its weight is held, and so which kernel runs

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, F, I] -> [N, F, O]."""
        ...

    def tensors(self) -> tuple[Tensor, ...]:
        """What it holds."""
        ...


class Plain:
    """torch's own product."""

    form = "plain"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        return F.linear(x, self.weight, self.bias)

    def tensors(self) -> tuple[Tensor, ...]:
        """Weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class Packed:
    """oneDNN's product with a weight in its own layout."""

    form = "oneDNN, packed"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = kernels.onednn_packed(weight), bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        return kernels.onednn(x, self.weight, self.bias)

    def tensors(self) -> tuple[Tensor, ...]:
        """Weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class Mapped:
    """oneDNN's product with a weight as it lies in the file; with a packed copy of it where that is faster.

    That is with several rows. The copy is made when they first come, so that a prompt does not wait for it. With one
    token where the file has [in, out] (GPT-2), oneDNN would read across its rows: MKL reads them along, and as fast as
    a copy, which a short run would not pay back. Where it cannot, such a token gets the copy, too.

    Where the file has another type, `again` makes the weight once more after it was let go.
    """

    form = "oneDNN, mapped"

    def __init__(self, weight: Tensor, bias: Tensor | None = None, again: Callable[[], Tensor] | None = None) -> None:
        self.held: Tensor | None = weight
        self.bias, self.again = bias, again
        self.across = not weight.is_contiguous()
        self.along = self.across and kernels.has_columns(weight.dtype)
        self.packed: Packed | None = None
        self.counted = weight if again is None else torch.empty_like(weight, device="meta")

    @property
    def weight(self) -> Tensor:
        """Numbers [O, I]."""
        if self.held is None:
            assert self.again is not None
            made = self.again()
            self.held = made.t() if self.across else made
        return self.held

    def let_go(self) -> None:
        """Free this weight's memory; it is made again on the next use."""
        if self.held is None:
            return
        if self.again is None:
            pages.replaced(self.held)
        else:
            self.held = None
            pages.trim(self.counted.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, F, I] -> [N, F, O]."""
        if x.shape[0] == 1:
            if not (self.across and x.shape[1] == 1):
                return kernels.onednn(x, self.weight, self.bias)
            if self.along:
                return kernels.columns(x, self.weight, self.bias)
        if self.packed is None:
            self.packed = Packed(self.weight, self.bias)
            self.let_go()
        return self.packed(x)

    def tensors(self) -> tuple[Tensor, ...]:
        """Weight and bias; the copy is not counted, which takes the place of pages that are let go."""
        return (self.counted,) if self.bias is None else (self.counted, self.bias)


class Float16:
    """FBGEMM's product with float16 weights: rows and sums are float32."""

    form = "FBGEMM, float16"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.panels = []
        for begin, end in pairwise(_slices(weight)):
            part = weight[begin:end]
            self.panels.append(kernels.float16_packed(part, None if bias is None else bias[begin:end]))
            pages.replaced(part)
        self.size, self.dtype = weight.shape[0], weight.dtype
        self.counted = torch.empty(weight.shape, dtype=weight.dtype, device="meta")

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.size)
        rows = x.reshape(-1, x.shape[-1]).float()
        parts = [kernels.float16(rows, panels) for panels in self.panels]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return y.to(self.dtype).view(*x.shape[:-1], self.size)

    def tensors(self) -> tuple[Tensor, ...]:
        """What stands for the panels, which are no tensor."""
        return (self.counted,)


def _slices(weight: Tensor) -> list[int]:
    """Where slices of the outputs of a weight [O, I] begin, and O: each has about `SLICE` numbers, 2 · `SLICE` at most.

    FBGEMM computes 16 outputs together, so that slices of multiples of 16 compute what the whole does.
    """
    size, width = weight.shape
    step = size if size * width <= 2 * SLICE else max(16, SLICE // width // 16 * 16)
    return [*range(0, size, step), size]


class Joined:
    """Products of the same x. `parts` are computed one by one with one row, and as one product with several."""

    def __init__(self, parts: Sequence[Linear], sizes: Sequence[int]) -> None:
        self.parts, self.sizes = tuple(parts), list(sizes)
        self.one: Linear | None = parts[0] if len(parts) == 1 else None
        mapped = [part for part in self.parts if isinstance(part, Mapped)]
        self.mapped = mapped if len(mapped) == len(self.parts) else []
        self.form = self.parts[0].form

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """x [N, F, I] -> one tensor [N, F, O] for each size."""
        if self.one is not None and (len(self.parts) == 1 or x.shape[0] > 1):
            return torch.split(self.one(x), self.sizes, -1)
        if self.mapped and x.shape[0] > 1:
            self.one = Packed(*_stacked([(part.weight, part.bias) for part in self.mapped]))
            for part in self.mapped:
                part.let_go()
            return torch.split(self.one(x), self.sizes, -1)
        return [part(x) for part in self.parts]

    def tensors(self) -> tuple[Tensor, ...]:
        """What the parts hold."""
        return tuple(tensor for part in self.parts for tensor in part.tensors())


def _stacked(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Weights [O1, I], [O2, I], … and their biases as one [O1 + O2 + …, I]."""
    biases = [bias for _, bias in parts if bias is not None]
    return torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None


Make = Callable[[Tensor, Tensor | None], Linear]


class Products:
    """Makes the products of one model. `quantize` is None, "int8" or "int4"; `pack` False makes plain ones."""

    def __init__(self, quantize: str | None = None, *, pack: bool = True) -> None:
        self.quantize, self.pack = quantize, pack
        self.origins: dict[int, Tensor] = {}  # of converted weights by their addresses, as they lie in the file

    def converted(self, weight: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """A weight in another type or place, which may be let go: it can be made again of what is mapped."""
        copy = pages.converted(weight, dtype, device)
        if copy is not weight:
            self.origins[copy.data_ptr()] = weight
        return copy

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """weight [O, I], bias [O]."""
        return self._made(weight, bias, self.quantize)

    def joined(self, *parts: tuple[Tensor, Tensor | None]) -> Joined:
        """Products that read the same x."""
        sizes = [weight.shape[0] for weight, _ in parts]
        if self.quantize is not None:  # x is quantised once
            one = self.linear(*_stacked(parts))
            for weight, _ in parts:
                pages.replaced(weight)
            return Joined([one], sizes)
        return Joined([self.linear(*part) for part in parts], sizes)

    def split(self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> Joined:
        """One matrix whose output is several parts."""
        return Joined([self.linear(weight, bias)], sizes)

    def head(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The product that makes logits: never below 8 bits, which it is not worth."""
        return self._made(weight, bias, None if self.quantize is None else "int8")

    def _made(self, weight: Tensor, bias: Tensor | None, quantize: str | None) -> Linear:
        make = self._compiled(weight, quantize) or self._quantized(weight, quantize) or self._exact(weight)
        product = make(weight, bias)
        if quantize is not None:
            pages.replaced(weight)
        return product

    def _compiled(self, weight: Tensor, quantize: str | None) -> Make | None:
        found = library() if self.pack and weight.device.type == "cpu" and weight.dtype in TYPES else None
        if found is None:
            return None
        if quantize == "int4" and weight.shape[1] % kernels.GROUP:
            quantize = "int8"
        return partial(CompiledProduct, found, quantize=quantize)

    def _quantized(self, weight: Tensor, quantize: str | None) -> Make | None:
        if quantize is None:
            return None
        if quantize == "int4" and quantized.fits_int4(weight):
            return quantized.Int4
        return quantized.int8()

    def _exact(self, weight: Tensor) -> Make:
        if not self.pack or weight.device.type != "cpu" or weight.numel() < SMALL:
            return Plain
        if kernels.has_onednn(weight.dtype):
            origin = self.origins.get(weight.data_ptr())
            again = None if origin is None else partial(pages.converted, origin, weight.dtype)
            return partial(Mapped, again=again)
        return Float16 if weight.dtype == torch.float16 and kernels.has_float16() else Plain
