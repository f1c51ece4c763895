"""A plan equals the measurement of a run, layer by layer, to the byte."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from genctl import events
from genctl.commands.inspect.job import weights_bytes as measured_weights
from genctl.commands.inspect.plan import plan
from genctl.commands.inspect.skeleton import read as skeleton_of
from genctl.decode.loop import decode
from genctl.decode.types import Lane, Strategy
from genctl.errors import ModelError
from genctl.models import hub
from genctl.params import Generation, Runtime
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from genctl.transformers.runtime import TransformersRuntime
from tests.tiny import ARCHITECTURES, SEQ2SEQ, checkpoint

PROMPT, NEW = 11, 6  # tokens; longer than the windows of 8
LENGTH = PROMPT + NEW - 1  # the last token is never read
FORMS = ("dynamic", "static", "quantized", "offloaded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For each architecture, a folder with only its config.json."""

    @cache
    def made(arch: str) -> Path:
        whole = checkpoint(arch, tmp_path_factory.mktemp(arch))
        alone = tmp_path_factory.mktemp(f"{arch}-config")
        (alone / "config.json").write_bytes((whole / "config.json").read_bytes())
        return alone

    return made


@cache
def model(arch: str, dtype: torch.dtype) -> Any:
    """A real model, not shared with other tests."""
    from tests.tiny import tiny

    source = tiny(arch)
    made = type(source)(source.config)
    made.load_state_dict(source.state_dict())
    return made.to(dtype).eval()


def measured(
    arch: str,
    strategy: Strategy,
    *,
    batch: int = 1,
    form: str = "dynamic",
    dtype: torch.dtype = torch.float32,
    prompt: int = PROMPT,
    new: int | None = None,
) -> events.CacheRead:
    """The cache after the last pass of a real run, in which no text ends before NEW tokens."""
    forward = TransformersRuntime(model(arch, dtype))
    prompts = [tuple(3 + (i + place) % 40 for place in range(prompt)) for i in range(batch)]
    lanes = []
    for number, ids in enumerate(prompts):
        asked: dict[str, Any] = {"cache": form, "use_cache": form != "off", "returned": strategy.max_rows}
        if arch in SEQ2SEQ:  # the decoder's prompt is one token
            asked["source"], ids = ids, (1,)
        lanes.append(Lane(str(number), ids, strategy, new or new_tokens(arch), **asked))
    seen = list(decode(forward, lanes, width=batch, watch=True))
    assert not [event for event in seen if isinstance(event, events.Failed)]
    return [event for event in seen if isinstance(event, events.CacheRead)][-1]


def new_tokens(arch: str) -> int:
    return LENGTH if arch in SEQ2SEQ else NEW


def planned(
    folder: Path,
    arch: str,
    *,
    batch: int = 1,
    dtype: str = "float32",
    length: int = LENGTH,
    kind: str = "auto",
    **generation: Any,
) -> dict[str, Any]:
    source = PROMPT if arch in SEQ2SEQ else None
    runtime = Runtime(model=str(folder), dtype=dtype, device="cpu", runtime=kind)  # type: ignore[arg-type]
    return plan(runtime, Generation(**generation), batch=batch, length=length, source_length=source)


def same(plan: dict[str, Any], read: events.CacheRead) -> None:
    ours = [dict(layer) for layer in plan["layers"]]
    theirs = [{key: value for key, value in layer.items() if key != "new"} for layer in read.layers]
    assert ours == theirs
    assert plan["total_bytes"] == sum(layer["bytes"] for layer in read.layers)
    assert plan["reserved_bytes"] == read.reserved


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("form", FORMS)
def test_one_row(folder: Any, arch: str, form: str) -> None:
    same(planned(folder(arch), arch, cache_implementation=form), measured(arch, Sample(), form=form))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_beams_of_one_prompt(folder: Any, arch: str) -> None:
    made = planned(folder(arch), arch, num_beams=3)
    same(made, measured(arch, Beam(3)))
    assert made["plan"]["rows"] == 3
    cross = [layer["shape"][0] for layer in made["layers"] if layer["kind"] == "cross-attention"]
    assert cross == ([1] * 2 if arch in SEQ2SEQ else [])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("form", ["dynamic", "quantized"])
