"""Products that torch has and does not list.

Each is tried once, with numbers that show whether it is exact on this CPU, before anything relies on it. A caller that
is told False computes a plain product. `KERNELS` names all of them, for `-v` and for the tests.

N rows, I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from genctl import compat

GROUP = 32  # features that share a scale in `int4`
_FAILURES = (RuntimeError, NotImplementedError, TypeError)  # TypeError: the operator is None, or takes other arguments


def _works(trial: Callable[[], bool]) -> bool:
    try:
        return trial()
    except _FAILURES:
        return False


# -- oneDNN: float32 and bfloat16 --------------------------------------------------------------------------------------


@cache
def has_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this type on this CPU."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False

    def trial() -> bool:
        if dtype == torch.bfloat16 and not compat.onednn_has_bfloat16()():
            return False  # it would compute by its reference code, hundreds of times slower
        weight, x = torch.ones(32, 32, dtype=dtype), torch.ones(2, 32, dtype=dtype)
        plain = onednn(x, weight, None) == 32
        return bool(plain.all() and (onednn(x, onednn_packed(weight), None) == 32).all())

    return _works(trial)


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I] -> [..., O]. The weight [O, I] is plain, or what `onednn_packed` makes of it."""
    y: Tensor = compat.onednn_linear()(x, weight, bias, "none", [], "")
    return y


def onednn_packed(weight: Tensor) -> Tensor:
    """A weight [O, I] in the blocks that a product of any number of rows reads fastest. A copy."""
    # no number of rows is given: the layout for one row is slower with two and more
    packed: Tensor = compat.onednn_reorder_weight()(weight, None)
    return packed


# -- MKL: float32 as it lies in a file of [in, out] --------------------------------------------------------------------


def has_columns(dtype: torch.dtype) -> bool:
    """Whether `columns` is fast here: its product is MKL's."""
    return dtype == torch.float32 and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


def columns(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One token x [1, 1, I] -> [1, 1, O]. The weight [O, I] is the transpose of a contiguous one.

    MKL computes such a product in one thread. So its inputs are cut into a block for each: every thread reads one
    stretch of memory, and their sums are added up.
    """
    features, into = weight.shape
    blocks = next(count for count in range(torch.get_num_threads(), 0, -1) if into % count == 0)
    if blocks == 1:
        return F.linear(x, weight, bias)
    parts = torch.bmm(x.view(blocks, 1, into // blocks), weight.t().view(blocks, into // blocks, features))
    y = parts.sum(0, keepdim=True)
    return y if bias is None else y.add_(bias)


# -- FBGEMM: float16 ---------------------------------------------------------------------------------------------------


@cache
def has_float16() -> bool:
    """Whether FBGEMM multiplies float32 rows with float16 weights on this CPU."""

    def trial() -> bool:
        packed = float16_packed(torch.full((32, 32), 0.5, dtype=torch.float16), None)
        return bool((float16(torch.ones(2, 32), packed) == 16).all())

    return _works(trial)


def float16(x: Tensor, packed: object) -> Tensor:
    """x float32 [N, I] -> float32 [N, O]; sums are float32."""
    y: Tensor = compat.fbgemm_float16_linear()(x, packed)
    return y


def float16_packed(weight: Tensor, bias: Tensor | None) -> object:
    """A weight [O, I], rounded to float16, and its bias, in FBGEMM's panels."""
    wide = torch.empty(weight.shape).copy_(weight)  # transposed here if need be: a second copy is not made
    packed: object = compat.fbgemm_float16_prepack()(wide, None if bias is None else bias.float())
    return packed


# -- FBGEMM: int8 ------------------------------------------------------------------------------------------------------


@cache
def has_int8() -> bool:
    """Whether FBGEMM's 8-bit product is exact here: without VNNI its sums of two products are cut off at 32,767."""

    def trial() -> bool:
        packed = int8_packed(torch.full((32, 64), 127, dtype=torch.int8), torch.ones(32))
        return bool((int8(torch.full((2, 64), 127.0), packed) == 64 * 127 * 127).all())

    return _works(trial)


def int8(x: Tensor, packed: object) -> Tensor:
    """x float32 [N, I] from -127 to 127, rounded to whole numbers -> float32 [N, O]: exact sums, times the scales."""
    y: Tensor = compat.fbgemm_int8_linear()(x, 1.0, 128, packed)
    return y


def int8_packed(codes: Tensor, scales: Tensor) -> object:
    """Codes int8 [O, I] in FBGEMM's panels, with the scale of each output [O]."""
    packed: object = compat.fbgemm_int8_prepack()(codes, scales)
    return packed


# -- int4 --------------------------------------------------------------------------------------------------------------


@cache
def has_int4() -> bool:
    """Whether torch multiplies bfloat16 rows with 4-bit weights on this CPU."""

    def trial() -> bool:
        codes = torch.full((64, 64), 9, dtype=torch.int32)
        scales = torch.tensor([2.0, 1.0], dtype=torch.bfloat16).expand(64 // GROUP, 64, 2).contiguous()
        y = int4(torch.ones(2, 64, dtype=torch.bfloat16), int4_packed(codes), scales)
        return bool((y == 64 * 3).all())

    return _works(trial)


def int4(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """x bfloat16 [N, I] -> bfloat16 [N, O]. scales bfloat16 [I / 32, O, 2]: a code c means (c - 8) · scale + zero."""
    y: Tensor = compat.int4_linear()(x, packed, GROUP, scales)
    return y


def int4_packed(codes: Tensor) -> Tensor:
    """Codes int32 [O, I] from 0 to 15, two in a byte. O is a multiple of 16, I of 32."""
    packed: Tensor = compat.int4_prepack()(codes, 1)
    return packed


KERNELS: dict[str, Callable[[], bool]] = {
    "oneDNN float32": lambda: has_onednn(torch.float32),
    "oneDNN bfloat16": lambda: has_onednn(torch.bfloat16),
    "FBGEMM float16": has_float16,
    "FBGEMM int8": has_int8,
    "torch int4 weights": has_int4,
}
