"""Forms in which engines hold weights, activations and caches, as rounding of numbers in exact arithmetic.

Each is a function of rows [..., N] that gives the numbers which the codes stand for: what an engine computes with is
known then, and only its order of sums is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from genctl.parity.arithmetic import Exact, Weights

Rounding = Callable[[Tensor], Tensor]


def _blocks(rows: Tensor, size: int) -> Tensor | None:
    """Rows [..., N] in blocks [..., N / size, size]; size 0: a row is a block. None where they do not divide."""
    size = size or rows.shape[-1]
    return None if rows.shape[-1] % size else rows.reshape(*rows.shape[:-1], -1, size)


def symmetric(rows: Tensor, *, bits: int, size: int, half: bool) -> Tensor:
    """Codes from -(2^(bits-1) - 1): the largest number of a block is the largest code. `half`: scales in float16."""
    if (blocks := _blocks(rows, size)) is None:
        return rows
    most = 2 ** (bits - 1) - 1
    scale = blocks.abs().amax(-1, keepdim=True) / most
    codes = (blocks / scale.clamp(min=1e-30)).round()
    found: Tensor = codes * (scale.half().to(rows.dtype) if half else scale)
    return found.flatten(-2)


def q4_0(rows: Tensor) -> Tensor:
    """llama.cpp's Q4_0 (ggml-quants.c): the number that is furthest from 0 is -8."""
    if (blocks := _blocks(rows, 32)) is None:
        return rows
    place = blocks.abs().argmax(-1, keepdim=True)
    scale = blocks.gather(-1, place) / -8
    codes = (blocks / torch.where(scale == 0, 1.0, scale) + 8.5).floor().clamp(0, 15) - 8
    found: Tensor = codes * scale.half().to(rows.dtype)
    return found.flatten(-2)


def asymmetric(rows: Tensor, *, bits: int, size: int) -> Tensor:
    """Codes from the least to the largest number of a group (GPTQ, AWQ: Lin et al. 2023, arXiv:2306.00978)."""
    if (blocks := _blocks(rows, size)) is None:
        return rows
    least, most = blocks.amin(-1, keepdim=True).clamp(max=0), blocks.amax(-1, keepdim=True).clamp(min=0)
    scale = ((most - least) / (2**bits - 1)).clamp(min=1e-30)
    zero = (-least / scale).round()
    found: Tensor = ((blocks / scale).round() + zero).clamp(0, 2**bits - 1).sub(zero) * scale
    return found.flatten(-2)


_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def nf4(rows: Tensor) -> Tensor:
    """4-bit NormalFloat in blocks of 64 (Dettmers et al. 2023, arXiv:2305.14314, appendix E)."""
    if (blocks := _blocks(rows, 64)) is None:
        return rows
    levels = torch.tensor(_NF4, dtype=rows.dtype)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    borders = (levels[1:] + levels[:-1]) / 2
    found: Tensor = levels[torch.bucketize((blocks / scale).contiguous(), borders)] * scale
    return found.flatten(-2)


