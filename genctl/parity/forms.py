"""Forms in which engines hold weights, activations and caches, as rounding of numbers in exact arithmetic.

Each is a function of rows [..., N] that gives the numbers which the codes stand for: what an engine computes with is
known then, and only its order of sums is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from genctl.parity import ggml
from genctl.parity.arithmetic import Exact, Weights
from genctl.parity.causes import GGUF, SEARCHED, ContextShift, Form

Rounding = Callable[[Tensor], Tensor]


def _blocks(rows: Tensor, size: int) -> Tensor | None:
    """Rows [..., N] in blocks [..., N / size, size]; size 0: a row is a block. None where they do not divide."""
    size = size or rows.shape[-1]
    return None if rows.shape[-1] % size else rows.reshape(*rows.shape[:-1], -1, size)


def symmetric(rows: Tensor, *, bits: int, size: int = 0) -> Tensor:
    """Codes from -(2^(bits-1) - 1): the largest number of a block is the largest code."""
    if (blocks := _blocks(rows, size)) is None:
        return rows
    scale = blocks.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    found: Tensor = (blocks / scale.clamp(min=1e-30)).round() * scale
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


# Roundings of rows by name, besides the types of llama.cpp (`ggml.TYPES`)
ROUNDINGS: dict[str, Rounding] = {
    "bf16": partial(cast, dtype=torch.bfloat16),
    "f16": partial(cast, dtype=torch.float16),
    "fp8": partial(cast, dtype=torch.float8_e4m3fn),
    "fp8-rows": scaled,
    "int8": partial(symmetric, bits=8),
    "int4": partial(asymmetric, bits=4, size=32),
    "int4-128": partial(asymmetric, bits=4, size=128),
    "nf4": nf4,
}


def rounded(rows: Tensor, name: str) -> Tensor:
    """Rows [..., N] as the codes of a rounding stand for them; "" rounds nothing."""
    if not name:
        return rows
    return ROUNDINGS[name](rows) if name in ROUNDINGS else ggml.in_blocks(rows, name)


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


@dataclass(frozen=True)
class MatrixPart:
    """Which matrix of a model a tensor is, as llama.cpp names them."""

    name: str
    layer: int
    type: str  # in the GGUF file that is read; "" for others
    matrix: Tensor = field(compare=False)  # [O, I]


Parts: TypeAlias = Mapping[int, MatrixPart]


class Shift:
    """Reads a text whose context was shifted: some tokens behind a first one that stays are dropped.

    What was read of later tokens stays, and they attend to each other as before. The first one comes nearer to them:
    its keys at all distances are those of a text of nothing else, because there all values are equal.
    """

    def __init__(self, about: ContextShift) -> None:
        self.about, self.keeps = about, int(about.first is not None)
        self.drops = (about.full - self.keeps) // 2
        self.keys: list[Tensor] = []  # of the first token alone, for each layer: [K, distances, D]
        self.records = self.keeps > 0
        self._layer = 0
        self._first: Tensor | None = None

    def read(self, query: Tensor, key: Tensor, scale: float | None) -> None:
        """Queries [N, H, F, D] and keys [N, K, T, D] of a layer, before anything is rounded."""
        if self.records:
            self.keys.append(key[0])
            return
        self._first = None
        if self.keeps:
            keys = self.keys[self._layer % len(self.keys)]
            self._layer += 1
            moved = self._times(query.shape[-2], key.shape[-2]) * self.drops
            own = keys[:, moved].repeat_interleave(query.shape[1] // len(keys), 0)
            self._first = (query * own).sum(-1) * (query.shape[-1] ** -0.5 if scale is None else scale)

    def _times(self, fed: int, total: int) -> Tensor:
        """How often the context was shifted before each of the last tokens was read, int64 [F]."""
        place, full = torch.arange(total - fed, total), self.about.full
        return torch.where(place < full, 0, 1 + (place - full).clamp(min=0) // max(self.drops, 1))

    def shifted(self, scores: Tensor) -> Tensor:
        """Scores [..., F, T] without the tokens that are dropped."""
        if self.records:
            return scores
        fed, total = scores.shape[-2:]
        begin = self.keeps + self._times(fed, total)[:, None] * self.drops  # of what is left behind the first
        column = torch.arange(total)
        scores = scores.masked_fill((column >= self.keeps) & (column < begin), -torch.inf)
        if self._first is not None:
            scores[..., 0] = self._first.to(scores.dtype)
        return scores


class Coded(Exact):
    """A wide dtype, with numbers rounded as a form says."""

    def __init__(
        self, weights: Weights, form: Form, dtype: torch.dtype = torch.float64, *, parts: Parts, layers: int = 1,
        group: int = 1, neighbours: bool = False, codes: dict[int, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """`parts`: by the address of each matrix. `codes`: keeps what searched codes stand for."""
        super().__init__(weights, dtype)
        self.form, self._parts, self._layers, self._group = form, parts, layers, group
        self._neighbours = neighbours  # llama.cpp turns neighbours
        self._codes, self.shift = codes, None if form.shift is None else Shift(form.shift)
        self._rounding = ""  # of the weight that is read

    def type_of(self, weight: Tensor) -> str:
        """The rounding of a matrix [O, I]."""
        part, form = self._parts.get(weight.data_ptr()), self.form
        name, layer, own = ("", 0, "") if part is None else (part.name, part.layer, part.type)
        if form.weights == "file":
            return own
        if form.weights in GGUF:
            return ggml.type_in(form.weights, name, layer, self._layers, weight.shape[1], group=self._group)
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
        if form.overflows and not weight.shape[1] % 2:
            found = _overflowing(x.to(self.dtype), self.weights.value(weight, self.dtype))
            return found if bias is None else found + self._wide(bias)
        if form.weights == "file" or form.weights in GGUF:
            x = rounded(x.to(self.dtype), ggml.beside(kind))
        elif kind and form.activations:
            x = rounded(x.to(self.dtype), form.activations)
        if self._codes is None or form.weights not in SEARCHED:
            return super()._linear(x, weight, bias)
        if weight.data_ptr() not in self._codes:
            self._codes[weight.data_ptr()] = rounded(self.weights.value(weight, torch.float32), kind)
        found = x.to(self.dtype) @ self._codes[weight.data_ptr()].to(self.dtype).T
        return found if bias is None else found + self._wide(bias)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.form.gelu and func is F.gelu:
            return ggml.gelu(args[0].to(self.dtype))
        return super().__torch_function__(func, types, args, kwargs)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        form = self.form
        query, key, value = (part.to(self.dtype) for part in (query, key, value))
        if self.shift is not None:
            self.shift.read(query, key, kwargs.get("scale"))
        by = {"turned": form.rotated and form.keys in ggml.TYPES}
        if form.keys:
            query, key = self._in_pairs(query, 2), self._in_pairs(key, 2)
            if form.attention:  # llama.cpp rounds what is multiplied with keys, too
                query = self._in_cache(query, ggml.beside(form.keys), **by)
            key = self._in_cache(key, form.keys, **by)
            query, key = (self._in_pairs(part, part.shape[-1] // 2) for part in (query, key))
        value = self._in_cache(value, form.values, turned=form.rotated and form.values in ggml.TYPES, most=64)
        return super()._attention(query, key, value, *args, **kwargs)

    def _in_cache(self, rows: Tensor, kind: str, *, turned: bool, most: int = 2**20) -> Tensor:
        """Queries, keys or values [..., D] as they are multiplied. `turned`: by a Hadamard matrix before."""
        size = min(rows.shape[-1] & -rows.shape[-1], most) if turned and not rows.shape[-1] % 64 else 1
        return ggml.rotated(rounded(ggml.rotated(rows, size), kind), size)

    def _in_pairs(self, rows: Tensor, pairs: int) -> Tensor:
        """Heads [..., D] whose rotary pairs lie half a head apart, as neighbours (`pairs` = 2), and back (D / 2)."""
        parts = rows.reshape(*rows.shape[:-1], pairs, -1)
        return parts.transpose(-1, -2).flatten(-2) if self._neighbours else rows

    def mixed(self, scores: Tensor, value: Tensor) -> Tensor:
        if self.shift is not None:
            scores = self.shift.shifted(scores)
        if self.form.attention == "flash" and self.form.values == "f16":
            return ggml.flash(scores, value).to(self.dtype)
        return super().mixed(scores, value)

    def result(self, name: str, value: Any) -> Any:
        if name == "softmax" and self.form.attention == "products":
            return rounded(value, ggml.beside(self.form.values))
        return value
