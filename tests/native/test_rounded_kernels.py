"""Weights in 8 and 4 bits in the Triton kernels: the numbers of the CPU library (see `test_kernels`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.runtime import Pass
from genctl.decode.types import Lane
from genctl.kernels.ops import library
from genctl.native.kernel_pass import power
from genctl.native.linear import CompiledProduct, Products
from genctl.native.quantized import Int4Product, Int8Product, on_gpu
from genctl.native.runtime import NativeRuntime
from genctl.strategies.assisted import Assisted
from genctl.strategies.drafters import PromptLookup
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.native.test_generate import PROMPTS
from tests.native.test_graphs import read
from tests.native.test_kernels import DEVICE, EACH, ONCE, graphed
from tests.native.variations import model
from tests.tiny import EOS, LAYERS

compiled = pytest.mark.skipif(library() is None, reason="needs the compiled products")
EXACT, CLOSE = 0.0, 1e-6  # of the largest number
OUTPUTS = 48
# inputs: no whole tile, an odd number of groups, one group, whole tiles
SHAPES = [("int8", 80), ("int8", 1152), ("int4", 96), ("int4", 32), ("int4", 256)]


def both(
    kind: str, inputs: int, *, outputs: int = OUTPUTS, bias: bool = True
) -> tuple[Callable[[Tensor], Tensor], Int8Product | Int4Product]:
    """The library's product on the CPU, or torch's if nothing is compiled, and the kernels' of the same weight."""
    found = library()
    torch.manual_seed(inputs)
    weight, offsets = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs) if bias else None
    moved = None if offsets is None else offsets.to(DEVICE)
    ours = on_gpu(kind, weight.to(DEVICE), moved, by_kernels=True)
    if found is None:
        return on_gpu(kind, weight, offsets, by_kernels=False), ours
    return CompiledProduct(found, weight, offsets, quantize=kind), ours


