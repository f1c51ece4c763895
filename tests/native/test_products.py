"""Our own products: exact, with the same bits in any company, on every instruction set of this CPU."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from genctl.kernels import build, ops
from genctl.kernels.build import OUTDATED, choice
from genctl.kernels.ops import Library
from genctl.native import quantized
from genctl.native.linear import CompiledProduct, CompiledProducts
from tests.cli.tool import genctl
from tests.native import evex
from tests.native.evex import runnable
from tests.warm import python

SIZES = [(1, 1), (5, 3), (67, 33), (130, 96), (300, 257), (513, 800)]  # [O, I]: multiples of nothing, and some
Form = tuple[torch.dtype, bool, "str | None"]
FORMS: list[Form] = [  # how the weight is stored, whether [I, O], its bits
    (torch.float32, False, None),
    (torch.float32, True, None),
    (torch.bfloat16, False, None),
    (torch.bfloat16, True, None),
    (torch.float16, False, None),
    (torch.float16, True, None),
    (torch.float32, False, "int8"),
    (torch.bfloat16, False, "int8"),
    (torch.float32, False, "int4"),
    (torch.bfloat16, False, "int4"),
]


def test_an_installation_has_compiled_them() -> None:
    """`scripts/test` installs first. A checkout that was never installed uses torch's products."""
    if "GENCTL_TEST_INSTALLED" not in os.environ:
        pytest.skip("only after an installation: run scripts/test, or set GENCTL_TEST_INSTALLED=1")
    assert build.is_built(), ops.why_not()


@cache
def variant(name: str) -> Library:
    if os.environ.get("GENCTL_PRODUCTS") or not build.is_built():
        pytest.skip("THE PRODUCTS ARE NOT COMPILED HERE: run python genctl/kernels/build.py")
    if name in runnable():
        return Library(build.HERE / f"{name}.so")
    found = evex.library() if name == "avxvnni" and "avx512" in runnable() else None
    if found is None:
        pytest.skip(f"{name} is not compiled here, or this CPU does not run it: see GENCTL_BUILD in build.py")
    return Library(found)


def plainest() -> Library:
    """The last of the variants that are compiled and run here."""
    names = runnable() if build.is_built() else []
    return variant(names[-1] if names else "")


def loadable() -> list[Library]:
    """All variants that run here, the last one among them."""
    plainest()
    names = runnable()
    if "avxvnni" not in names and "avx512" in names and evex.library():
        names.append("avxvnni")
    return [variant(name) for name in names]


