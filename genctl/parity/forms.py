"""Forms in which engines hold weights, activations and caches, as rounding of numbers in exact arithmetic.

A rounding turns blocks [..., N] into the numbers that their codes stand for. Then an engine's numbers are known,
and only its order of sums is not. Those of llama.cpp follow ggml/src/ggml-quants.c and ggml-cpu/ops.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from genctl.parity.arithmetic import Exact, Weights
from genctl.parity.causes import GGUF, Form

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022833234,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def symmetric(blocks: Tensor, *, short: bool = False) -> Tensor:
    """8-bit codes: the largest number is 127. `short`: scales in float16 (Q8_0)."""
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = (blocks / scale.clamp(min=1e-30)).round()
    return codes * (_short(scale) if short else scale)


def asymmetric(blocks: Tensor) -> Tensor:
    """4-bit codes from the least to the largest number (GPTQ, AWQ: Lin et al. 2023, arXiv:2306.00978)."""
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
    """8-bit floats; the largest number is the largest of them (compressed-tensors, torchao)."""
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
    return cast(blocks / scale, dtype=torch.float8_e4m3fn) * scale


def _short(scale: Tensor) -> Tensor:
    """Scales of llama.cpp, which are in float16."""
    return scale.half().to(scale.dtype)


def signed(blocks: Tensor, *, most: int) -> Tensor:
    """Q4_0, Q5_0: the number furthest from 0 is `-most`."""
    scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -most
    codes = blocks / torch.where(scale == 0, torch.inf, scale)
    return ((codes + most + 0.5).floor().clamp(max=2 * most - 1) - most) * _short(scale)


def ranged(blocks: Tensor, *, most: int) -> Tensor:
    """Q4_1, Q5_1: codes from the least number, 0, to the largest, `most`."""
    least = blocks.amin(-1, keepdim=True)
    scale = (blocks.amax(-1, keepdim=True) - least) / most
    codes = (blocks - least) / torch.where(scale == 0, torch.inf, scale)
    return (codes + 0.5).floor().clamp(max=most) * _short(scale) + _short(least)


# Roundings by name, and how many numbers share a scale; 0: a row
ROUNDINGS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "bf16": (partial(cast, dtype=torch.bfloat16), 0), "f16": (partial(cast, dtype=torch.float16), 0),
    "fp8": (partial(cast, dtype=torch.float8_e4m3fn), 0), "fp8-rows": (scaled, 0), "int8": (symmetric, 0),
    "int4": (asymmetric, 32), "int4-128": (asymmetric, 128), "nf4": (nf4, 64), "q8_k": (symmetric, 256),
    "q8_0": (partial(symmetric, short=True), 32), "q5_1": (partial(ranged, most=31), 32),
    "q5_0": (partial(signed, most=16), 32), "q4_1": (partial(ranged, most=15), 32),
    "q4_0": (partial(signed, most=8), 32),
}  # fmt: skip


def rounded(rows: Tensor, name: str) -> Tensor:
    """Rows [..., N] as the codes of a rounding stand for them; as they are for "", and where they are no blocks."""
    if not name:
        return rows
    change, size = ROUNDINGS[name]
    size = size or rows.shape[-1]
    return rows if rows.shape[-1] % size else change(rows.reshape(*rows.shape[:-1], -1, size)).flatten(-2)


def beside(name: str) -> str:
    """The rounding of rows that llama.cpp multiplies with a matrix of this type; "": none."""
    if name in (*GGUF, "iq4_nl"):
        return "q8_0"
    return name if name in ("", "f16", "bf16") else "q8_k"


def rotated(rows: Tensor, size: int) -> Tensor:
    """Rows [..., D] turned by a Walsh-Hadamard matrix in parts of `size`; turned twice, they are as before."""
    matrix = torch.ones(1, 1, dtype=rows.dtype)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=rows.dtype), matrix)
    return (rows.reshape(*rows.shape[:-1], -1, size) @ matrix / math.sqrt(size)).flatten(-2)


def flash(scores: Tensor, value: Tensor) -> Tensor:
    """Shares of scores [..., F, T] times values [..., T, D], added up in float16, a column at a time (llama.cpp).

    The softmax is that of one pass (Milakov and Gimelshein 2018, arXiv:1805.02867): where a score is the highest so
    far, the sum is scaled down, and rounded again.
    """
    scores, value = scores.float(), value.float()
    sums = scores.new_zeros(*scores.shape[:-1], value.shape[-1])
    whole, most = sums[..., :1].clone(), torch.full_like(sums[..., :1], -torch.inf)
    for column in range(scores.shape[-1]):
        score = scores[..., column : column + 1]
        seen = score > -torch.inf
        if not bool(seen.any()):
            continue
        first = int(seen.any(-1).flatten(0, -2).any(0).nonzero()[0])  # earlier rows do not see it
        rows = slice(first, None)
        score, before = score[..., rows, :], most[..., rows, :]
        after = torch.maximum(before, score)
        less = (before - after).exp().nan_to_num(1.0)  # 1 where nothing is seen yet
        share = (score - after).exp().nan_to_num(0.0)
        own = (sums[..., rows, :] * less).half().float()
        sums[..., rows, :] = (own + share * value[..., column : column + 1, :]).half().float()
        whole[..., rows, :] = whole[..., rows, :] * less + share
        most[..., rows, :] = after
    return sums / whole.clamp(min=1e-30)


@dataclass(frozen=True)
class MatrixPart:
    """Which matrix of a model a tensor is, as llama.cpp names them."""

    name: str
    type: str  # in the GGUF file that is read; "" for others
    matrix: Tensor = field(compare=False)  # [O, I]


class Coded(Exact):
    """A wide dtype, with numbers rounded as a form says."""

    def __init__(
        self, weights: Weights, form: Form, dtype: torch.dtype = torch.float64, *, parts: Mapping[int, MatrixPart],
        neighbours: bool = False,
    ) -> None:  # fmt: skip
        """`parts`: by the address of each matrix. `neighbours`: llama.cpp rotates neighbouring numbers by position."""
        super().__init__(weights, dtype)
        self.form, self._parts, self._neighbours = form, parts, neighbours
        self._rounding = ""  # of the weight that is read

    def type_of(self, weight: Tensor) -> str:
        """The rounding of a matrix [O, I]."""
        part, form = self._parts.get(weight.data_ptr()), self.form
        name, own = ("", "") if part is None else (part.name, part.type)
        if form.weights == "file":
            return own
        if form.weights in GGUF:  # llama-quantize writes the head in Q6_K, whose codes are about as fine as Q8_0's
            return "f16" if weight.shape[1] % 32 else "q8_0" if name == "output" else form.weights
        return "" if form.linears and name in ("output", "token_embd") else form.weights

    def coded_weight(self, rows: Tensor) -> Tensor:
        return rows if self.form.weights == "file" else rounded(rows, self._rounding)

    def _embedding(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._rounding = self.type_of(weight)
        return super()._embedding(input, weight, *args, **kwargs)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight in self.weights:
            self._rounding = kind = self.type_of(weight)
            is_gguf = self.form.weights in ("file", *GGUF)
            x = rounded(x.to(self.dtype), beside(kind) if is_gguf else self.form.activations if kind else "")
        return super()._linear(x, weight, bias)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        form = self.form
        query, key, value = (part.to(self.dtype) for part in (query, key, value))
        turned = form.rotated and form.keys in GGUF
        if form.keys:
            query, key = self._in_pairs(query, 2), self._in_pairs(key, 2)
            if form.flash:  # llama.cpp rounds what is multiplied with keys, too
                query = _in_cache(query, beside(form.keys), turned=turned)
            key = _in_cache(key, form.keys, turned=turned)
            query, key = (self._in_pairs(part, part.shape[-1] // 2) for part in (query, key))
        value = _in_cache(value, form.values, turned=form.rotated and form.values in GGUF, most=64)
        return super()._attention(query, key, value, *args, **kwargs)

    def _in_pairs(self, rows: Tensor, pairs: int) -> Tensor:
        """Heads [..., D] whose rotary pairs lie half a head apart, as neighbours (`pairs` = 2), and back (D / 2)."""
        parts = rows.reshape(*rows.shape[:-1], pairs, -1)
        return parts.transpose(-1, -2).flatten(-2) if self._neighbours else rows

    def mixed(self, scores: Tensor, value: Tensor) -> Tensor:
        if self.form.flash and self.form.values == "f16":
            return flash(scores, value).to(self.dtype)
        return super().mixed(scores, value)


def _in_cache(rows: Tensor, kind: str, *, turned: bool, most: int = 2**20) -> Tensor:
    """Queries, keys or values [..., D] as they are multiplied. `turned`: by a Hadamard matrix before."""
    if not turned or rows.shape[-1] % 64:
        return rounded(rows, kind)
    size = min(rows.shape[-1] & -rows.shape[-1], most)
    return rotated(rounded(rotated(rows, size), kind), size)
