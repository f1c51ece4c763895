"""Products with bfloat16 weights: tiles, fused pairs and widened numbers compute the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from genctl.kernels.ops import Library
from genctl.native.linear import CompiledProduct
from tests.native.evex import runnable
from tests.native.test_products import (  # fixtures: compiled, threads
    compiled,
    inputs,
    plainest,
    threads,
    variant,
    weight,
)

__all__ = ["compiled", "threads"]

ROWS = (*range(1, 18), 31, 32, 33, 40, 64, 70)
SIZES = [(1, 1), (17, 31), (37, 256), (70, 257), (130, 800), (64, 1030)]  # [O, I]: around blocks of 256, and others
BFLOAT16 = torch.bfloat16


@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.usefixtures("threads")
def test_sums_of_integers_are_rounded_once(compiled: Library, size: tuple[int, int], in_out: bool) -> None:
    """Sums that are exact in float32: any wrong lane, step or tail shows."""
    generator = torch.Generator().manual_seed(size[1])
    matrix = torch.randint(-9, 10, size, generator=generator).float()
    x = torch.randint(-9, 10, (max(ROWS), size[1]), generator=generator).float()
    bias = torch.randint(-99, 100, (size[0],), generator=generator).float()
    held = (matrix.t().contiguous().t() if in_out else matrix).to(BFLOAT16)
    product = CompiledProduct(compiled, held, bias.to(BFLOAT16))
    wanted = F.linear(x, matrix, bias).to(BFLOAT16)
    for number, rows in enumerate(ROWS):
        torch.set_num_threads(1 + number % 4)
        assert torch.equal(product(x[:rows].to(BFLOAT16)), wanted[:rows])


@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize("exponent", [0, -19, -20, -37])
def test_tiny_numbers_have_the_same_bits_on_every_instruction_set(exponent: int, in_out: bool) -> None:
    """Products or weights around 2^-126: dot products of bfloat16 flush smaller numbers to 0."""
    plainest()
    names = runnable()
    matrix = (weight((130, 800)) * 10.0**exponent).to(BFLOAT16)
    x = inputs(40, 800, BFLOAT16) * torch.logspace(-20, 0, 40)[:, None].to(BFLOAT16)
    held = matrix.t().contiguous().t() if in_out else matrix
    products = [CompiledProduct(variant(name), held) for name in names]
    for rows in (1, 3, 40):
        first, *others = (product(x[:rows]).view(torch.int16) for product in products)
        assert all(torch.equal(other, first) for other in others)


def test_the_mode_of_the_cpu_stays_as_it_was(compiled: Library) -> None:
    """Only these products flush numbers below 2^-126 to 0."""
    CompiledProduct(compiled, weight((70, 96), BFLOAT16))(inputs(9, 96, BFLOAT16))
    tiny = torch.tensor([1e-40])
    assert (tiny * torch.tensor([0.5])).item() > 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [1, 5, 9, 33])
@pytest.mark.parametrize("in_out", [False, True])
def test_a_weight_that_is_not_finite_spoils_its_output_alone(
    compiled: Library, bad: float, rows: int, in_out: bool
) -> None:
    matrix, x = weight((70, 96), BFLOAT16), inputs(rows, 96, BFLOAT16)
    clean = CompiledProduct(compiled, matrix)(x) if not in_out else None
    matrix[33, 95] = bad
    held = matrix.t().contiguous().t() if in_out else matrix
    y = CompiledProduct(compiled, held)(x)
    assert not y[:, 33].isfinite().any()
    others = [output for output in range(70) if output != 33]
    assert y[:, others].isfinite().all()
    if clean is not None:
        assert torch.equal(y[:, others], clean[:, others])


def test_rows_of_other_types_keep_their_digits(compiled: Library) -> None:
    """Rows of float32 are not rounded to bfloat16, however many there are."""
    matrix, x = weight((70, 257), BFLOAT16), inputs(40, 257)
    wanted = x.double() @ matrix.double().t()
    product = CompiledProduct(compiled, matrix)
    y = product(x)
    assert (y.double() - wanted).abs().max() < 1e-6 * wanted.abs().max()
    assert torch.equal(torch.cat([product(row) for row in x.split(1)]), y)
