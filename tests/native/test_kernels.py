"""Steps with the Triton kernels of `kernels.cuda`: torch's numbers, bits of the row alone, five launches per layer.

On a machine with a GPU the kernels run there, elsewhere under Triton's interpreter: see docs/contributing.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from genctl import events
from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.loop import decode
from genctl.decode.runtime import Pass
from genctl.decode.types import Lane, RowsOfLane
from genctl.native import kernel_decoder, kernel_pass
from genctl.native.decoder import Decoder
from genctl.native.kernel_decoder import KernelDecoder, decoder_by_kernels
from genctl.native.linear import Products
from genctl.native.runtime import NativeRuntime
from genctl.strategies import counter
from genctl.strategies.assisted import Assisted
from genctl.strategies.drafters import PromptLookup
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.native.test_generate import PROMPTS, generated
from tests.native.test_graphs import read
from tests.native.variations import model
from tests.tiny import EOS, LAYERS

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads it on import
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

CLOSE = {torch.float32: 1e-5, torch.float16: 1e-2}  # of the largest number; the interpreter has no bfloat16
EACH, ONCE = 5, 2  # launches per layer; per step
# one for each branch: interleaved rotary pairs and norms after sublayers, biases, normed heads, factors, layers without
# rotary positions, windows, soft caps, and separate angles for layers with a window
NAMES = (
    "llama", "qwen2", "qwen3", "mistral, no window", "gemma", "glm4", "granite", "smollm3", "llama, wide heads",
    "llama, biases", "phi3, part of a head", "mistral", "gemma2", "gemma3_text",
)  # fmt: skip


def graphed(
    name: str, *, kernels: bool = True, dtype: torch.dtype = torch.float32, quantize: str | None = None
) -> NativeRuntime:
    """A tiny model whose steps have one shape: by the kernels, or by torch."""
    products = Products(quantize, pack=False, kernels=kernels)
    made = runtimes.native(model(name), products=products, dtype=dtype, device=torch.device(DEVICE))
    return NativeRuntime(made.model, graphs=True)


@cache
def decoder_of(name: str, quantize: str | None = None) -> tuple[Decoder, KernelDecoder]:
    runtime = graphed(name, quantize=quantize)
    assert runtime.graphs is not None
    assert runtime.graphs.kernels is not None
    return runtime.decoder, runtime.graphs.kernels


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("tokens", "times"), [(1, 1), (18, 1), (50, 2)])
def test_a_product_is_torchs(tokens: int, times: int, splits: int, dtype: torch.dtype) -> None:
    """Sizes that no tile divides; outputs filled with NaN before they are written."""
    from genctl.kernels import cuda

    torch.manual_seed(tokens)
    outputs, inputs, tiles, piece = 48, 80, -(-tokens // (16 * times)), 96 // splits
    x, rest = (torch.randn(tokens, size, device=DEVICE).to(dtype) for size in (inputs, outputs))
    weight = (torch.randn(2 * outputs, inputs, device=DEVICE) / 9).to(dtype)
    bias, gain = torch.randn(2 * outputs, device=DEVICE), torch.rand(outputs, device=DEVICE)
    nothing = torch.full((4 * splits + 2, tokens, outputs), torch.nan, device=DEVICE)
    counts = torch.zeros(4 * tiles, dtype=torch.int32, device=DEVICE)
    sums = x.float().square().view(tokens, 2, -1).sum(-1).t().contiguous()
    shape = {"P": 2, "N": 32, "M": 16, "K": 32, "EVEN": False, "AHEAD": 0, "PDL": False, "S": splits, "BIAS": True}
    shape |= {"FORM": "floats", "TIMES": times}
    sizes = tokens, outputs, inputs, piece, 2, 1e-6

    out, following, squares = nothing[0].to(dtype), nothing[1].to(dtype), nothing[2, :, :2].t().contiguous()
    cuda.product[(tiles, 2, splits)](
        *(x, weight, x, bias, rest, gain, sums, sums, out, following, squares, nothing[3:], counts),
        *sizes,
        0.5,
        NORM=True,
        REST=True,
        NEXT=True,
        SHORT=cuda.KINDS[dtype],
        **shape,
    )
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    both = normed @ weight.float().t() + bias
    wanted = both[:, :outputs] * 0.5 + rest.float()
    close(out, wanted, dtype)
    close(following, out.float() * gain, dtype)
    close(squares.sum(0), out.float().square().sum(-1), dtype)

    out = nothing[0].to(dtype)
    cuda.gated[(tiles, 2, splits)](
        x, weight, x, bias, sums, sums, out, nothing[3:], counts, *sizes, ACT="gelu_tanh", **shape
    )
    close(out, torch.nn.functional.gelu(both[:, :outputs], approximate="tanh") * both[:, outputs:], dtype)
    assert not counts.any()


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert (found.float() - wanted).abs().max() <= CLOSE[dtype] * wanted.abs().max()


@pytest.mark.parametrize("act", kernel_decoder.ACTIVATIONS)
def test_every_activation_is_torchs(act: str) -> None:
    from genctl.kernels import cuda
    from genctl.native.mlp import ACTIVATIONS

    x = torch.linspace(-4, 4, 16, device=DEVICE)[None]
    weight = torch.cat([torch.eye(16), torch.eye(16)]).to(DEVICE)
    out, squares = torch.empty_like(x), torch.zeros(1, 1, device=DEVICE)  # with an eps of 1: no norm
    counts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    shape = {"P": 1, "N": 16, "M": 16, "K": 16, "EVEN": True, "AHEAD": 0, "PDL": False, "S": 1, "BIAS": False}
    shape |= {"FORM": "floats", "TIMES": 1}
    cuda.gated[(1, 1, 1)](x, weight, x, x, squares, squares, out, x, counts, 1, 16, 16, 16, 1, 1.0, ACT=act, **shape)
    known = {activation.name: activation.plain for activation in ACTIVATIONS.values()}
    wanted = known[act](x.double()) * x.double()  # in float32 torch's erf depends on the instruction set
    torch.testing.assert_close(out, wanted.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in NAMES), ("qwen2", torch.float16)])
def test_a_step_gives_the_logits_of_torch(name: str, dtype: torch.dtype) -> None:
    """Prompts padded on the left, and the steps after them."""
    plain, fast = graphed(name, kernels=False, dtype=dtype), graphed(name, dtype=dtype)
    caches = {}
    for runtime in (plain, fast):
        caches[runtime], mask, logits = read(runtime, PROMPTS)
    assert fast.graphs is not None
    assert fast.graphs.kernels is not None
    for _ in range(2):
        feed, mask = logits.argmax(-1, keepdim=True), torch.nn.functional.pad(mask, (0, 1), value=1)
        positions = mask.sum(-1, keepdim=True) - 1
        wanted, found = (
            runtime(Pass(feed, caches[runtime], mask=mask, positions=positions)).logits for runtime in caches
        )
        assert found.dtype == torch.float32
        close(found, wanted, dtype)
        logits = wanted[:, -1]
    after = (
        2 if name in ("glm4", "gemma2", "gemma3_text") else 0
    )  # a norm of a sublayer's output takes a launch of its own
    assert fast.graphs.kernels.launches == 3 * ((EACH + after) * LAYERS + ONCE)


def random_cache(decoder: Decoder, rows: int, columns: int) -> list[tuple[Tensor, Tensor]]:
    """The same numbers in every row."""
    torch.manual_seed(1)
    spec, kind = decoder.spec, {"dtype": decoder.dtype, "device": DEVICE}
    pairs = [torch.randn(2, 1, spec.kv_heads, columns, spec.head_dim, **kind) for _ in range(spec.layers)]
    return [(keys.repeat(rows, 1, 1, 1), values.repeat(rows, 1, 1, 1)) for keys, values in pairs]


def stepped(
    name: str,
    tokens: Sequence[Sequence[int]],
    length: int,
    buffers: list[tuple[Tensor, Tensor]],
    pads: Sequence[int],
    quantize: str | None = None,
) -> Tensor:
    """Logits [N, F, V] after `length` columns; a row has `pads` of them before its text."""
    decoder, kernels = decoder_of(name, quantize)
    feed = torch.tensor(tokens, device=DEVICE)
    starts = torch.tensor(pads, dtype=torch.int32, device=DEVICE)
    columns = torch.arange(length, length + feed.shape[1], device=DEVICE)
    positions = columns[None] - starts[:, None]
    places = dict.fromkeys(decoder.spec.windows, (columns[:1].clone(), starts))
    return kernels(feed, positions, places, buffers)


@pytest.mark.parametrize(
    ("name", "quantize"),
    [("llama", None), ("qwen3", None), ("mistral", None), ("qwen3", "int8"), ("mistral", "int4")],
)
def test_a_row_has_the_same_bits_alone_among_others_and_behind_padding(name: str, quantize: str | None) -> None:
    """17 rows are two tiles; 140 columns are two pieces of attention, which begin where a row's text does."""
    decoder, _ = decoder_of(name, quantize)
    rows, length = 17, 140
    tokens = [[(7 * row + 3) % 300] for row in range(rows)]
    pads = [0] * rows
    pads[-1] = 9
    together = random_cache(decoder, rows, 192)
    for part in (part for pair in together for part in pair):
        part[-1] = part[-1].roll(9, 1)  # the row's text begins later
    many = stepped(name, tokens, length, together, pads, quantize)
    for row in (0, 5):
        alone = random_cache(decoder, 1, 192)
        assert torch.equal(stepped(name, [tokens[row]], length, alone, [0], quantize)[0], many[row])
        for one, all_ in zip(alone, together, strict=True):
            assert torch.equal(one[0][0], all_[0][row])
            assert torch.equal(one[1][0], all_[1][row])
    alone = random_cache(decoder, 1, 192)
    assert torch.equal(stepped(name, [tokens[-1]], length - 9, alone, [0], quantize)[0], many[-1])


