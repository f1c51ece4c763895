"""Compiled steps write the same as others; what cannot be compiled is reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from genctl import events
from genctl.config.layers import flags_layer, resolve
from genctl.decode.cache.forms import SlottedLayer
from genctl.decode.cache.growing import STEP
from genctl.decode.loop import decode
from genctl.decode.prefix_cache import KeptTexts
from genctl.decode.processors.build import ProcessorContext, build
from genctl.decode.read_along import ReadAlong, unconditional
from genctl.errors import ModelError, PresetError, UsageError
from genctl.models import hub, runtime_choice
from genctl.params import Generation, Runtime
from genctl.strategies.assisted import Assisted
from genctl.strategies.beam import Beam
from genctl.strategies.contrast import Contrastive
from genctl.strategies.drafters import PromptLookup
from genctl.strategies.sample import Sample
from genctl.transformers.compiled import Compiled
from genctl.transformers.runtime import TransformersRuntime
from tests.decode.driver import PROMPTS, Case
from tests.tiny import checkpoint, tiny
from tests.versions import OLDER, OLDER_TORCH

needs_compiler = pytest.mark.skipif(runtime_choice.cpp_compiler() is None, reason="no C++ compiler")


class Compiling(Case):
    """A case whose steps may be compiled: `said` are the messages about that."""

    def __init__(self, arch: str) -> None:
        super().__init__(arch)
        self.plain = self.forward
        self.said: list[str] = []
        self.fast = TransformersRuntime(self.model, compile=True)
        assert self.fast.compiled is not None
        self.compiled: Compiled = self.fast.compiled
        self.compiled.report = self.said.append

    def both(self, lanes: list[Any], width: int = 1) -> tuple[dict[str, list[list[int]]], dict[str, list[list[int]]]]:
        """The tokens of lanes, compiled and uncompiled."""
        found = []
        for forward in (self.fast, self.plain):
            self.forward = forward
            found.append(self.ours(lanes, width))
        return found[0], found[1]


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Run the step that would be compiled without the compiler. The list holds the widths of its buffers."""
    widths: list[int] = []

    def uncompiled(step: Any, **_: Any) -> Any:
        def run(feed: Any, mask: Any, positions: Any, place: Any, buffers: Any) -> Any:
            widths.append(mask.shape[1])
            return step(feed, mask, positions, place, buffers)

        return run

    monkeypatch.setattr(torch, "compile", uncompiled)
    yield widths
    torch._dynamo.reset()


@pytest.mark.compile
@needs_compiler
@pytest.mark.skipif(OLDER_TORCH, reason="torch 2.12 writes C++ that is none here")
@pytest.mark.parametrize(  # rotary, learned positions, ALiBi; each takes seconds, or a minute where nothing is cached
    "arch", ["llama", pytest.param("gpt2", marks=pytest.mark.night), pytest.param("bloom", marks=pytest.mark.night)]
)
def test_compiled_steps_write_the_same_tokens(arch: str) -> None:
    from torch._dynamo.utils import counters

    case = Compiling(arch)
    counters.clear()
    one = [case.lane(PROMPTS[0])]
    padded = [case.lane(prompt, name=str(number)) for number, prompt in enumerate(PROMPTS)]
    for lanes, width in (
        (one, 1),
        (padded, 3),
        ([case.lane(PROMPTS[1], Beam(3))], 1),
        ([case.lane(PROMPTS[2], Sample(True, 2), seed=5)], 1),
        ([case.lane(PROMPTS[0], max_new_tokens=STEP)], 1),  # a wider cache
        ([case.lane(PROMPTS[0], Sample(True, 5), seed=6, max_new_tokens=STEP)], 1),
    ):
        before = case.compiled.steps
        fast, plain = case.both(lanes, width)
        assert fast == plain
        assert case.compiled.steps > before + 5  # the compiled steps did write them
    # one variant for one row, one for any number of rows
    assert case.said == ["compiling the step for 1 row …", "compiling the step for several rows …"]
    assert counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


FULL = ("gpt2", "gpt_neox", "gptj", "llama", "mixtral", "qwen2", "qwen3", "opt", "falcon", "phi")


# older versions prepare the inputs of BLOOM in a special way, and it is refused
@pytest.mark.parametrize("arch", [*FULL, *(() if OLDER else ("bloom",))])
def test_every_architecture_reads_a_cache_of_fixed_size(arch: str, standing_in: list[int]) -> None:
    case = Compiling(arch)
    lanes = [case.lane(prompt, Sample(True, 2), name=str(number), seed=3) for number, prompt in enumerate(PROMPTS)]
    fast, plain = case.both([*lanes, case.lane(PROMPTS[0], Beam(3), name="beam")], 2)
    assert fast == plain
    assert case.compiled.steps == len(standing_in) > 20
    assert set(standing_in) == {STEP}


def test_buffers_widen_by_whole_steps(standing_in: list[int]) -> None:
    case = Compiling("llama")
    fast, plain = case.both([case.lane(PROMPTS[1], max_new_tokens=STEP)])
    assert fast == plain
    assert set(standing_in) == {2 * STEP}


def test_a_prompt_read_before_is_gone_on_from(standing_in: list[int]) -> None:
    case = Compiling("llama")
    saved = case.fast.prefill(PROMPTS[1][:7], None, whole=True)
    told = list(decode(case.fast, [case.lane(PROMPTS[1])], texts=KeptTexts(saved=saved)))
    assert [event.reused for event in told if isinstance(event, events.Prefilled)] == [7]
    found = [list(event.hypotheses[0].tokens) for event in told if isinstance(event, events.Finished)]
    case.forward = case.plain
    assert found == case.ours([case.lane(PROMPTS[1])])["0"]
    assert len(standing_in) > 5


