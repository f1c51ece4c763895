"""Blocks of GGUF files: the numbers of the gguf package; products that are exact, with the same bits everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from genctl.kernels import ops
from genctl.kernels.ops import Library
from genctl.native import linear
from genctl.native.blocks import KINDS, Blocks, BlocksPlain, Embeddings
from genctl.native.linear import CompiledProduct, Products
from tests.native import test_products
from tests.native.test_products import loadable
from tests.native.test_products import plainest as plainest_library

numpy = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")
compiled, threads = test_products.compiled, test_products.threads  # fixtures
SIZES = [(1, 32), (5, 64), (67, 96), (130, 256), (513, 800), (33, 512)]  # [O, I]
SHORT = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}  # offsets of float16 numbers


def fitting(kind: str) -> list[tuple[int, int]]:
    return [size for size in SIZES if size[1] % KINDS[kind].numbers == 0]


def blocks(kind: str, size: tuple[int, int]) -> Blocks:
    """Random bytes, so that every code occurs; float16 numbers of a sensible size."""
    random, how = numpy.random.default_rng(size[0]), KINDS[kind]
    raw = random.integers(0, 256, (size[0], size[1] // how.numbers, how.bytes), dtype=numpy.uint8)
    for at in SHORT.get(kind, (0,)):
        numbers = random.standard_normal((*raw.shape[:2], 1)) / 50
        raw[..., at : at + 2] = numbers.astype(numpy.float16).view(numpy.uint8)
    return Blocks(kind, torch.from_numpy(raw.reshape(size[0], -1)), size[1])


def inputs(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(3))


def coded(x: Tensor) -> Tensor:
    """x [N, I], each group of 32 numbers rounded to 127 steps of its largest; float64."""
    groups = x.view(len(x), -1, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    return ((groups * (torch.tensor(127.0) / largest)).round().double() * (largest / 127).double()).flatten(1)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_gguf_package(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    assert gguf.GGML_QUANT_SIZES[type_] == (KINDS[kind].numbers, KINDS[kind].bytes)
    for size in fitting(kind):
        held = blocks(kind, size)
        wanted = torch.from_numpy(gguf.quants.dequantize(held.raw.numpy(), type_))
        assert torch.equal(held.numbers(), wanted)
        assert torch.equal(held.numbers(slice(1, 4)), wanted[1:4])
        tokens = torch.tensor([[0, size[0] - 1], [size[0] // 2, 0]])
        for found in (*loadable(), None):
            monkeypatch.setattr(ops, "library", lambda found=found: found)
            assert torch.equal(Embeddings(held, torch.float32).rows(tokens), wanted[tokens])
            for beyond in (-1 - size[0], size[0]):
                with pytest.raises(IndexError):
                    Embeddings(held, torch.float32).rows(torch.tensor([[0, beyond]]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_takes_as_many_bits_of_memory_as_of_the_file(compiled: Library, kind: str) -> None:
    held = blocks(kind, (48, 512))
    assert sum(tensor.nbytes for tensor in CompiledProduct(compiled, held).tensors()) == held.raw.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_float64(compiled: Library, kind: str) -> None:
    for size in fitting(kind):
        held, bias = blocks(kind, size), torch.arange(size[0]) / size[0]
        x, numbers = coded(inputs(17, size[1])), held.numbers().double()
        for biased in (False, True):
            y = CompiledProduct(compiled, held, bias if biased else None)(inputs(17, size[1]))
            wanted = torch.nn.functional.linear(x, numbers, bias.double() if biased else None)
            largest = (x.abs() @ numbers.abs().t()).max() + 1
            assert (y - wanted).abs().max() < 1e-7 * largest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("threads")
def test_a_row_has_the_same_bits_in_any_company(compiled: Library, kind: str) -> None:
    for size in fitting(kind)[-2:]:
        product, x = CompiledProduct(compiled, blocks(kind, size)), inputs(50, size[1])
        torch.set_num_threads(1)
        wanted = torch.cat([product(row) for row in x.split(1)])
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            for rows in (*range(1, 18), 24, 31, 33, 50):  # few rows and many are computed differently
                assert torch.equal(product(x[:rows]), wanted[:rows])


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_every_instruction_set(kind: str) -> None:
    plainest = plainest_library()
    for size in fitting(kind):
        held, x = blocks(kind, size), inputs(33, size[1]) * torch.logspace(-20, 20, 33)[:, None]
        x[3], x[5, 7], x[6, 31] = 0.0, torch.nan, torch.inf
        first, *others = (CompiledProduct(found, held)(x) for found in loadable())
        assert not first[5:7].isfinite().any()
        alone = [CompiledProduct(plainest, held)(row) for row in x[:5].split(1)]
        assert torch.equal(first[:5], torch.cat(alone))
        assert all(torch.equal(other.nan_to_num(7.0), first.nan_to_num(7.0)) for other in others)


def test_the_largest_codes_are_exact(compiled: Library) -> None:
    """-128 and 127: sums of two products do not fit into 16 bits, which would cut them off."""
    cases = [("Q8_0", 128), ("Q8_0", 127), *((kind, code) for kind in KINDS if kind != "Q8_0" for code in (0, 255))]
    for kind, code in cases:
        held = blocks(kind, (48, 1024))
        raw, at = held.raw.view(48, -1, held.how.bytes), held.how.halves
        raw[:] = code
        for half in range(at, at + (2 if held.how.scales in ("halves", "sixteens") else 4), 2):
            raw[..., half : half + 2] = torch.tensor([0, 60], dtype=torch.uint8)  # 1
        x = torch.ones(3, 1024)
        x[1], x[2, ::2] = -1.0, -1.0
        wanted = held.numbers().sum(1).double()
        y = CompiledProduct(compiled, held)(x).double()
        close = 1e-4 + 1e-6 * held.numbers().abs().sum(1).max()
        assert (y - torch.stack([wanted, -wanted, torch.zeros(48)])).abs().max() < close


@pytest.mark.parametrize("kind", KINDS)
def test_other_types_of_x_are_read(compiled: Library, kind: str) -> None:
    held = blocks(kind, fitting(kind)[-1])
    for dtype in (torch.bfloat16, torch.float16):
        x = inputs(4, held.width).to(dtype)
        y = CompiledProduct(compiled, held)(x)
        assert y.dtype == dtype
        assert torch.equal(y, CompiledProduct(compiled, held)(x.float()).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_is_compiled_they_are_unpacked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held, x = blocks(kind, fitting(kind)[-1]), inputs(3, 512)
    x = x[:, : held.width]
    plain = BlocksPlain(held, coded=True)
    wanted = coded(x) @ held.numbers().double().t()
    assert (plain(x) - wanted).abs().max() < 2e-3 * wanted.abs().max()  # a tie may be rounded to the other code
    monkeypatch.setattr(linear, "library", lambda: None)
    product = Products("gguf").linear(held)
    assert isinstance(product, BlocksPlain)
    assert not product.coded
    exact = x.double() @ held.numbers().double().t()
    assert (product(x) - exact).abs().max() < 1e-5 * exact.abs().max()


def test_products_of_one_x_may_have_several_forms(compiled: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "library", lambda: compiled)
    x, made = inputs(3, 256), Products("gguf")
    parts: list[Any] = [blocks("Q4_K", (40, 256)), blocks("Q4_K", (24, 256)), blocks("Q6_K", (24, 256))]
    for chosen in (parts[:2], parts):
        joined = made.joined(*((part, None) for part in chosen))
        assert (joined.one is not None) == (len(chosen) == 2), "one call for products of one form"
        for y, part in zip(joined(x), chosen, strict=True):
            assert torch.equal(y, made.linear(part)(x))
    assert joined.form == f"Q4_K by {compiled.variant} and Q6_K by {compiled.variant}"
