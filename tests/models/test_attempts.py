"""A checkpoint that cannot be loaded is read once; one that does not bear the sparing way, twice."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from genctl.errors import ModelError
from genctl.events import Loading
from genctl.models.hub import load
from genctl.params import Runtime
from tests.tiny import checkpoint, tiny

WEIGHTS = "model.safetensors"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoint("llama", tmp_path / "llama")


def readings(folder: Path) -> int:
    """How often the weights of a checkpoint that is refused are read, tensor by tensor."""
    heard: list[Loading] = []
    with pytest.raises(ModelError):
        load(Runtime(model=str(folder)), on_event=heard.append)
    return sum(one.done == 1 for one in heard)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    held = load_file(folder / WEIGHTS)
    change(held)
    save_file(held, folder / WEIGHTS, metadata={"format": "pt"})


def test_a_missing_tensor_is_found_in_one_reading(llama: Path) -> None:
    edit(llama, lambda held: held.pop("model.norm.weight"))
    assert readings(llama) == 1


def test_a_wrong_shape_is_found_in_one_reading(llama: Path) -> None:
    edit(llama, lambda held: held.update({"model.norm.weight": torch.ones(7)}))
    assert readings(llama) == 1


def test_a_tensor_left_over_is_found_in_one_reading(llama: Path) -> None:
    edit(llama, lambda held: held.update({"model.layers.7.mlp.up_proj.weight": torch.ones(7)}))
    assert readings(llama) == 1


def test_a_broken_tokenizer_does_not_make_the_weights_be_read_again(llama: Path) -> None:
    told = json.loads((llama / "tokenizer.json").read_text())
    (llama / "tokenizer.json").write_text(json.dumps({**told, "model": {"type": "Oracle"}}))
    assert readings(llama) == 1


def test_the_command_line_reads_them_once_too(llama: Path) -> None:
    """Its imports are lean, which was a reason of its own to begin again."""
    edit(llama, lambda held: held.pop("model.norm.weight"))
    code = (
        "import sys, genctl.cli.app, genctl.models.hub as hub\n"
        "from genctl.errors import ModelError\n"
        "from genctl.params import Runtime\n"
        "heard = []\n"
        "try: hub.load(Runtime(model=sys.argv[1]), on_event=heard.append)\n"
        "except ModelError: sys.__stdout__.write(str(sum(one.done == 1 for one in heard)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(llama)], capture_output=True, text=True, check=True)
    assert done.stdout == "1"


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (MemoryError(), 1),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), 1),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 9 bytes"), 1),
        (OSError(errno.EIO, "Input/output error"), 1),
        (SafetensorError("Error while deserializing header"), 1),
        (EOFError("Ran out of input"), 1),
        (ModelError("it is ours"), 1),
        (NotImplementedError("Cannot copy out of meta tensor; no data!"), 2),
        (AttributeError("module 'torch' has no attribute 'something'"), 2),
    ],
)
def test_what_would_fail_again_is_not_tried_again(
    error: Exception, times: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    calls = []

    def failing(*_: Any, **__: Any) -> Any:
        calls.append(1)
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", failing)
    monkeypatch.delitem(sys.modules, "sympy", raising=False)
    with pytest.raises(ModelError) as caught:
        load(Runtime(model=str(llama)))
    assert len(calls) == times
    assert "\n" not in caught.value.message
    if times == 1 and "emory" in f"{type(error).__name__} {error}":
        assert "not enough memory" in caught.value.message


def test_a_sound_one_is_read_once(llama: Path) -> None:
    heard: list[Loading] = []
    load(Runtime(model=str(llama)), on_event=heard.append)
    assert sum(one.done == 1 for one in heard) == 1
    assert len(heard) == len(tiny("llama").state_dict())