def rounded(product: Int8Product | Int4Product, x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [T, I]."""
    from genctl.kernels import forms

    tokens, width = x.shape
    group = 32 if product.kind == "int4" else width
    codes = torch.full((tokens, width), 55, dtype=torch.int8, device=DEVICE)
    scales = torch.full((2, tokens, width // group), torch.nan, device=DEVICE)
    shape: dict[str, Any] = {"GROUP": group, "W": power(group), "B": 4 if group == 32 else 1}
    grid = tokens, -(-width // (group * shape["B"]))
    forms.round_x[grid](x, codes, scales, tokens, width, FORM=product.kind, PDL=False, **shape)
    return codes, scales


def by_kernel(
    product: Int8Product | Int4Product, x: Tensor, *, splits: int = 1, inputs: int = 64, rest: Tensor | None = None
) -> Tensor:
    """[T, I] -> [T, O]."""
    from genctl.kernels import cuda

    x = x.to(DEVICE)
    tokens, width, outputs = *x.shape, product.size
    tiles, piece = -(-tokens // 16), -(-width // (splits * inputs)) * inputs
    out = torch.full((tokens, outputs), torch.nan, device=DEVICE)
    parts, counts = out.repeat(splits, 1, 1), torch.zeros(4 * tiles, dtype=torch.int32, device=DEVICE)
    bias, rest = out if product.wide_bias is None else product.wide_bias, out if rest is None else rest
    codes, x_scales = rounded(product, x)
    cuda.product[(tiles, -(-outputs // 32), splits)](
        *(codes, product.weight, product.scales, bias, rest, out, out, x_scales, out, out, out, parts, counts),
        *(tokens, outputs, width, piece, 2, 1e-6, 1.0),
        **{"NORM": False, "BIAS": product.wide_bias is not None, "REST": rest is not out, "NEXT": False},
        **{"S": splits, "P": 2, "N": 32, "M": 16, "K": inputs, "EVEN": width % inputs == 0, "AHEAD": 0, "PDL": False},
        FORM=product.kind,
        SHORT=cuda.KINDS[x.dtype],
        TIMES=1,
    )
    assert not counts.any()
    return out.cpu()


def rows(tokens: int, inputs: int) -> Tensor:
    """Among them a group of zeros, and of numbers that are too small to be scaled."""
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(tokens))
    x[0, :32] = 0.0
    x[-1, -32:] *= 1e-30
    return x


def close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert (found.float() - wanted.float()).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("tokens", [1, 18])
@pytest.mark.parametrize(("kind", "inputs"), SHAPES)
def test_a_product_is_the_librarys(kind: str, inputs: int, tokens: int) -> None:
    """In 8 bits to the last bit, also in pieces; in 4 bits where groups are added one after another."""
    wanted, product = both(kind, inputs)
    x = rows(tokens, inputs)
    exact = kind == "int8" or (DEVICE == "cpu" and library() is not None)
    close(by_kernel(product, x), wanted(x), EXACT if exact else CLOSE)
    close(by_kernel(product, x, splits=2), wanted(x), EXACT if kind == "int8" else CLOSE)
    close(by_kernel(product, x, inputs=128), wanted(x), EXACT if exact else CLOSE)
    close(product(x.to(DEVICE)).cpu(), wanted(x), CLOSE)  # by torch, if states are requested


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_half_numbers_biases_and_sums_are_the_librarys(kind: str) -> None:
    wanted, product = both(kind, 96, bias=False)
    x, rest = rows(3, 96).half(), torch.randn(3, OUTPUTS)
    close(by_kernel(product, x, rest=rest.to(DEVICE)), (wanted(x.float()) + rest).half(), CLOSE if library() else 1e-3)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_row_has_the_same_bits_alone(kind: str) -> None:
    _, product = both(kind, 160)
    x = rows(18, 160)
    many = by_kernel(product, x, splits=2)
    for row in (0, 7, 17):
        assert torch.equal(by_kernel(product, x[row : row + 1], splits=2)[0], many[row])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_number_that_is_not_finite_is_seen_in_its_row_alone(kind: str, bad: float) -> None:
    wanted, product = both(kind, 96)
    x = rows(3, 96)
    found = by_kernel(product, torch.cat([x, x[:1].clone().index_fill_(1, torch.tensor([40]), bad)]))
    assert found[3].isnan().all()
    close(found[:3], wanted(x), CLOSE)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_gate_and_up_are_the_librarys(kind: str, splits: int) -> None:
    """40 gates, which no tile divides."""
    from genctl.kernels import cuda

    size, inputs, tokens = 40, 160, 3
    wanted, product = both(kind, inputs, outputs=2 * size)
    x = rows(tokens, inputs).to(DEVICE)
    out, parts = (torch.full((n, tokens, size), torch.nan, device=DEVICE) for n in (1, 2 * splits))
    counts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    codes, x_scales = rounded(product, x)
    squares = torch.full((2, tokens), inputs / 2, device=DEVICE)  # a norm that scales by 1
    cuda.gated[(1, 2, splits)](
        *(codes, product.weight, product.scales, product.wide_bias, squares, x_scales, out, parts, counts),
        *(tokens, size, inputs, -(-inputs // (splits * 64)) * 64, 2, 1e-9),
        **{"ACT": "silu", "BIAS": True, "S": splits, "P": 2, "N": 32, "M": 16, "K": 64, "EVEN": False, "AHEAD": 0},
        **{"FORM": kind, "PDL": False, "TIMES": 1},
    )
    gate, up = wanted(x.cpu()).split(size, 1)
    close(out[0].cpu(), F.silu(gate) * up, 1e-5)
    assert not counts.any()


@compiled
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gemma2"])
def test_a_step_gives_the_logits_of_the_cpu(name: str, kind: str) -> None:
    """Rows padded on the left. The kernels compute every product of the prompt and of the step.

    Other last digits before a product may change a code of x by one.
    """
    plain = runtimes.native(model(name), products=Products(kind))
    fast = graphed(name, quantize=kind)
    caches = {}
    for runtime in (plain, fast):
        caches[runtime], mask, logits = read(runtime, PROMPTS)
    feed, mask = logits.argmax(-1, keepdim=True).cpu(), F.pad(mask.cpu(), (0, 1), value=1)
    given = {"mask": mask, "positions": mask.sum(-1, keepdim=True) - 1}
    wanted, found = (
        runtime(
            Pass(feed.to(runtime.device), caches[runtime], **{k: v.to(runtime.device) for k, v in given.items()})
        ).logits.cpu()
        for runtime in (plain, fast)
    )
    close(found, wanted, 1e-4)
    assert fast.graphs is not None
    assert fast.graphs.kernels is not None
    assert fast.graphs.kernels.launches == 2 * ((EACH + 4 + (2 if name == "gemma2" else 0)) * LAYERS + ONCE + 1)


def written(runtime: NativeRuntime, strategy: Any) -> list[list[int]]:
    told = list(decode(runtime, [Lane("0", PROMPTS[0], strategy, 4, eos=(EOS,))], width=1))
    assert not [event for event in told if isinstance(event, events.Failed)]
    return [list(h.tokens) for e in told if isinstance(e, events.Finished) for h in e.hypotheses]


@compiled
@pytest.mark.parametrize(
    ("name", "kind", "strategy"),
    [
        *((name, kind, Sample()) for name in ("llama", "qwen2", "mistral", "gemma2") for kind in ("int8", "int4")),
        *(("mistral", kind, Assisted(PromptLookup(3))) for kind in ("int8", "int4")),
    ],
)
def test_the_loop_writes_what_the_cpu_writes(name: str, kind: str, strategy: Any) -> None:
    fast = graphed(name, quantize=kind)
    assert written(fast, strategy) == written(runtimes.native(model(name), products=Products(kind)), strategy)
    assert fast.graphs is not None
    assert fast.graphs.kernels is not None
    assert fast.graphs.kernels.launches > 0


def test_packed_codes_are_those_of_the_cpu() -> None:
    """An odd number of groups; a scale and a zero of each lie in one word."""
    from genctl.native.quantized import int4_bytes, int4_codes

    weight = torch.randn(5, 96)
    codes, scales = int4_codes(weight)
    made = Int4Product(weight.to(DEVICE), None, by_kernels=True)
    scale, zero = scales.float().transpose(0, 1).repeat_interleave(32, 1).unbind(-1)
    assert torch.equal(made.numbers(slice(None)).cpu(), (codes - 8) * scale + zero)
    assert sum(tensor.nbytes for tensor in made.tensors()) == int4_bytes(5, 96, "cuda")