def cast(rows: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Numbers rounded to a dtype."""
    return rows.to(dtype).to(rows.dtype)


def scaled(rows: Tensor) -> Tensor:
    """8-bit floats; the largest number of a row is the largest of them (compressed-tensors, torchao)."""
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
    found: Tensor = cast(rows / scale, dtype=torch.float8_e4m3fn) * scale
    return found


@dataclass(frozen=True)
class Form:
    """What is rounded, besides the weights to a dtype."""

    weights: Rounding | None = None
    activations: Rounding | None = None  # what the products of weights read
    cache: Rounding | None = None  # keys and values
    overflows: bool = False  # sums of two products of codes end at 16 bits (vpmaddubsw: CTranslate2 without VNNI)
    linears: bool = False  # the embeddings and the head are as they are
    scores: Rounding | None = None  # what keys and values are multiplied with: llama.cpp rounds both factors alike


_ROWS8 = partial(symmetric, bits=8, size=0, half=False)
_BLOCKS8 = partial(symmetric, bits=8, size=32, half=True)
# A cause may have several forms, with a name behind it
FORMS: dict[str, Form] = {
    "int8": Form(_ROWS8, _ROWS8),
    "int8:linears": Form(_ROWS8, _ROWS8, linears=True),
    "int8:overflow": Form(_ROWS8, overflows=True),
    "int8-weights": Form(_ROWS8),
    "int8-weights:linears": Form(_ROWS8, linears=True),
    "q8_0": Form(_BLOCKS8, _BLOCKS8),
    "q4_0": Form(q4_0, _BLOCKS8),
    "int4": Form(partial(asymmetric, bits=4, size=32)),
    "int4:linears": Form(partial(asymmetric, bits=4, size=32), linears=True),
    "int4-128": Form(partial(asymmetric, bits=4, size=128), linears=True),
    "nf4": Form(nf4, linears=True),
    "fp8": Form(partial(cast, dtype=torch.float8_e4m3fn), linears=True),
    "fp8:weights": Form(scaled, linears=True),
    "fp8:rows": Form(scaled, scaled, linears=True),
    "cache-float16": Form(cache=partial(cast, dtype=torch.float16)),
    "cache-float16:llama": Form(cache=partial(cast, dtype=torch.float16), scores=partial(cast, dtype=torch.float16)),
    "cache-bfloat16": Form(cache=partial(cast, dtype=torch.bfloat16)),
    "cache-q8_0": Form(cache=_BLOCKS8),
    # the weights are those of a GGUF file: llama.cpp rounds what it multiplies with blocks of 32 and of 256, genctl in
    # its own way; an engine that unpacks them rounds nothing
    "gguf": Form(activations=_BLOCKS8),
    "gguf:256": Form(activations=partial(symmetric, bits=8, size=256, half=False)),
    "gguf:32": Form(activations=partial(symmetric, bits=8, size=32, half=False)),
    "gguf:plain": Form(),
    "cache-fp8": Form(cache=partial(cast, dtype=torch.float8_e4m3fn)),
}


def _overflowing(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ of 8-bit codes. Those of x are shifted to be positive, and the sum of two products ends at 16 bits."""
    scales = [part.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127 for part in (x, weight)]
    # two products are exact in float32, all are not
    codes, weights = ((x / scales[0]).round().flatten(0, -2) + 128).float(), (weight / scales[1]).round().float()
    even, odd = weights[:, ::2].contiguous(), weights[:, 1::2].contiguous()
    rows = [
        torch.addcmul(even * row[::2], odd, row[1::2]).clamp_(-(2**15), 2**15 - 1).sum(-1, dtype=x.dtype)
        for row in codes
    ]
    found = torch.stack(rows).view(*x.shape[:-1], -1) - 128 * weights.sum(-1, dtype=x.dtype)
    return torch.as_tensor(found * scales[0] * scales[1][:, 0])


class Coded(Exact):
    """A wide dtype, with numbers rounded as a form says."""

    def __init__(self, weights: Weights, form: Form, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(weights, dtype)
        self._form = self._plain = form
        self._vocabulary = -1

    def coded_weight(self, rows: Tensor) -> Tensor:
        return rows if self._form.weights is None else self._form.weights(rows)

    def _embedding(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._vocabulary = len(weight)
        with self._as_they_are(self._plain.linears):
            return super()._embedding(input, weight, *args, **kwargs)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        with self._as_they_are(self._plain.linears and len(weight) == self._vocabulary):
            if self._form.overflows and weight in self.weights and not weight.shape[1] % 2:
                found = _overflowing(x.to(self.dtype), self.weights.value(weight, self.dtype))
                return found if bias is None else found + self._wide(bias)
            if self._form.activations is not None and weight in self.weights:
                x = self._form.activations(x.to(self.dtype))
            return super()._linear(x, weight, bias)

    @contextmanager
    def _as_they_are(self, plain: bool) -> Iterator[None]:
        """Numbers without codes for the while, if `plain`."""
        self._form = Form() if plain else self._plain
        try:
            yield
        finally:
            self._form = self._plain

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._form.cache is not None:
            key, value = (self._form.cache(part.to(self.dtype)) for part in (key, value))
        if self._form.scores is not None:
            query = self._form.scores(query.to(self.dtype))
        return super()._attention(query, key, value, *args, **kwargs)

    def result(self, name: str, value: Any) -> Any:
        return self._form.scores(value) if name == "softmax" and self._form.scores is not None else value
