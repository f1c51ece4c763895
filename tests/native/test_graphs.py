"""Steps with fixed tensor shapes: the same logits as the ordinary step, the same tokens in the loop.

They run here without CUDA graphs, as on any CPU; the tests marked `gpu` capture them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genctl import events
from genctl.decode.cache.forms import QuantizedLayer, SlottedLayer, SlottedWindow
from genctl.decode.cache.growing import STEP, GrowingLayer
from genctl.decode.loop import decode
from genctl.decode.runtime import Pass
from genctl.decode.types import Lane
from genctl.models import hub
from genctl.native.graphs import obstacle
from genctl.native.runtime import NativeModel, NativeRuntime
from genctl.params import Runtime
from genctl.strategies.assisted import Assisted
from genctl.strategies.beam import Beam
from genctl.strategies.contrast import Contrastive
from genctl.strategies.drafters import PromptLookup
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.native import test_seq2seq_generate as seq2seq
from tests.native.test_generate import PROMPTS, generated
from tests.native.variations import model
from tests.tiny import EOS, checkpoint

CLOSE = 1e-5  # of the largest number
NEW = 12
ROWS: dict[str, Sequence[tuple[int, ...]]] = {
    "one row": [PROMPTS[0]],
    "three rows": [PROMPTS[0]] * 3,
    "left-padded": PROMPTS,
}
FULL = ("llama", "gpt2", "gpt_neox")  # grouped heads; learned positions; one matrix of q, k and v for each head
OTHERS = (
    *("mistral", "gemma2", "gemma3_text, two ropes", "cohere2", "qwen2, upper windows"),  # windows, of some layers
    *("bloom", "falcon, alibi", "mpt, three heads"),  # biases
    *("llama, dynamic rope", "llama, longrope", "phi3, longrope"),  # angles that depend on the length
)


def graphed(name: str) -> NativeRuntime:
    """The native runtime of a tiny model, with steps of fixed shape."""
    return NativeRuntime(runtimes.native(model(name)).model, graphs=True)


def read(runtime: NativeRuntime, prompts: Sequence[tuple[int, ...]]) -> tuple[Any, Tensor, Tensor]:
    """Prompts padded on the left: their cache, mask int64 [N, T] and the last logits [N, V]."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=runtime.device)
    mask = torch.tensor(
        [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=runtime.device
    )
    cache = runtime.new_cache()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    output = runtime(Pass(tokens, cache, mask=mask, positions=positions, first=True, keep=1))
    runtime.prepare(cache)
    return cache, mask, output.logits[:, -1]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", [*FULL, *OTHERS])
def test_a_step_gives_the_logits_of_the_ordinary_one(name: str, rows: str) -> None:
    plain, fixed = runtimes.native(model(name)), graphed(name)
    caches_of = {}
    for runtime in (plain, fixed):
        caches_of[runtime], mask, logits = read(runtime, ROWS[rows])
    padded = not bool(mask.all())
    widths = set()
    steps = STEP + 3  # past the end of the first buffers
    for step in range(steps):
        feed = logits.argmax(-1, keepdim=True) if step % 2 else (logits.argmax(-1, keepdim=True) + 7) % 300
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        given: dict[str, Any] = {"positions": mask.sum(-1, keepdim=True) - 1}
        if padded:
            given["mask"] = mask
        wanted, found = (runtime(Pass(feed, caches_of[runtime], **given)).logits for runtime in (plain, fixed))
        assert found.dtype == torch.float32
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() <= CLOSE * wanted.abs().max()
        logits = wanted[:, -1]
        widths.add(caches_of[fixed].layers[0].buffers[0].shape[2])
    assert fixed.graphs is not None
    assert fixed.graphs.steps == steps
    if caches_of[fixed].layers[0].kind == "static":
        assert widths == {STEP, 2 * STEP}
    for left, right in zip(caches_of[plain].layers, caches_of[fixed].layers, strict=True):
        assert type(right) in (SlottedLayer, SlottedWindow)
        for old, new in zip(left.content(), right.content(), strict=True):
            torch.testing.assert_close(old, new, rtol=CLOSE, atol=CLOSE)


def test_columns_that_were_taken_back_do_not_count() -> None:
    """A rejected draft leaves columns in the buffers, after the valid ones: a step that saw them would differ."""
    plain, fixed = runtimes.native(model("llama")), graphed("llama")
    found = []
    for runtime in (plain, fixed):
        cache, _, _ = read(runtime, [PROMPTS[1]])
        for token in (5, 6, 7):
            runtime(Pass(torch.tensor([[token]]), cache))
        cache.crop(2)
        found.append(runtime(Pass(torch.tensor([[9]]), cache)).logits)
    torch.testing.assert_close(found[0], found[1], rtol=CLOSE, atol=CLOSE)
    assert fixed.graphs is not None
    assert fixed.graphs.steps == 4


def test_what_a_graph_would_read_is_made_anew_when_buffers_change_and_only_then() -> None:
    runtime = graphed("llama")
    graphs = runtime.graphs
    assert graphs is not None
    cache, _, _ = read(runtime, [PROMPTS[0]])
    seen = []
    for _ in range(STEP):  # 6 tokens: the buffers grow on the way
        runtime(Pass(torch.tensor([[9]]), cache))
        seen.append(graphs._fixed[1, 1])
    assert seen[0] == seen[STEP - len(PROMPTS[0]) - 1] != seen[-1]
    assert len(set(map(id, seen))) == 2
    rows = cache.select(torch.tensor([0, 0, 0]))
    runtime(Pass(torch.tensor([[9]] * 3), rows))
    assert set(graphs._fixed) == {(1, 1), (3, 1)}
    other = cache.select(torch.tensor([0]))  # as many rows, other buffers
    runtime(Pass(torch.tensor([[9]]), other))
    assert graphs._fixed[1, 1] is not seen[-1]


def lanes(**fields: Any) -> list[Lane]:
    return [Lane(str(n), prompt, Sample(), NEW, eos=(EOS,), **fields) for n, prompt in enumerate(PROMPTS)]


def written(runtime: NativeRuntime, these: list[Lane], width: int = 1) -> dict[str, list[list[int]]]:
    told = list(decode(runtime, these, width=width))
    assert not [event for event in told if isinstance(event, events.Failed)]
    return {e.lane: [list(h.tokens) for h in e.hypotheses] for e in told if isinstance(e, events.Finished)}


@pytest.mark.parametrize("name", [*FULL, "mistral", "gemma2", "bloom"])
def test_the_loop_writes_what_generate_writes(name: str) -> None:
    wanted = {str(n): generated(name, prompt) for n, prompt in enumerate(PROMPTS)}
    for width in (1, 3):
        runtime = graphed(name)
        assert written(runtime, lanes(), width) == wanted
        assert runtime.graphs is not None
        # the other passes read prompts: three in one pass, or one each
        assert runtime.graphs.steps >= runtime.forwards - len(PROMPTS) > 5
    beams = [Lane("0", PROMPTS[1], Beam(3), NEW, eos=(EOS,), returned=3)]
    runtime = graphed(name)
    assert written(runtime, beams)["0"] == generated(name, PROMPTS[1], num_beams=3, num_return_sequences=3)
    assert runtime.graphs is not None
    assert runtime.graphs.steps == runtime.forwards - 1


@pytest.mark.parametrize(
    "strategy",
    [Sample(True, 3), Contrastive(3, 0.5), Assisted(PromptLookup(3))],
    ids=["sampling", "hidden states", "drafts"],
)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_other_strategies_write_what_they_write_otherwise(strategy: Any, name: str) -> None:
    """Also beyond the window of mistral, whose layers keep the columns that a rejected draft needs."""
    lane = Lane("0", PROMPTS[1], strategy, 4 * NEW, seed=5)
    assert written(graphed(name), [lane]) == written(runtimes.native(model(name)), [lane])


def test_other_forms_of_cache_are_what_was_asked_for() -> None:
    wanted = {str(n): generated("llama", prompt) for n, prompt in enumerate(PROMPTS)}
    for form, steps in (("static", True), ("offloaded", True)):
        runtime = graphed("llama")
        assert written(runtime, lanes(cache=form), 3) == wanted
        assert runtime.graphs is not None
        assert bool(runtime.graphs.steps) is steps
    runtime = graphed("llama")
    assert written(runtime, lanes(use_cache=False), 2) == wanted
    cache, _, _ = read(runtime, [PROMPTS[0]])
    cache.convert("quantized")
    assert {type(layer) for layer in cache.layers} == {QuantizedLayer}


def test_an_encoder_decoder_reads_its_source_once_and_then_takes_steps_of_one_shape() -> None:
    """Relative positions shared or per layer, learned ones, sines; sources alone and in padded batches."""
    for name in ("t5", "umt5", "bart", "m2m_100", "marian"):
        made = seq2seq.model(name)
        wanted = {str(n): seq2seq.generated(name, source) for n, source in enumerate(seq2seq.SOURCES)}
        for width in (1, 3):
            runtime = NativeRuntime(runtimes.native(made).model, graphs=True)
            assert written(runtime, seq2seq.lanes(name), width) == wanted, (name, width)
            assert runtime.graphs is not None
            assert runtime.graphs.steps == runtime.forwards - len(wanted)
            assert runtime.graphs.steps > 5 or name != "t5"
        runtime = NativeRuntime(runtimes.native(made).model, graphs=True)
        beams = seq2seq.lanes(name, lambda: Beam(3), returned=3)
        found = written(runtime, beams, 2)
        for number, source in enumerate(seq2seq.SOURCES):
            assert found[str(number)] == seq2seq.generated(name, source, num_beams=3, num_return_sequences=3), name


def test_a_window_moves_to_the_front_of_buffers_that_stay_where_they_are() -> None:
    runtime = graphed("mistral")
    cache, _, _ = read(runtime, [PROMPTS[1]])
    row = cache.select(torch.tensor([0]), room=500)
    addresses = set()
    for token in range(200):
        runtime(Pass(torch.tensor([[token]]), row))
        addresses |= {buffer.data_ptr() for layer in row.layers for buffer in layer.buffers}
    assert len(addresses) == 2 * len(row.layers)
    assert row.length == len(PROMPTS[1]) + 200
    assert row.layers[0].capacity < 2 * STEP


def test_a_mixture_of_experts_is_computed_as_ever_and_that_is_said() -> None:
    runtime = graphed("mixtral")
    assert runtime.graphs is None
    assert runtime.findings == [f"steps run without a CUDA graph: {obstacle(runtime.model.spec)}"]
    cache, _, _ = read(runtime, [PROMPTS[0]])
    assert type(cache.layers[0]) is GrowingLayer
    assert runtimes.native(model("llama")).graphs is None  # a CPU gains nothing


def test_graphs_that_are_kept_are_few_and_can_be_dropped() -> None:
    runtime = graphed("llama")
    cache, _, _ = read(runtime, [PROMPTS[0]])
    graphs = runtime.graphs
    assert graphs is not None
    for rows in range(1, 13):
        runtime(Pass(torch.full((rows, 1), 9), cache.select(torch.zeros(rows, dtype=torch.long))))
    assert [*graphs._fixed] == [(rows, 1) for rows in range(5, 13)]
    graphs.free()
    assert not graphs._fixed


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def on_gpu(folder: Path, **options: Any) -> NativeModel:
    loaded = hub.load(Runtime(model=str(folder), device="cuda", runtime="native", **options))
    assert isinstance(loaded.model, NativeModel)
    return loaded.model


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", FULL)
def test_captured_steps_give_the_logits_of_the_ordinary_ones(name: str, tmp_path: Path) -> None:
    found = on_gpu(checkpoint(name, tmp_path), dtype="float32")
    graphs, plain = NativeRuntime(found), NativeRuntime(found, graphs=False)
    made = [runtime.prefill(PROMPTS[0], None) for runtime in (graphs, plain)]
    for step in range(STEP + 3):
        feed = torch.tensor([[3 + step]], device=found.device)
        one, other = (
            runtime(Pass(feed, prefix.cache)).logits for runtime, prefix in zip((graphs, plain), made, strict=True)
        )
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()
    assert graphs.graphs is not None
    assert graphs.graphs.captures == 2  # the buffers grew once


@pytest.mark.gpu
@needs_gpu
def test_captured_steps_write_the_tokens_of_ordinary_ones(tmp_path: Path) -> None:
    found = on_gpu(checkpoint("llama", tmp_path), dtype="float32")
    for these, width in (
        (lanes(), 1),
        (lanes(), 3),
        ([Lane("0", PROMPTS[1], Beam(3), NEW, eos=(EOS,), returned=3)], 1),
        ([Lane("0", PROMPTS[1], Assisted(PromptLookup(3)), NEW, eos=(EOS,))], 1),
    ):
        graphs = NativeRuntime(found)
        assert written(graphs, these, width) == written(NativeRuntime(found, graphs=False), these, width)
        assert graphs.graphs is not None
        assert graphs.graphs.captures or isinstance(these[0].strategy, Assisted)  # it reads several tokens at once


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_holds_the_weights_in_half_of_the_bits(tmp_path: Path) -> None:
    folder = checkpoint("gpt2", tmp_path)
    found = on_gpu(folder)
    assert {(tensor.device.type, tensor.dtype) for _, tensor in found.named_tensors()} == {("cuda", torch.bfloat16)}
    assert {product.form for product in found.products()} <= {"plain", "bfloat16 by kernels"}
