"""If nothing is compiled, torch multiplies: every form computes the same as the plain one.

Our own products are tested in test_products.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from genctl.native import linear, quantized
from genctl.native.blocks import BlocksPlain
from genctl.native.linear import Linear, Plain, Products


@pytest.fixture(autouse=True)
def products_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing were compiled."""
    monkeypatch.setattr(linear, "library", lambda: None)


SHAPES = [(512, 768), (768, 512), (544, 512)]  # [O, I], and 544 is no multiple of 64
INPUTS = [(1, 1), (1, 7), (5, 1), (3, 40)]  # rows, tokens


def weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return (torch.randn(shape, generator=generator) / shape[1] ** 0.5).to(dtype)


def inputs(width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*size, width, generator=generator).to(dtype) for size in INPUTS]


def error(product: Linear, matrix: Tensor, bias: Tensor | None) -> float:
    """The largest difference from the product in float64, relative to the largest number."""
    worst = 0.0
    for x in inputs(matrix.shape[1], matrix.dtype):
        wanted = F.linear(x.double(), matrix.double(), None if bias is None else bias.double())
        y = product(x)
        assert y.shape == wanted.shape
        assert y.dtype == x.dtype
        worst = max(worst, float((y.double() - wanted).abs().max() / wanted.abs().max()))
    return worst


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("quantize", "dtype", "close"),
    [
        (None, torch.float32, 3e-6),  # MKL sums one token of a transposed weight in one chain
        (None, torch.bfloat16, 1e-2),
        (None, torch.float16, 2e-3),
        ("int8", torch.float32, 0.03),
        ("int8", torch.bfloat16, 0.03),
        ("int4", torch.float32, 0.2),
        ("int4", torch.bfloat16, 0.2),
    ],
)
def test_every_form_computes_nearly_the_plain_product(
    quantize: str | None, dtype: torch.dtype, close: float, shape: tuple[int, int], biased: bool
) -> None:
    matrix = weight(shape, dtype)
    before = matrix.clone()
    bias = weight((shape[0], 1), dtype).flatten() if biased else None
    assert error(Products(quantize).linear(matrix, bias), matrix, bias) < close
    transposed = matrix.t().contiguous().t()  # as GPT-2 stores it
    assert error(Products(quantize).linear(transposed, bias), matrix, bias) < close
    assert torch.equal(matrix, before)  # it is mapped from a file: nothing may write to it


def test_which_form_runs() -> None:
    matrix = weight((512, 768))
    assert isinstance(Products().linear(matrix), Plain)
    assert isinstance(Products("int8").linear(matrix), quantized.Int8Product)
    assert isinstance(Products("int4").linear(matrix), BlocksPlain)
    assert isinstance(Products("int4").linear(matrix[:, :50]), quantized.Int8Product)  # no whole groups of 32
    assert isinstance(Products("int4").head(matrix), quantized.Int8Product)


def test_codes_do_not_depend_on_where_a_weight_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in slices, as GPT-2 stores it. Sums have one order, so a GPU gets the same codes."""
    matrix = weight((96, 160))
    codes, scales = quantized.int4_codes(matrix)
    for other in (matrix.t().contiguous().t(), matrix[::2]):
        found, ranges = quantized.int4_codes(other)
        step = len(matrix) // len(other)
        assert torch.equal(found, codes[::step])
        assert torch.equal(ranges, scales[:, ::step])
    monkeypatch.setattr(quantized, "AT_ONCE", 160)
    found, ranges = quantized.int4_codes(matrix)
    assert torch.equal(found, codes)
    assert torch.equal(ranges, scales)
    total = matrix[0, :32]
    for half in (16, 8, 4, 2, 1):  # the order of the sums, written out
        total = total[:half] + total[half:]
    assert torch.equal(quantized._sum(matrix[:1, :32])[0], total)


def test_what_is_not_compiled_computes_with_the_same_codes() -> None:
    """4 bits: the codes and ranges of the compiled product, and rows that are not rounded."""
    matrix = weight((96, 160)).bfloat16()
    codes, scales = quantized.int4_codes(matrix)
    groups = (codes - 8).float().view(96, -1, quantized.GROUP)
    numbers = groups * scales[..., 0].t().float()[..., None] + scales[..., 1].t().float()[..., None]
    x = torch.randn(3, 1, 160)
    made = Products("int4").linear(matrix, torch.ones(96))
    torch.testing.assert_close(made(x), F.linear(x, numbers.flatten(1), torch.ones(96)))


def test_joined_products_are_the_single_ones() -> None:
    matrices = [weight((512, 768)), weight((544, 768)), weight((576, 768))]
    biases = [weight((len(matrix), 1)).flatten() for matrix in matrices]
    for quantize, close in ((None, 1e-6), ("int8", 0.03), ("int4", 0.2)):
        joined = Products(quantize).joined(*zip(matrices, biases, strict=True))
        for x in inputs(768):
            for y, matrix, bias in zip(joined(x), matrices, biases, strict=True):
                wanted = F.linear(x, matrix, bias)
                assert (y - wanted).abs().max() < close * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [2, 5, 13, 33])
def test_a_row_in_8_bits_does_not_depend_on_its_neighbours(rows: int, dtype: torch.dtype) -> None:
    made = quantized.Int8Product(weight((512, 2800), dtype), weight((512, 1), dtype).flatten())
    x = torch.randn(rows, 1, 2800).to(dtype) * torch.logspace(-3, 3, rows)[:, None, None].to(dtype)
    together, apart = made(x), torch.cat([made(row[None]) for row in x])
    assert torch.equal(together, apart)


def test_int8_codes_are_within_half_a_step() -> None:
    matrix = weight((50, 64)) * torch.logspace(-6, 3, 50)[:, None]
    matrix[7] = 0.0
    codes, scales = quantized.int8_codes(matrix)
    steps = scales[:, None]
    assert ((codes.float() * steps - matrix).abs() <= steps * 0.51).all()
    assert (steps[:, 0] <= matrix.abs().amax(1) / 127 * 1.01).all()


def test_int4_ranges_are_better_than_least_and_largest() -> None:
    matrix = weight((512, 768))
    errors = []
    for rounds in (0, quantized.ROUNDS):
        before, quantized.ROUNDS = quantized.ROUNDS, rounds
        codes, scales = quantized.int4_codes(matrix)
        quantized.ROUNDS = before
        groups = (codes - 8).float().view(512, -1, quantized.GROUP)
        scale, zero = (scales[..., part].t().float()[..., None] for part in (0, 1))
        errors.append(float((groups * scale + zero - matrix.view_as(groups)).square().mean()))
        assert codes.min() >= 0
        assert codes.max() <= 15
    assert errors[1] < 0.92 * errors[0]


def test_equal_numbers_stay_equal_in_4_bits() -> None:
    codes, scales = quantized.int4_codes(torch.full((16, 64), 0.5))
    groups = (codes - 8).float().view(16, -1, quantized.GROUP)
    assert (groups * scales[..., 0].t().float()[..., None] + scales[..., 1].t().float()[..., None] == 0.5).all()