@pytest.fixture(params=list(build.variants()))
def compiled(request: pytest.FixtureRequest) -> Library:
    return variant(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weight(size: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(size[0])
    return (torch.randn(size, generator=generator) / size[1] ** 0.5).to(dtype)


def inputs(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(7)).to(dtype)


def made(found: Library, size: tuple[int, int], form: Form, biased: bool) -> CompiledProduct:
    dtype, in_out, quantize = form
    matrix = weight(size, dtype)
    bias = weight((size[0], 1), dtype).flatten() if biased else None
    return CompiledProduct(found, matrix.t().contiguous().t() if in_out else matrix, bias, quantize)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_float64(compiled: Library, size: tuple[int, int], form: Form) -> None:
    dtype, _, quantize = form
    if quantize == "int4" and size[1] % 32:
        pytest.skip("4 bits have groups of 32")
    x = inputs(40, size[1], dtype)
    for biased in (False, True):
        product = made(compiled, size, form, biased)
        numbers, bias = weight(size, dtype).double(), weight((size[0], 1), dtype).flatten().double()
        if quantize == "int8":
            codes, scales = quantized.int8_codes(weight(size, dtype))
            numbers = codes.double() * scales.double()[:, None]
        elif quantize == "int4":
            four, ranges = quantized.int4_codes(weight(size, dtype))
            groups = (four - 8).double().view(size[0], -1, 32)
            scale, zero = (ranges[..., part].t().double()[..., None] for part in (0, 1))
            numbers = (groups * scale + zero).view(size)
        wanted = F.linear(x.double(), numbers, bias if biased else None)
        y = product(x)
        assert y.dtype == dtype
        close = {torch.float32: 5e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype] + (0.01 if quantize else 0)
        assert (y.double() - wanted).abs().max() < close * wanted.abs().max()


COMPANY = [  # form, size, rows, how many of the first are computed together, numbers of threads
    *((form, size, 40, (*range(1, 20), 25, 33, 40), (1, 2, 3, 4)) for form in FORMS
      for size in ((5, 3), (130, 96), (513, 800), (1700, 64)) if form[2] != "int4" or not size[1] % 32),
    # tiles behind the second, blocks within a part of the inputs, and pieces of fewer columns than there are
    *((form, (300, 800), 100, (5, 18, 23, 40, 66, 100), (1, 9)) for form in FORMS[:8]),
    # a prompt that no cache holds: inputs in blocks, wide strips, a tile of rows that is the last of a group or not
    *((FORMS[n], (70, 2100), 127, (12, 127), (1, 2)) for n in (0, 4)),
    (FORMS[6], (70, 3000), 720, (12, 720), (1, 2)),
    # few rows of many inputs: threads have groups of parts, blocks of inputs or whole rows of a weight
    *((FORMS[n], (150, width), 17, range(2, 18), (1, 2, 3, 5, 9)) for n in (0, 1, 2, 4, 6) for width in (2000, 4501)),
    # tiles of bfloat16 from some number of rows on, and above 32 rows in another order of work
    *((FORMS[n], size, 70, (31, 32, 64, 70), (1, 2, 3, 4)) for n in (2, 3) for size in ((70, 257), (130, 800))),
    *((form, (20, 64), 2100, (2100,), (1,)) for form in FORMS),  # more rows than are taken at once
]  # fmt: skip


@pytest.mark.parametrize(("form", "size", "most", "counts", "threads_of"), COMPANY, ids=str)
@pytest.mark.usefixtures("threads")
def test_a_row_has_the_same_bits_in_any_company(
    compiled: Library, form: Form, size: tuple[int, int], most: int, counts: Sequence[int], threads_of: Sequence[int]
) -> None:
    """Few rows and many are computed differently."""
    product, x = made(compiled, size, form, True), inputs(most, size[1], form[0])
    torch.set_num_threads(1)
    wanted = torch.cat([product(row) for row in x.split(1)])
    for count in threads_of:
        torch.set_num_threads(count)
        for rows in counts:
            assert torch.equal(product(x[:rows]), wanted[:rows])
        assert torch.equal(product(x[16:]), wanted[16:])
        assert torch.equal(product(x.flip(0)), wanted.flip(0))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("size", [(3, 96), (70, 96), (531, 1088)], ids=str)
@pytest.mark.usefixtures("threads")
def test_outputs_in_runs_have_the_bits_of_outputs_side_by_side(
    compiled: Library, size: tuple[int, int], form: Form
) -> None:
    """Which of them is faster depends on who made the CPU; this test does both on any."""
    followed = ctypes.c_int.in_dll(ctypes.CDLL(str(compiled.path)), "follows_runs")
    product, x = made(compiled, size, form, True), inputs(20, size[1], form[0])
    before = followed.value
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (1, 2, 3, 5, 6, 8, 13, 20):
                followed.value = 0
                wanted = product(x[:rows])
                followed.value = 1
                assert torch.equal(product(x[:rows]), wanted)
    finally:
        followed.value = before


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2], FORMS[4]], ids=str)
@pytest.mark.parametrize(("width", "rows"), [(262, 530), (509, 131), (2100, 99)])
@pytest.mark.usefixtures("threads")
def test_transposed_outputs_keep_the_bits(compiled: Library, form: Form, width: int, rows: int) -> None:
    """Chains of a block, blocks of a chain, groups of rows; sums below the smallest number keep their sign, too."""
    x = inputs(rows, width)
    x[:40] *= torch.logspace(-44, 4, 40)[:, None]
    x, some = x.to(form[0]), [*range(44), *range(rows - 20, rows)]
    x[41, width - 1], x[42, 5] = torch.nan, torch.inf
    product = CompiledProduct(compiled, weight((150, width)).mul(1e-2).to(form[0]))
    torch.set_num_threads(1)
    wanted = torch.cat([product(x[row : row + 1]) for row in some])
    bits = torch.int32 if form[0] == torch.float32 else torch.int16
    for count in (1, 3):
        torch.set_num_threads(count)
        y = product(x)[some]
        assert torch.equal(y.isnan(), wanted.isnan())
        assert torch.equal(y.nan_to_num(7.0).view(bits), wanted.nan_to_num(7.0).view(bits))
    few, many = (CompiledProduct(compiled, weight((size, width)).to(form[0])) for size in (3, 150))
    both = CompiledProducts([few, many])(x[44:])  # they read the same x
    assert torch.equal(both[:, :3], few(x[44:]))
    assert torch.equal(both[:, 3:], many(x[44:]))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bits_are_those_of_every_instruction_set(size: tuple[int, int], form: Form) -> None:
    if form[2] == "int4" and size[1] % 32:
        pytest.skip("4 bits have groups of 32")
    x = inputs(40, size[1], form[0]) * torch.logspace(-20, 20, 40)[:, None].to(form[0])
    products = [made(found, size, form, True) for found in loadable()]
    for rows in (17, 40):
        bits = [product(x[:rows]) for product in products]
        for other in bits[1:]:
            assert torch.equal(other.nan_to_num(7.0), bits[0].nan_to_num(7.0))