@pytest.mark.parametrize(
    ("name", "quantize"), [("llama", None), ("gemma2", None), ("gemma2", "int8"), ("llama", "int4")]
)
def test_several_tokens_at_once_have_the_bits_of_one_after_another(name: str, quantize: str | None) -> None:
    """The first of them fills a piece of attention, the next one begins another."""
    decoder, _ = decoder_of(name, quantize)
    tokens, length = [[5, 6, 7], [8, 9, 10]], kernel_pass.PIECE - 1
    at_once, in_turn = random_cache(decoder, 2, 192), random_cache(decoder, 2, 192)
    turns = [[row[at : at + 1] for row in tokens] for at in range(3)]
    wanted = [stepped(name, turn, length + at, in_turn, [0, 0], quantize) for at, turn in enumerate(turns)]
    assert torch.equal(stepped(name, tokens, length, at_once, [0, 0], quantize), torch.cat(wanted, 1))
    for one, other in zip(at_once, in_turn, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_a_long_text_is_read_in_pieces() -> None:
    """Nine pieces: more than are joined at once."""
    decoder, _ = decoder_of("llama")
    length, columns = 8 * kernel_pass.PIECE + 5, 9 * kernel_pass.PIECE
    layers = [GrowingLayer() for _ in decoder.weights.layers]
    for layer, (keys, values) in zip(layers, random_cache(decoder, 1, columns), strict=True):
        layer.hold(keys[:, :, :length], values[:, :, :length])
    place = torch.tensor([[length]], device=DEVICE)
    wanted = decoder(torch.tensor([[5]], device=DEVICE), place, layers, past=length)
    close(stepped("llama", [[5]], length, random_cache(decoder, 1, columns), [0]), wanted, torch.float32)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("strategy", [Sample(), Assisted(PromptLookup(3))], ids=["greedy", "prompt lookup"])
def test_the_loop_writes_what_generate_writes(strategy: Any, name: str) -> None:
    """Prompt lookup feeds several tokens: they go through the kernels too. The window is shorter than the texts."""
    runtime = graphed(name)
    lanes = [Lane(str(n), prompt, strategy, 6, eos=(EOS,)) for n, prompt in enumerate(PROMPTS[:2])]
    told = list(decode(runtime, lanes, width=2))
    assert not [event for event in told if isinstance(event, events.Failed)]
    found = {e.lane: [list(h.tokens) for h in e.hypotheses] for e in told if isinstance(e, events.Finished)}
    assert found == {str(n): [row[:6] for row in generated(name, prompt)] for n, prompt in enumerate(PROMPTS[:2])}
    assert runtime.graphs is not None
    assert runtime.graphs.kernels is not None
    assert runtime.graphs.steps > 0
    if DEVICE == "cuda":  # where graphs are replayed
        return
    # beside steps: two prompts, each in a pass
    assert runtime.graphs.kernels.launches == (runtime.graphs.steps + 2) * (EACH * LAYERS + ONCE)


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute tiles as tensor cores do: in the interpreter the order of a sum would depend on the place in a tile."""

    def in_turn(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
        return (a[..., None].astype(dtype) * b[..., None, :, :].astype(dtype)).sum(-2, dtype=dtype)

    monkeypatch.setattr(np, "matmul", in_turn)


@pytest.mark.usefixtures("alike")
def test_steps_of_many_rows_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows, where at most four count as few; nothing is left to torch."""
    fast = graphed("llama")
    alone = fast(Pass(torch.full((1, 1), 9, device=DEVICE), read(fast, PROMPTS[:1])[0])).logits
    monkeypatch.setattr(kernel_pass, "FEW", 4)
    together = fast(Pass(torch.full((5, 1), 9, device=DEVICE), read(fast, PROMPTS[:1] * 5)[0])).logits
    assert torch.equal(together, alone.expand_as(together))
    assert fast.graphs is not None
    assert fast.graphs.kernels is not None
    assert (fast.graphs.steps, fast.graphs.kernels.launches) == (2, 4 * (EACH * LAYERS + ONCE))


@pytest.mark.parametrize(
    ("name", "quantize"),
    [("llama", None), ("mistral", None), ("gemma2", None), ("llama", "int8"), ("qwen2", "int4")],
)
@pytest.mark.usefixtures("alike")
def test_a_prompt_has_the_same_bits_however_it_is_read(
    name: str, quantize: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, padded among others, in parts, token by token, without a cache, and by programs for many tokens."""
    runtime, prompts = graphed(name, quantize=quantize), [PROMPTS[1][:3], PROMPTS[1][:9], PROMPTS[2][:5]]
    text = torch.tensor(prompts[1:2], device=DEVICE)
    _, _, alone = read(runtime, prompts[1:2])
    whole = runtime(Pass(text, None, keep=0)).logits
    assert torch.equal(whole[:, -1], alone)
    cache = runtime.new_cache()
    turns = [runtime(Pass(text[:, at : at + 1], cache, first=not at)).logits for at in range(text.shape[1])]
    assert torch.equal(torch.cat(turns, 1), whole)
    for few, most in ((64, 12), (4, 12)):
        monkeypatch.setattr(kernel_pass, "FEW", few)
        monkeypatch.setattr(kernel_decoder, "MOST_TOKENS", most)
        cache, mask, together = read(runtime, prompts)
        assert torch.equal(together[1], alone[0])
        assert all(buffer.isfinite().all() for layer in cache.layers for buffer in layer.content())
        assert torch.equal(runtime(Pass(text, None, keep=0)).logits, whole)
        feed, mask = torch.full((3, 1), 9, device=DEVICE), torch.nn.functional.pad(mask, (0, 1), value=1)
        step = runtime(Pass(feed, cache, mask=mask, positions=mask.sum(-1, keepdim=True) - 1)).logits
        lone, _, _ = read(runtime, prompts[1:2])
        assert torch.equal(step[1], runtime(Pass(feed[:1], lone)).logits[0])


@pytest.mark.usefixtures("alike")
def test_prompts_are_read_by_the_kernels_whatever_the_cache_keeps() -> None:
    """A saved prompt keeps what windows would drop; a prompt that continues it has the bits of one read whole."""
    runtime = graphed("mistral")
    ids = PROMPTS[1]
    saved = runtime.prefill(ids[:9], None, whole=True)
    found, reused = runtime.resume(saved, ids, None)
    assert reused == 9
    assert found is not None
    assert torch.equal(found.logits, runtime.prefill(ids, None).logits)
    pieces = [piece for piece in runtime.prefill_in_pieces(ids, 5) if piece is not None]
    assert torch.equal(pieces[-1].logits, found.logits)
    for one, other in zip(found.cache.layers, pieces[-1].cache.layers, strict=True):
        width = min(one.length, other.length)
        assert all(
            torch.equal(a[:, :, -width:], b[:, :, -width:]) for a, b in zip(one.content(), other.content(), strict=True)
        )


def test_padding_of_an_earlier_step_is_forgotten() -> None:
    """Two steps on the same buffers: the second has no mask, and sees the columns that the first did not."""
    plain, fast = graphed("llama", kernels=False), graphed("llama")
    found = []
    for runtime in (plain, fast):
        cache, _, _ = read(runtime, [PROMPTS[0]])
        feed, mask = (
            torch.tensor([[9]], device=DEVICE),
            torch.ones(1, cache.length + 1, dtype=torch.long, device=DEVICE),
        )
        mask[:, :2] = 0
        runtime(Pass(feed, cache, mask=mask))
        found.append(runtime(Pass(feed, cache)).logits)
    close(found[1], found[0], torch.float32)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gpt2", "another norm than RMS"),
        ("olmo2", "such norms of queries and keys"),
        ("mixtral", "experts"),
        ("llama, dynamic rope", "angles that depend on the length"),
        ("stablelm, parallel", "another norm than RMS"),
    ],
)
def test_other_decoders_are_left_to_torch_and_it_is_said(name: str, part: str) -> None:
    said = f"torch's operations compute the steps: the kernels do not compute {part}"
    for quantize in (None, "int8"):
        assert decoder_by_kernels(graphed(name, quantize=quantize).decoder) == (None, said)


def test_where_nothing_can_be_compiled_torch_computes_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(decoder: Decoder) -> KernelDecoder:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setattr(kernel_decoder, "KernelDecoder", broken)
    runtime = graphed("llama")
    assert runtime.graphs is not None
    assert runtime.graphs.kernels is None
    assert runtime.findings == [
        "torch's operations compute the steps: the kernels cannot be compiled (Failed to find C compiler.)"
    ]


def test_rows_of_all_layers_move_at_once() -> None:
    decoder, kernels = decoder_of("llama")
    buffers = random_cache(decoder, 3, 80)
    rows = torch.tensor([2, 2, 0], device=DEVICE)
    wanted = [[part.clone() for part in pair] for pair in buffers]
    for part in (part for pair in wanted for part in pair):
        part[:, :, 7:71] = part[rows][:, :, 7:71]
    kernels.move_rows(buffers, rows, 7, 71)
    kernels.move_rows(buffers, rows, 71, 71)
    assert all(torch.equal(*both) for pairs in zip(buffers, wanted, strict=True) for both in zip(*pairs, strict=True))


@pytest.mark.parametrize("size", [5, 2048, 2501])
def test_draws_are_those_of_the_host(size: int) -> None:
    logits = 3 * torch.randn(6, size, generator=torch.Generator().manual_seed(size), device="cpu")
    logits[2, : size // 2] = -torch.inf
    seeds = (0, 2**63 + 5, 2**64 - 1, 7, 7, 2**32)
    lanes = [RowsOfLane(torch.Generator().manual_seed(seed), [row % 3], 3, row) for row, seed in enumerate(seeds)]
    places = [(each.seed, *each.indices, each.position) for each in lanes]
    assert counter._by_kernel(logits.to(DEVICE), places).tolist() == counter.counter(logits, lanes).tolist()


COMPILE = """
import re, sys, torch, triton
from collections import defaultdict
from dataclasses import replace
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from genctl.native import kernel_decoder, kernel_pass
from genctl.native.linear import Products
from genctl.native.spec import Rope
from tests import runtimes
from tests.native.variations import model

KINDS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
KINDS |= {torch.int8: "*i8", torch.uint8: "*u8"}

def kind(arg):
    return KINDS[arg.dtype] if isinstance(arg, torch.Tensor) else "fp32" if isinstance(arg, float) else "i32"

chip = int(sys.argv[1])
layouts = defaultdict(lambda: defaultdict(set))  # of what is added up, by kernel and by the number of tokens
for name in sys.argv[2:]:
    name, _, quantize = name.partition(":")
    quantize, _, least = quantize.partition("/")
    kernel_pass.LEAST_PIECE = int(least or 512)
    products = Products(quantize or None, pack=False, kernels=True)
    decoder = runtimes.native(model(name), products=products, dtype=torch.bfloat16).decoder
    step = kernel_decoder.KernelDecoder(decoder)
    step.parts = replace(step.parts, pdl=chip >= 90)
    launches = [launch for tokens in (1, 20, 128) for launch in step.example(tokens).launches]
    for launch in {launch.variant: launch for launch in launches}.values():
        names = launch.kernel.arg_names
        options = dict(launch.options)
        build = {n: options.pop(n) for n in ("num_warps", "num_stages")}
        options.pop("launch_pdl", None)
        given = dict(zip(names, launch.args))
        signature = {n: "constexpr" if n in options else kind(given[n]) for n in names}
        even = {(at,): [["tt.divisibility", 16]] for at, n in enumerate(names) if signature[n][0] == "*"}
        source = ASTSource(fn=launch.kernel, signature=signature, constexprs=options, attrs=even)
        binary = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=build)
        assert binary.asm["cubin"] and binary.metadata.shared <= kernel_decoder.SHARED, binary.metadata
        print(chip, name, quantize, launch.kernel.__name__)
        code, times = binary.asm["ttgir"], options.get("TIMES")
        named = dict(re.findall(r"^(#\\w+) = (#.*)$", code, re.M))
        found = re.findall(r'"tt.reduce".*?\\}\\) : \\(tensor<([^>]*?), (#\\w+)>', code, re.S)
        kept = tuple(options.get(part) for part in ("S", "N", "P", "NORM", "NEXT", "D"))
        made = {(shape, named.get(layout, layout)) for shape, layout in found if not shape.startswith("1x")}
        kernel = launch.kernel.__name__
        if kernel.startswith("attend"):  # one for few tokens, and one for many
            kernel, times = "attention", kernel
            assert "ld.global.b16" not in binary.asm["ptx"], "the cache is read number by number"
        layouts[kernel, name, quantize, least, kept][times] |= made
different = {kernel: dict(by) for kernel, by in layouts.items() if len(set(map(frozenset, by.values()))) > 1}
assert not different, different

from genctl.kernels.cuda import draw
kinds = dict(zip(draw.arg_names, ("*fp32", "*i64", "*fp64", "*i64", "i32", "constexpr")))
source = ASTSource(fn=draw, signature=kinds, constexprs={"N": 1024})
assert triton.compile(source, target=GPUTarget("cuda", chip, 32)).asm["cubin"]
print(chip, "any", "draw")
"""


@pytest.mark.parametrize("chip", [80, 90, 120])
def test_the_kernels_compile_for_chips_that_are_not_here(chip: int) -> None:
    """In its own process: if the interpreter is on, it replaces the compiler.

    The summands within a program have one layout over its threads, however many tokens there are: their order is part
    of a row's own bits.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    more = ["qwen3", "qwen3:int8", "gemma2", "phi3:/8"] if chip == 90 else []
    names = ["glm4", "llama:int8", "qwen2:int4/8", *more]
    command = [sys.executable, "-c", COMPILE, str(chip), *names]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    kernels = "enter heads attend attend_all product gated draw round_x"
    assert {line.split()[-1] for line in ran.stdout.splitlines()} == set(kernels.split())
