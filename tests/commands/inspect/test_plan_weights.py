"""A plan counts the weights that the loaded model holds, and plans no cache that a run would refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from genctl.commands.inspect.plan import plan
from genctl.errors import ModelError
from genctl.models.hub import load
from genctl.native.runtime import NativeModel
from genctl.params import Generation, Runtime
from tests.native import seq2seq_variations, variations
from tests.tiny import checkpoint

NAMES = ["llama", "gpt2", "t5", "bart", "builtin:stories", "builtin:numbers"]


def planned(runtime: Runtime, **more: Any) -> dict[str, Any]:
    return plan(runtime, Generation(**more), batch=1, length=8, source_length=None)


@pytest.mark.parametrize("arch", NAMES)
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_planned_weights_are_those_that_are_held(arch: str, quantize: Any, tmp_path: Path) -> None:
    name = arch if arch.startswith("builtin:") else str(checkpoint(arch, tmp_path))
    runtime = Runtime(model=name, device="cpu", quantize=quantize)
    model = load(runtime).model
    assert isinstance(model, NativeModel)
    assert planned(runtime)["weights_bytes"] == model.bytes()


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_planned_weights_of_experts_are_those_that_are_held(arch: str, quantize: Any, tmp_path: Path) -> None:
    variations.model(arch).save_pretrained(tmp_path)
    runtime = Runtime(model=str(tmp_path), device="cpu", quantize=quantize)
    model = load(runtime).model
    assert isinstance(model, NativeModel)
    assert model.spec.experts is not None
    assert planned(runtime)["weights_bytes"] == model.bytes()


FAMILIES = ("gpt2", "falcon, new", "gemma2", "opt", "gpt_oss", "bloom")
SEQ2SEQ = ("t5", "bart", "marian", "m2m_100")


@pytest.mark.parametrize("name", [*FAMILIES, *SEQ2SEQ])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_config_alone_says_what_its_files_take(name: str, quantize: Any, tmp_path: Path) -> None:
    (seq2seq_variations if name in SEQ2SEQ else variations).model(name).save_pretrained(tmp_path)
    runtime = Runtime(model=str(tmp_path), device="cpu", runtime="native", quantize=quantize)
    model, whole = load(runtime).model, planned(runtime)
    (tmp_path / "model.safetensors").unlink()
    assert isinstance(model, NativeModel)
    assert planned(runtime) == whole
    assert whole["weights_bytes"] == model.bytes()


def test_a_tied_matrix_that_stays_mapped_is_counted_once(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=256, num_hidden_layers=1, num_attention_heads=4, tie_word_embeddings=True
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    native, theirs = (Runtime(model=str(tmp_path), device="cpu", runtime=kind) for kind in ("native", "transformers"))
    model = load(native).model
    assert isinstance(model, NativeModel)
    assert planned(native)["weights_bytes"] == model.bytes()
    angles = sum(tensor.nbytes for tensor in load(theirs).model.buffers())
    assert planned(theirs)["weights_bytes"] == model.bytes() + angles


def test_a_plan_refuses_what_a_run_refuses(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((checkpoint("mamba", tmp_path / "whole") / "config.json").read_bytes())
    with pytest.raises(ModelError, match="'mamba' is not a family that the native runtime knows"):
        planned(Runtime(model=str(alone), device="cpu", runtime="native"))
    with pytest.raises(ModelError, match="int4 needs the native runtime"):
        planned(Runtime(model=str(alone), device="cpu", quantize="int4"))
