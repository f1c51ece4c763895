"""Log-probabilities of the native runtime have equal bits: alone, in any batch, with any number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import genctl
from genctl import events
from genctl.decode.loop import decode
from genctl.decode.types import Lane
from genctl.kernels import build, ops
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.native.evex import runnable
from tests.native.test_products import variant
from tests.native.variations import FAMILIES, model
from tests.tiny import EOS

PROMPTS = [
    tuple(torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist())
    for length in (6, 70, 17, 11, 33)
]
NEW = 8


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    variant(next(iter(build.variants())) if ops.library() is None else ops.library().variant)  # type: ignore[union-attr]
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def written(name: str, width: int, count: int) -> dict[str, Any]:
    """Tokens and log-probabilities of greedy and sampled rows and of beams."""
    torch.set_num_threads(count)
    lanes = [Lane(f"greedy {n}", prompt, Sample(), NEW, eos=(EOS,)) for n, prompt in enumerate(PROMPTS)]
    lanes += [
        Lane(f"sampled {n}", prompt, Sample(True, 2), NEW, eos=(EOS,), seed=n) for n, prompt in enumerate(PROMPTS)
    ]
    lanes += [Lane(f"beams {n}", prompt, Beam(3), NEW, eos=(EOS,), returned=3) for n, prompt in enumerate(PROMPTS[:3])]
    told = list(decode(runtimes.native(model(name)), lanes, width=width))
    assert not [event for event in told if isinstance(event, events.Failed)]
    return {
        event.lane: [(one.tokens, one.logprob) for one in event.hypotheses]
        for event in told
        if isinstance(event, events.Finished)
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_has_its_bits_in_any_batch_and_with_any_threads(name: str) -> None:
    alone = written(name, 1, 1)
    assert len(alone) == 13
    assert written(name, 13, 2) == alone
    assert written(name, 4, 4) == alone


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_types_have_their_bits_in_any_batch(dtype: str, quantize: str | None) -> None:
    if dtype == "float16" and quantize:
        pytest.skip("--quantize computes in float32 or bfloat16")
    settings = {"dtype": dtype, "quantize": quantize, "runtime": "native"}
    made = genctl.load(**{key: value for key, value in settings.items() if value})
    prompts = ["Once upon a time", "The little fox", "One day, a girl named Lily found a big red ball", "It"]
    options = {"max_new_tokens": 12, "do_sample": True, "top_p": 0.95, "seed": 3}
    torch.set_num_threads(2)
    together = [(one.token_ids, one.logprob) for row in made.generate(prompts, **options) for one in row.sequences]
    torch.set_num_threads(1)
    assert len(together) == 4
    for place, count in ((0, 1), (0, 2), (0, 3)):
        rows = made.generate(prompts[place : place + count], **options)
        assert [(one.token_ids, one.logprob) for row in rows for one in row.sequences] == together[
            place : place + count
        ]


RUN = """
import genctl
model = genctl.load()
prompts = ["Once upon a time", "The little fox", "One day, a girl named Lily found a big red ball"]
for settings in ({}, {"do_sample": True, "top_p": 0.9}, {"num_beams": 3}):
    for one in model.generate(prompts, max_new_tokens=12, seed=3, **settings):
        print([(row.token_ids, row.logprob.hex()) for row in one.sequences])