def test_guidance_has_steps_of_its_own(standing_in: list[int]) -> None:
    case = Compiling("gpt2")
    found = []
    for forward in (case.fast, case.plain):
        case.forward = forward
        other = unconditional(ReadAlong(forward), PROMPTS[2], len(PROMPTS[0]))
        material = ProcessorContext(Generation(guidance_scale=1.7), len(PROMPTS[0]), 40, 300, unconditional=other)
        found.append(case.ours([case.lane(PROMPTS[0], Beam(2), processors=build(material))]))
    assert found[0] == found[1]
    assert len(standing_in) == case.compiled.steps > 20


def test_what_cannot_be_compiled_is_computed_otherwise(standing_in: list[int]) -> None:
    case = Compiling("llama")
    drafting = Assisted(PromptLookup(2), False, num_assistant_tokens=3)
    lanes = [case.lane(prompt * 2, drafting, name=str(number)) for number, prompt in enumerate(PROMPTS)]
    fast, plain = case.both([*lanes, case.lane(PROMPTS[0], Contrastive(4, 0.6), name="contrastive")])
    assert fast == plain


def test_a_compiled_step_that_gives_other_numbers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda step, **_: lambda *given: step(*given) + torch.randn(1, 1, 300))
    case = Compiling("gpt2")
    failed = [event for event in decode(case.fast, [case.lane(PROMPTS[0])]) if isinstance(event, events.Failed)]
    assert [event.message for event in failed] == ["--compile: the compiled step of this model gives other numbers"]


def test_a_compiler_that_fails_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such header\nmore of it")

    monkeypatch.setattr(torch, "compile", lambda step, **_: broken)
    case = Compiling("gpt2")
    lane = case.lane(PROMPTS[0], Beam(2))
    failed = [event for event in decode(case.fast, [lane]) if isinstance(event, events.Failed)]
    assert [event.message for event in failed] == ["--compile failed: RuntimeError: no such header"]


@pytest.mark.parametrize(
    ("arch", "why"),
    [
        ("t5", "is an encoder-decoder"),
        ("gemma2", "has layers that keep a window or a recurrent state"),
        ("jamba", "has layers that keep a window or a recurrent state"),
        ("mamba", "keeps no cache of keys and values"),
    ],
)
def test_models_whose_steps_change_their_shape_are_refused(arch: str, why: str) -> None:
    with pytest.raises(ModelError, match=f"--compile.*{type(tiny(arch)).__name__} {why}") as caught:
        TransformersRuntime(tiny(arch), compile=True)
    assert caught.value.hint == "leave out --compile"


def test_free_columns_hold_no_garbage() -> None:
    layer = SlottedLayer()
    layer.hold(torch.full((1, 2, 3, 4), 1.0), torch.full((1, 2, 3, 4), 2.0))
    for made in (layer.select(torch.tensor([0, 0]), room=5), layer.merge([layer], room=5)):
        keys, values = made.slots()
        assert keys.shape == (2, 2, STEP, 4)
        assert not keys[:, :, 3:].any()
        assert not values[:, :, 3:].any()
    layer.slots()[0][:, :, 3] = 7.0
    layer.written()
    assert layer.length == 4
    assert layer.keys[0, 0, :, 0].tolist() == [1.0, 1.0, 1.0, 7.0]
    assert not layer.slots()[0][:, :, 4:].any()


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"pack": True}, "pack = true (flag --pack)"),
        ({"cache_implementation": "dynamic"}, 'cache_implementation = "dynamic" (flag --cache)'),
        ({"cache_implementation": "quantized"}, 'cache_implementation = "quantized" (flag --cache)'),
        ({"cache_implementation": "offloaded"}, 'cache_implementation = "offloaded" (flag --cache)'),
        ({"cache_implementation": "off"}, 'cache_implementation = "off" (flag --cache)'),
    ],
)
def test_contradictions_name_both_sides(other: dict[str, Any], words: str) -> None:
    with pytest.raises(PresetError) as caught:
        resolve([flags_layer({"compile": True, **other})])
    assert f"compile = true (flag --compile) cannot be combined with {words}" in caught.value.message
    assert resolve([flags_layer({"compile": False, **other})]).runtime.compile is False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantize": "int8"}, "--compile and --quantize int8 contradict each other"),
        ({"device_map": "auto"}, "--compile and --device-map auto"),
    ],
)
def test_contradictions_are_found_before_loading(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        hub.load(Runtime(model="nowhere", compile=True, **options))


def test_without_a_compiler_there_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match="needs a C\\+\\+ compiler, and none is found") as caught:
        hub.load(Runtime(compile=True, device="cpu"))
    assert "CXX" in caught.value.hint


def test_other_devices_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--compile runs on the CPU and on CUDA devices, not on mps \(--device mps\)"):
        runtime_choice.check_device(Runtime(compile=True, device="mps"), torch.device("mps"), native=False)


@pytest.mark.gpu
@pytest.mark.compile
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_graphs_write_the_same_tokens(tmp_path: Path) -> None:
    folder = checkpoint("llama", tmp_path)
    model = hub.load(Runtime(model=str(folder), device="cuda", dtype="float32")).model
    case = Case("llama")
    for strategy in (Sample(), Beam(3), Sample(True, 3)):
        lanes = [case.lane(prompt, strategy, name=str(number), seed=4) for number, prompt in enumerate(PROMPTS)]
        found = []
        for compile in (False, True):
            forward = TransformersRuntime(model, compile=compile)
            told = list(decode(forward, lanes, width=3))
            found.append([event.hypotheses for event in told if isinstance(event, events.Finished)])
            assert forward.compiled is None or forward.compiled.steps > 5
        assert [[h.tokens for h in one] for one in found[0]] == [[h.tokens for h in one] for one in found[1]]
