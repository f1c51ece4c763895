"""How llama.cpp rounds: its block types, the types in its files, its rotated cache and its attention.

Formulas are those of ggml/src/ggml-quants.c, ggml-cpu/ops.cpp and src/llama-quant.cpp. A rounding maps blocks
f32 [B, N] to the values of their codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

WIDE = 256  # values in a block of a K-quant


def _short(scale: Tensor) -> Tensor:
    """Scales as they are stored, in float16."""
    return scale.half().float()


def _ratio(numbers: Tensor, divisor: Tensor) -> Tensor:
    """numbers / divisor, or 0 where the divisor is 0."""
    return numbers / torch.where(divisor == 0, torch.inf, divisor)


def _extreme(blocks: Tensor) -> Tensor:
    """The value of each block that is furthest from 0 [B, 1]."""
    return blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))


def _fitted(codes: Iterable[Tensor], numbers: Tensor) -> Tensor:
    """The best scale: one per candidate of codes, by least squares weighted by the squares of `numbers`."""
    found: list[tuple[Tensor, Tensor]] = []
    for code in codes:
        weighted = numbers.square() * code
        product, square = ((weighted * other).sum(-1, keepdim=True) for other in (numbers, code))
        found.append((_ratio(product, square), _ratio(product.square(), square)))
    scale, best = found[0]
    for other, gain in found[1:]:
        scale, best = torch.where(gain > best, other, scale), torch.maximum(gain, best)
    return scale


def q8_0(blocks: Tensor) -> Tensor:
    """The largest magnitude of a block becomes 127."""
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return _ratio(blocks, scale).round() * _short(scale)


def q8_k(blocks: Tensor) -> Tensor:
    """The value furthest from 0 becomes -127. Products with K-quants round activations to this type."""
    scale = _extreme(blocks) / -127
    return _ratio(blocks, scale).round().clamp(max=127) * scale


def signed(blocks: Tensor, *, most: int) -> Tensor:
    """Q4_0, Q5_0: the value furthest from 0 becomes `-most`."""
    scale = _extreme(blocks) / -most
    return ((_ratio(blocks, scale) + most + 0.5).floor().clamp(max=2 * most - 1) - most) * _short(scale)


def ranged(blocks: Tensor, *, most: int) -> Tensor:
    """Q4_1, Q5_1: codes from 0 for the minimum to `most` for the maximum."""
    least = blocks.amin(-1, keepdim=True)
    scale = (blocks.amax(-1, keepdim=True) - least) / most
    return (_ratio(blocks - least, scale) + 0.5).floor().clamp(max=most) * _short(scale) + _short(least)


def ranged_k(blocks: Tensor, *, most: int, first: float, steps: int) -> Tensor:
    """Q4_K, Q5_K: groups of 32 by weighted least squares, with a scale and an offset in 6 bits each: [B, 256]."""
    x = blocks.view(len(blocks), -1, 32)
    weights = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    high, offset = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).clamp(max=0)

    def codes(factor: float) -> Tensor:  # from the best offset so far
        return (_ratio(x - offset, high - offset) * factor).round().clamp(0, most)

    def total(numbers: Tensor) -> Tensor:
        return (weights * numbers).sum(-1, keepdim=True)

    def error(scale: Tensor, offset: Tensor, code: Tensor) -> Tensor:
        return total((scale * code + offset - x).square())

    scale = (high - offset) / most
    best = error(scale, offset, codes(most))
    whole, sum_x = total(torch.ones_like(x)), total(x)
    for step in range(steps + 1):
        code = codes(first + 0.1 * step + most)
        sum_l, sum_ll, sum_lx = total(code), total(code.square()), total(code * x)
        spread = whole * sum_ll - sum_l.square()
        own = _ratio(whole * sum_lx - sum_x * sum_l, spread)
        base = _ratio(sum_ll * sum_x - sum_l * sum_lx, spread)
        own = torch.where(base > 0, _ratio(sum_lx, sum_ll), own)
        base = base.clamp(max=0)
        off = error(own, base, code)
        better = (spread > 0) & (off < best)
        scale, offset, best = (
            torch.where(better, new, old) for new, old in ((own, scale), (base, offset), (off, best))
        )
    parts = []
    for part in (scale, -offset):
        most_of = part.amax(-2, keepdim=True)
        parts.append(_short(most_of / 63) * _ratio(part * 63, most_of).round().clamp(max=63))
    scale, offset = parts
    return (_ratio(x + offset, scale).round().clamp(0, most) * scale - offset).flatten(1)


def q6_k(blocks: Tensor) -> Tensor:
    """Q6_K: groups of 16 by weighted least squares, with a scale in 8 bits each: [B, 256]."""
    x = blocks.view(len(blocks), -1, 16)
    extreme, mosts = _extreme(x), (32, *(32 + 0.1 * step for step in (*range(-9, 0), *range(1, 10))))
    scale = _fitted(((_ratio(x, extreme) * -most).round().clamp(-32, 31) for most in mosts), x)
    furthest = scale.gather(-2, scale.abs().argmax(-2, keepdim=True))
    scale = _short(furthest / -128) * _ratio(scale * -128, furthest).round().clamp(max=127)
    return (_ratio(x, scale).round().clamp(-32, 31) * scale).flatten(1)


# The types: rounding, values in a block, and the type of the activations in products with a matrix of this type
TYPES: dict[str, tuple[Callable[[Tensor], Tensor], int, str]] = {
    "q8_0": (q8_0, 32, "q8_0"), "q8_k": (q8_k, WIDE, "q8_k"), "q5_0": (partial(signed, most=16), 32, "q8_0"),
    "q4_0": (partial(signed, most=8), 32, "q8_0"), "q5_1": (partial(ranged, most=31), 32, "q8_0"),
    "q4_1": (partial(ranged, most=15), 32, "q8_0"), "q6_k": (q6_k, WIDE, "q8_k"),
    "q4_k": (partial(ranged_k, most=15, first=-1.0, steps=20), WIDE, "q8_k"),
    "q5_k": (partial(ranged_k, most=31, first=-0.5, steps=15), WIDE, "q8_k"),
}  # fmt: skip
_LESS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}  # for rows that do not divide into blocks


def in_blocks(rows: Tensor, name: str) -> Tensor:
    """Rows [..., N] in a type of llama.cpp; unchanged if they do not divide into blocks."""
    rounding, size, _ = TYPES[name]
    if rows.shape[-1] % size:
        return rows
    return rounding(rows.float().reshape(-1, size)).view(rows.shape).to(rows.dtype)


def beside(name: str) -> str:
    """The type to which llama.cpp rounds the activations in products with a matrix of this type; "": none."""
    if name in TYPES:
        return TYPES[name][2]
    return {"": "", "f16": "f16", "bf16": "bf16", "iq4_nl": "q8_0"}.get(name, "q8_k")


def type_in(file: str, part: str, layer: int, layers: int, width: int) -> str:
    """The type that llama-quantize gives a matrix [O, `width`] in a file of type `file`."""
    base, _, size = file.partition("_k")
    kind = f"{base}_k" if "_k" in file else file
    early = layer < layers // 8
    more = early or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    if part == "output":
        kind = "q8_0" if kind == "q8_0" or width % (WIDE if "_k" in kind else 32) else "q6_k"
    elif size == "_m" and part in ("attn_v", "ffn_down") and more:
        kind = "q6_k"
    elif size == "_m" and part == "attn_qkv":
        kind = {"q4_k": "q5_k", "q5_k": "q6_k"}[kind]
    elif file == "q4_k_s" and ((part == "attn_v" and layer < 4) or (part == "ffn_down" and early)):
        kind = "q5_k"
    if width % TYPES[kind][1]:
        kind = _LESS.get(kind, kind)
    return "f16" if width % 32 else kind


def rotated(rows: Tensor, size: int) -> Tensor:
    """Rows [..., D] times a Walsh-Hadamard matrix, in parts of `size`; its own inverse."""
    matrix = torch.ones(1, 1, dtype=rows.dtype)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=rows.dtype), matrix)
    return (rows.reshape(*rows.shape[:-1], -1, size) @ matrix / math.sqrt(size)).flatten(-2)


def flash(scores: Tensor, value: Tensor) -> Tensor:
    """Softmax of scores [..., F, T] times values [..., T, D], accumulated in float16, a column at a time.

    The softmax takes one pass (Milakov and Gimelshein 2018, arXiv:1805.02867): at each new maximum the sum is scaled
    down and rounded again.
    """
    scores, value = scores.float(), value.float()
    sums = scores.new_zeros(*scores.shape[:-1], value.shape[-1])
    whole, most = sums[..., :1].clone(), torch.full_like(sums[..., :1], -torch.inf)
    for column in range(scores.shape[-1]):
        score = scores[..., column : column + 1]
        seen = score > -torch.inf
        if not bool(seen.any()):
            continue
        first = int(seen.any(-1).flatten(0, -2).any(0).nonzero()[0])  # earlier rows do not attend to it
        rows = slice(first, None)
        score, before = score[..., rows, :], most[..., rows, :]
        after = torch.maximum(before, score)
        less = (before - after).exp().nan_to_num(1.0)  # 1 while nothing is attended to
        share = (score - after).exp().nan_to_num(0.0)
        own = (sums[..., rows, :] * less).half().float()
        sums[..., rows, :] = (own + share * value[..., column : column + 1, :]).half().float()
        whole[..., rows, :] = whole[..., rows, :] * less + share
        most[..., rows, :] = after
    return sums / whole.clamp(min=1e-30)