"""


def test_runs_have_the_same_bits_on_every_instruction_set() -> None:
    """Greedy, sampled and with beams; torch is limited to kernels as plain as the products."""
    written = {}
    for name in runnable():
        environment = {**os.environ, "GENCTL_PRODUCTS": name, "OMP_NUM_THREADS": "2" if name == "avx512" else "1"}
        environment["ATEN_CPU_CAPABILITY"] = name if name in ("avx512", "avx2") else "default"
        done = subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        written[name] = done.stdout
    first, *others = written.values()
    assert first.count("\n") == 9
    assert all(other == first for other in others)


# -- the functions between the products ------------------------------------------------------------------------------


def units(y: torch.Tensor, true: torch.Tensor) -> float:
    """The largest error in units of the last place."""
    near = true.float().abs()
    return float(((y.double() - true).abs() / (torch.nextafter(near, near + 1) - near).double()).max())


NUMBERS = torch.cat([torch.linspace(-12, 12, 300_001), torch.logspace(-30, 1, 2001), -torch.logspace(-30, 1, 2001)])


@pytest.mark.parametrize("name", list(build.variants()))
def test_functions_are_near_the_last_place(name: str) -> None:
    found = variant(name)
    x, wide = NUMBERS, NUMBERS.double()
    assert units(ops.activate(found, "tanh", x), wide.tanh()) < 2
    # e^x, read off x / (1 + e^-x) where that is e^x x; erf off x (1 + erf(x / √2)) / 2 where nothing cancels
    assert units(ops.activate(found, "silu", x[x > 0]), F.silu(wide[x > 0])) < 3
    assert units(ops.activate(found, "gelu", x[x > 0]), F.gelu(wide[x > 0])) < 3
    for kind, true in (("gelu", F.gelu(wide)), ("gelu_tanh", F.gelu(wide, approximate="tanh")), ("silu", F.silu(wide))):
        assert (ops.activate(found, kind, x).double() - true).abs().max() < 2e-6
    angles = torch.rand(10_001, generator=torch.Generator().manual_seed(1)) * 1e5
    cosines, sines = ops.turns(found, angles)
    assert units(cosines, angles.double().cos()) < 0.51
    assert units(sines, angles.double().sin()) < 0.51
    logits = torch.randn(3, 5003, generator=torch.Generator().manual_seed(2)) * 5
    assert (ops.softmax(found, logits).double() - logits.double().log_softmax(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("name", list(build.variants()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(1, 8, 2, 64), (5, 4, 4, 40), (7, 6, 3, 7)], ids=str)  # F, H, K, D
def test_attention_is_that_of_torch(name: str, dtype: torch.dtype, size: tuple[int, int, int, int]) -> None:
    found, (fed, heads, kv_heads, features) = variant(name), size
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(3, heads, fed, features, generator=generator).to(dtype)
    keys, values = (torch.randn(3, kv_heads, 37, features, generator=generator).to(dtype) for _ in range(2))
    close = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for window in (None, 5):
        newest = torch.arange(37 - fed, 37)[:, None]
        mask = torch.arange(37) <= newest
        mask = mask if window is None else mask & (torch.arange(37) > newest - window)
        mask = mask[None, None].expand(3, 1, fed, 37).clone()
        mask[1, :, :, :4] = False
        there = torch.ones(3, 37, dtype=torch.bool)
        there[1, :4] = False
        wanted = F.scaled_dot_product_attention(
            query.double(), keys.double(), values.double(), mask, scale=0.3, enable_gqa=True
        )
        parts = [(keys[:, :, :9], values[:, :, :9]), (keys[:, :, 9:], values[:, :, 9:])]
        whole = ops.attention(found, query, [(keys, values)], mask=there, window=window, scaling=0.3)
        assert (whole.double() - wanted.transpose(1, 2).flatten(2)).abs().max() < close
        assert torch.equal(ops.attention(found, query, parts, mask=there, window=window, scaling=0.3), whole)
        alone = ops.attention(found, query[1:2], [(keys[1:2, :, 4:], values[1:2, :, 4:])], window=window, scaling=0.3)
        assert torch.equal(alone, whole[1:2])  # padding is not there
        last = ops.attention(found, query[:, :, -1:], [(keys, values)], mask=there, window=window, scaling=0.3)
        assert torch.equal(last, whole[:, -1:])  # nor do tokens fed together matter


@pytest.mark.parametrize("name", list(build.variants()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(1, 70, 0, 75), (2, 17, 3, 2060), (6, 1, 40, 9), (9, 2, 21, 2)], ids=str)
def test_a_query_has_the_bits_it_has_alone(name: str, dtype: torch.dtype, size: tuple[int, int, int, int]) -> None:
    """Many tokens of a row, rows that share a prompt, and one row that does not see all of it."""
    found, (rows, fed, prompt, own) = variant(name), size
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(rows, 4, fed, 20, generator=generator).to(dtype)
    shared = [torch.randn(1, 2, prompt, 20, generator=generator).to(dtype) for _ in range(2)]
    new = [torch.randn(rows, 2, own, 20, generator=generator).to(dtype) for _ in range(2)]
    there = torch.ones(rows, prompt + own, dtype=torch.bool)
    there[rows // 2, : prompt // 2] = False
    parts = [(shared[0], shared[1]), (new[0], new[1])]
    whole = ops.attention(found, query, parts if prompt else parts[1:], mask=there, scaling=0.3)
    for row in range(rows):
        for token in {0, fed // 2, fed - 1}:
            end = own - fed + token + 1
            both = (torch.cat([old, mine[row : row + 1, :, :end]], 2) for old, mine in zip(shared, new, strict=True))
            seen = [part[:, :, there[row, : prompt + end]] for part in both]
            alone = ops.attention(found, query[row : row + 1, :, token : token + 1], [(seen[0], seen[1])], scaling=0.3)
            assert torch.equal(alone[0, 0], whole[row, token])


def test_sums_over_a_vocabulary_depend_on_no_threads_and_no_other_rows() -> None:
    """Entropies are recorded, and samplers cut by means and deviations: equal runs have to write equal bytes."""
    logits = torch.randn(3, 50257, generator=torch.Generator().manual_seed(5)) * 4
    logits[1, 100:40000] = -torch.inf
    logprobs = logits.log_softmax(-1)
    wanted = torch.special.entr(logprobs.double().exp()).sum(-1)
    before, found, kept = torch.get_num_threads(), [], []
    shares = logprobs.exp()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            found += [ops.entropy(logprobs), torch.stack([ops.entropy(row) for row in logprobs])]
            kept += [ops.total(shares), torch.stack([ops.total(row[None])[0] for row in shares])]
            for name in runnable():
                y = torch.empty(3)
                variant(name).entropy(logprobs.data_ptr(), y.data_ptr(), 3, logprobs.shape[1], threads)
                found.append(y)
    finally:
        torch.set_num_threads(before)
    assert (found[0].double() - wanted).abs().max() < 1e-5
    assert (kept[0] - 1).abs().max() < 1e-5
    assert all(torch.equal(other, found[0]) for other in found)
    assert all(torch.equal(other, kept[0]) for other in kept)