def test_sums_of_integers_are_exact(compiled: Library) -> None:
    """Numbers whose sums are exact in float32: any wrong lane or tail shows."""
    for size in SIZES:
        matrix = torch.randint(-9, 10, size, generator=torch.Generator().manual_seed(1)).float()
        x = torch.randint(-9, 10, (7, size[1]), generator=torch.Generator().manual_seed(2)).float()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for held in (matrix, matrix.t().contiguous().t()):
                y = CompiledProduct(compiled, held.to(dtype))(x)
                assert torch.equal(y.double(), x.double() @ matrix.double().t())


def test_codes_of_the_largest_size_are_exact(compiled: Library) -> None:
    """Every code is 127 or -127: sums of two products must not be cut off at 16 bits."""
    matrix = torch.ones(8, 1030)
    matrix[::2] = -1
    x = torch.ones(5, 1030)
    assert torch.equal(CompiledProduct(compiled, matrix, None, "int8")(x), x @ matrix.t())


def test_8_bits_have_the_bits_of_the_plain_product(compiled: Library) -> None:
    matrix, x = weight((300, 2801)), inputs(6, 2801)
    x[2], x[3, 5] = 0.0, torch.nan
    wanted, y = quantized.Int8Product(matrix)(x), CompiledProduct(compiled, matrix, None, "int8")(x)
    assert torch.equal(y.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_numbers_that_are_not_finite_stay_in_their_row(compiled: Library, form: Form, bad: float) -> None:
    product, x = made(compiled, (70, 96), form, True), inputs(9, 96, form[0])
    clean = product(x)
    x[4, 95] = bad
    y = product(x)
    assert not y[4].isfinite().any()
    assert torch.equal(torch.cat([y[:4], y[5:]]), torch.cat([clean[:4], clean[5:]]))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 9, 33])
