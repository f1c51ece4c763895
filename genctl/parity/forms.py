"""Formats in which engines hold weights, activations and caches, simulated by rounding in exact arithmetic.

A rounding maps blocks [..., N] to the values of their codes. This reproduces an engine's values up to the order of
its sums. The roundings of llama.cpp are in ggml.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from genctl.parity import ggml
from genctl.parity.arithmetic import Exact, Weights
from genctl.parity.causes import GGUF, SEARCHED, Form

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022833234,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def symmetric(blocks: Tensor) -> Tensor:
    """8-bit codes: the largest magnitude becomes 127."""
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return (blocks / scale.clamp(min=1e-30)).round() * scale


def asymmetric(blocks: Tensor) -> Tensor:
    """4-bit codes from minimum to maximum, 0 included (GPTQ, AWQ: Lin et al. 2023, arXiv:2306.00978)."""
    least, most = blocks.amin(-1, keepdim=True).clamp(max=0), blocks.amax(-1, keepdim=True).clamp(min=0)
    scale = ((most - least) / 15).clamp(min=1e-30)
    zero = (-least / scale).round()
    return ((blocks / scale).round() + zero).clamp(0, 15).sub(zero) * scale


def nf4(blocks: Tensor) -> Tensor:
    """4-bit NormalFloat (Dettmers et al. 2023, arXiv:2305.14314, appendix E)."""
    levels = torch.tensor(_NF4, dtype=blocks.dtype)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    borders = (levels[1:] + levels[:-1]) / 2
    return levels[torch.bucketize((blocks / scale).contiguous(), borders)] * scale


def cast(blocks: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Numbers rounded to a dtype."""
    return blocks.to(dtype).to(blocks.dtype)


def scaled(blocks: Tensor) -> Tensor:
    """8-bit floats, scaled so that the largest magnitude is the largest float (compressed-tensors, torchao)."""
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
    return cast(blocks / scale, dtype=torch.float8_e4m3fn) * scale


# Roundings by name, besides the types of llama.cpp, and how many values share a scale; 0: a row
ROUNDINGS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "bf16": (partial(cast, dtype=torch.bfloat16), 0), "f16": (partial(cast, dtype=torch.float16), 0),
    "fp8": (partial(cast, dtype=torch.float8_e4m3fn), 0), "fp8-rows": (scaled, 0), "int8": (symmetric, 0),
    "int4": (asymmetric, 32), "int4-128": (asymmetric, 128), "nf4": (nf4, 64),
}  # fmt: skip


def rounded(rows: Tensor, name: str) -> Tensor:
    """Rows [..., N] after the rounding `name`; unchanged for "", and if they do not divide into its blocks."""
    if not name:
        return rows
    if name in ggml.TYPES:
        return ggml.in_blocks(rows, name)
    change, size = ROUNDINGS[name]
    size = size or rows.shape[-1]
    return rows if rows.shape[-1] % size else change(rows.reshape(*rows.shape[:-1], -1, size)).flatten(-2)


@dataclass(frozen=True)
class MatrixPart:
    """Which matrix of a model a tensor is, in llama.cpp's names."""

    name: str
    layer: int
    type: str  # in the GGUF file that is read; "" otherwise
    matrix: Tensor = field(compare=False)  # [O, I]


class Coded(Exact):
    """A wide dtype, with values rounded as a form says."""

    def __init__(
        self, weights: Weights, form: Form, dtype: torch.dtype = torch.float64, *, parts: Mapping[int, MatrixPart],
        layers: int = 1, neighbours: bool = False, codes: dict[int, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """`parts`: by matrix address. `neighbours`: llama.cpp's rotary pairs are neighbouring elements of a head.

        `codes` caches the values of codes that are found by a search.
        """
        super().__init__(weights, dtype)
        self.form, self._parts, self._layers, self._neighbours = form, parts, layers, neighbours
        self._codes = {} if codes is None else codes
        self._rounding = ""  # of the current weight

    def type_of(self, weight: Tensor) -> str:
        """The rounding of a matrix [O, I]."""
        part, form = self._parts.get(weight.data_ptr()), self.form
        name, layer, own = ("", 0, "") if part is None else (part.name, part.layer, part.type)
        if form.weights == "file":
            return own
        if form.weights in GGUF:
            return ggml.type_in(form.weights, name, layer, self._layers, weight.shape[1])
        return "" if form.linears and name in ("output", "token_embd") else form.weights

    def coded_weight(self, rows: Tensor) -> Tensor:
        return rows if self.form.weights == "file" else rounded(rows, self._rounding)

    def _embedding(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._rounding = self.type_of(weight)
        return super()._embedding(input, weight, *args, **kwargs)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight not in self.weights:
            return super()._linear(x, weight, bias)
        form = self.form
        self._rounding = kind = self.type_of(weight)
        is_gguf = form.weights in ("file", *GGUF)
        x = rounded(x.to(self.dtype), ggml.beside(kind) if is_gguf else form.activations if kind else "")
        if form.weights not in SEARCHED:
            return super()._linear(x, weight, bias)
        if weight.data_ptr() not in self._codes:
            self._codes[weight.data_ptr()] = rounded(self.weights.value(weight, torch.float32), kind)
        found = x @ self._codes[weight.data_ptr()].to(self.dtype).T
        return found if bias is None else found + self._wide(bias)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        form = self.form
        query, key, value = (part.to(self.dtype) for part in (query, key, value))
        turned = form.rotated and form.keys in ggml.TYPES
        if form.keys:
            query, key = self._in_pairs(query, 2), self._in_pairs(key, 2)
            if form.flash:  # llama.cpp rounds queries, too
                query = _in_cache(query, ggml.beside(form.keys), turned=turned)
            key = _in_cache(key, form.keys, turned=turned)
            query, key = (self._in_pairs(part, part.shape[-1] // 2) for part in (query, key))
        value = _in_cache(value, form.values, turned=form.rotated and form.values in ggml.TYPES, most=64)
        return super()._attention(query, key, value, *args, **kwargs)

    def _in_pairs(self, rows: Tensor, pairs: int) -> Tensor:
        """Reorder heads [..., D]: rotary pairs half a head apart become neighbours (`pairs` = 2), or back (D / 2)."""
        parts = rows.reshape(*rows.shape[:-1], pairs, -1)
        return parts.transpose(-1, -2).flatten(-2) if self._neighbours else rows

    def mixed(self, scores: Tensor, value: Tensor) -> Tensor:
        if self.form.flash and self.form.values == "f16":
            return ggml.flash(scores, value).to(self.dtype)
        return super().mixed(scores, value)


def _in_cache(rows: Tensor, kind: str, *, turned: bool, most: int = 2**20) -> Tensor:
    """Queries, keys or values [..., D] after rounding. `turned`: rounded in the basis of a Hadamard matrix."""
    if not turned or rows.shape[-1] % 64:
        return rounded(rows, kind)
    size = min(rows.shape[-1] & -rows.shape[-1], most)
    return ggml.rotated(rounded(ggml.rotated(rows, size), kind), size)
