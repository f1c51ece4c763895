"""A checkpoint is read once, whether it can be loaded or not."""

from __future__ import annotations

import errno
import json
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
        load(Runtime(model=str(folder), runtime="transformers"), on_event=heard.append)
    return sum(one.done == 1 for one in heard)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    held = load_file(folder / WEIGHTS)
    change(held)
    save_file(held, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held.pop("model.norm.weight"),
        lambda held: held.update({"model.norm.weight": torch.ones(7)}),
        lambda held: held.update({"model.layers.7.mlp.up_proj.weight": torch.ones(7)}),
    ],
    ids=["missing", "of another shape", "left over"],
)
def test_a_wrong_tensor_is_found_in_one_reading(change: Callable[[dict[str, torch.Tensor]], Any], llama: Path) -> None:
    edit(llama, change)
    assert readings(llama) == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        OSError(errno.EIO, "Input/output error"),
        SafetensorError("Error while deserializing header"),
        EOFError("Ran out of input"),
        ModelError("it is ours"),
        NotImplementedError("Cannot copy out of meta tensor; no data!"),
        AttributeError("module 'torch' has no attribute 'something'"),
    ],
)
def test_what_fails_is_not_tried_again(error: Exception, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    calls = []

    def failing(*_: Any, **__: Any) -> Any:
        calls.append(1)
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", failing)
    with pytest.raises(ModelError) as caught:
        load(Runtime(model=str(llama), runtime="transformers"))
    assert len(calls) == 1
    assert "\n" not in caught.value.message
    if "emory" in f"{type(error).__name__} {error}":
        assert "not enough memory" in caught.value.message


def test_a_sound_one_is_read_once(llama: Path) -> None:
    heard: list[Loading] = []
    load(Runtime(model=str(llama), runtime="transformers"), on_event=heard.append)
    assert sum(one.done == 1 for one in heard) == 1
    assert len(heard) == len(tiny("llama").state_dict())


def test_a_tokenizer_that_cannot_be_loaded_is_refused_before_the_weights_are_read(llama: Path) -> None:
    file = llama / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": {"type": "Unheard"}}))
    heard: list[Loading] = []
    with pytest.raises(ModelError, match="tokenizer"):
        load(Runtime(model=str(llama), runtime="native"), on_event=heard.append)
    assert not heard