def test_addresses_need_no_alignment(compiled: Library, form: Form, rows: int) -> None:
    dtype, in_out, quantize = form
    width = 96 if quantize == "int4" else 257
    matrix, x = weight((70, width), dtype), inputs(rows, width, dtype)
    shape = (width, 70) if in_out else (70, width)
    shifted = torch.empty(70 * width + 3, dtype=dtype)[3:].view(shape).copy_(matrix.t() if in_out else matrix)
    bias = torch.empty(71, dtype=dtype)[1:].zero_()
    product = CompiledProduct(compiled, shifted.t() if in_out else shifted, bias, quantize)
    moved = torch.empty(rows * width + 1, dtype=dtype)[1:].view(rows, width).copy_(x)
    assert torch.equal(product(moved), made(compiled, (70, width), form, False)(x))


def test_zeros_and_nothing_pass_through(compiled: Library) -> None:
    for form in FORMS:
        product = made(compiled, (70, 96), form, False)
        assert product(torch.zeros(2, 1, 96, dtype=form[0])).abs().max() == 0
        assert product(torch.zeros(0, 1, 96, dtype=form[0])).shape == (0, 1, 70)


def test_without_openmp_their_own_threads_compute_the_same(compiled: Library) -> None:
    code = """
import sys, threading, torch
from pathlib import Path
from genctl.kernels import ops
ops._openmp = lambda: None
found = ops.Library(Path(sys.argv[1]))
from genctl.native.linear import CompiledProduct, CompiledProducts
torch.manual_seed(0)
product, x = CompiledProduct(found, torch.randn(600, 700)), torch.randn(40, 700)
torch.set_num_threads(1)
wanted, bad = product(x), []
torch.set_num_threads(3)
def work():
    bad.extend(rows for rows in range(1, 41) if not torch.equal(product(x[:rows]), wanted[:rows]))
callers = [threading.Thread(target=work) for _ in range(3)]
[one.start() for one in callers]
[one.join() for one in callers]
assert not bad, bad
"""
    done = subprocess.run([*python(), "-c", code, str(compiled.path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plainest()
    choice.cache_clear()
    try:
        monkeypatch.setattr(build, "digest", lambda: "another")
        assert ops.library() is None
        done = genctl("run", "Once", "-n", "1")
        assert done.status == 0
        (line,) = (line for line in done.err.splitlines() if "matrix products" in line)
        assert "torch (the compiled products are older than their sources; python " in line
        command = line.partition("; python ")[2].removesuffix(" compiles them again)")
        assert shlex.split(command) == [str(Path(build.__file__).resolve())]
    finally:
        choice.cache_clear()


def test_a_library_without_a_function_is_older_than_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(path: Path) -> Library:
        raise AttributeError(f"{path}: undefined symbol: softmax")

    plainest()
    for owner, name in ((ops, "Library"), (build, "Cpu")):
        with monkeypatch.context() as patch:
            choice.cache_clear()
            ops._loaded.cache_clear()
            patch.setattr(owner, name, without)
            assert ops.library() is None
            assert ops.why_not() == OUTDATED
    choice.cache_clear()
    ops._loaded.cache_clear()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_products_of_one_call_have_the_bits_of_calls_of_their_own(compiled: Library, form: Form, rows: int) -> None:
    """Like q, k and v of a layer: 130, 300 and 67 outputs of the same x."""
    width = 96
    parts = [made(compiled, (size, width), form, biased=size != 300) for size in (130, 300, 67)]
    assert CompiledProducts.fits(parts)
    x = inputs(rows, width, form[0])
    together = CompiledProducts(parts)(x)
    assert torch.equal(together, torch.cat([part(x) for part in parts], -1))


def test_products_of_several_forms_are_not_one_call(compiled: Library) -> None:
    eight, plain, short = (made(compiled, (67, 96), form, biased=False) for form in (FORMS[6], FORMS[0], FORMS[2]))
    assert not CompiledProducts.fits([plain, eight])
    assert not CompiledProducts.fits([plain, short])
    assert not CompiledProducts.fits([plain] * 5)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_rows_of_another_width_are_refused(quantize: str | None) -> None:
    product = CompiledProduct(loadable()[0], weight((24, 64)), quantize=quantize)
    with pytest.raises(ValueError, match="32 features, the weight 64"):
        product(torch.ones(1, 32))