def test_a_batch_of_beams(folder: Any, arch: str, form: str) -> None:
    made = planned(folder(arch), arch, batch=2, kind="transformers", num_beams=2, cache_implementation=form)
    same(made, measured(arch, Beam(2), batch=2, form=form))


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize(("prompt", "new"), [(3, 3), (3, 4), (3, 40), (3, 90), (20, 6), (20, 90), (90, 6)])
@pytest.mark.parametrize("beams", [1, 3])
def test_what_is_reserved_for_texts_shorter_and_longer_than_a_window(
    folder: Any, arch: str, prompt: int, new: int, beams: int
) -> None:
    made = planned(folder(arch), arch, length=prompt + new - 1, num_beams=beams)
    read = measured(arch, Beam(beams) if beams > 1 else Sample(), prompt=prompt, new=new)
    same(made, read)


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_more_is_never_reserved_than_planned(folder: Any, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the length of texts is not known in advance, buffers grow by half."""
    monkeypatch.setattr("genctl.decode.batch_cache.ROOM", 2)
    for new in (60, 70, 75):
        made = planned(folder(arch), arch, length=3 + new - 1)
        assert made["reserved_bytes"] >= measured(arch, Sample(), prompt=3, new=new).reserved


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_samples_in_bfloat16(folder: Any, arch: str) -> None:
    made = planned(folder(arch), arch, dtype="bfloat16", do_sample=True, num_return_sequences=2)
    same(made, measured(arch, Sample(True, 2), dtype=torch.bfloat16))


@pytest.mark.parametrize("arch", ["llama", "mamba", "t5"])
def test_no_cache_takes_nothing(folder: Any, arch: str) -> None:
    for off in ({"cache_implementation": "off"}, {"use_cache": False}):
        made = planned(folder(arch), arch, **off)  # type: ignore[arg-type]
        same(made, measured(arch, Sample(), form="off"))
        assert (made["total_bytes"], made["cache"], made["bytes_per_token"]) == (0, "off", 0)


def test_growth_is_what_the_newest_token_added(folder: Any) -> None:
    for arch, grows in (("gemma2", 1), ("mistral", 0), ("llama", 2), ("mamba", 0)):  # layers that still grow
        made = planned(folder(arch), arch, num_beams=2)
        assert made["bytes_per_token"] == grows * 2 * 2 * 8 * 4  # keys and values, heads, head_dim, float32
        assert made["bytes_per_row"] * 2 == made["total_bytes"]


def test_code_that_reads_numbers_cannot_be_planned(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(TransformersRuntime, "prefill", broken)
    with pytest.raises(ModelError, match=r"cannot be planned without its weights: .*Tensor.item\(\)") as caught:
        planned(folder("llama"), "llama", kind="transformers")
    assert caught.value.hint == "a measurement needs the weights: leave out --plan"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_equal_those_loaded(tmp_path: Path, arch: str, dtype: str) -> None:
    auto = Runtime(model=str(checkpoint(arch, tmp_path)), dtype=dtype, device="cpu")  # type: ignore[arg-type]
    for runtime in (auto, replace(auto, runtime="transformers")):
        assert skeleton_of(runtime).weights == measured_weights(hub.load(runtime).model)


@pytest.mark.parametrize("options", [{}, {"pack": False}, {"quantize": "int8"}], ids=["packed", "plain", "int8"])
def test_weights_equal_those_loaded_in_any_layout(tmp_path: Path, options: dict[str, Any]) -> None:
    wide = checkpoint("llama", tmp_path, hidden_size=1024, tie_word_embeddings=True)
    names = ("builtin:stories", "builtin:numbers", str(wide))
    for model, kind in product(names, ("native", "transformers")):
        runtime = Runtime(model=model, device="cpu", runtime=kind, **options)  # type: ignore[arg-type]
        skeleton, measured = skeleton_of(runtime), measured_weights(hub.load(runtime).model)
        if kind == "transformers" and runtime.quantize:
            assert skeleton.weights >= measured
            assert skeleton.notes[-1].startswith("int8 is counted of native models alone: weights count as float32")
        else:
            assert skeleton.weights == measured


def test_auto_takes_the_type_of_the_config_then_of_the_files(tmp_path: Path, folder: Any) -> None:
    import json

    whole = checkpoint("llama", tmp_path)
    config = json.loads((whole / "config.json").read_text())
    for written, expected in (("bfloat16", "bfloat16"), (None, "float32")):
        (whole / "config.json").write_text(json.dumps({**config, "dtype": written}))
        skeleton = skeleton_of(Runtime(model=str(whole), device="cpu"))
        assert {layer["dtype"] for layer in skeleton.cache} == {expected}
        assert skeleton.notes == []
    (whole / "model.safetensors").unlink()
    assert skeleton_of(Runtime(model=str(whole), device="cpu")).notes == [
        "config.json names no dtype: float32 is taken; --dtype says otherwise"
    ]


def test_a_native_run_keeps_one_row_for_each_source(folder: Any) -> None:
    settings = {"batch": 2, "length": LENGTH, "source_length": PROMPT}
    rows = {}
    for name in ("native", "transformers"):
        runtime = Runtime(model=str(folder("t5")), device="cpu", runtime=name)  # type: ignore[arg-type]
        layers = plan(runtime, Generation(num_beams=3), **settings)["layers"]  # type: ignore[arg-type]
        rows[name] = {layer["shape"][0] for layer in layers if layer["kind"] == "cross-attention"}
    assert rows == {"native": {2}, "transformers": {6}}
