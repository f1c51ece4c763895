"""A checkpoint is read once, whether it can be loaded or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genctl.errors import ModelError
from genctl.events import Loading
from genctl.models.hub import load
from genctl.params import Runtime
from tests.tiny import checkpoint, tiny

WEIGHTS = "model.safetensors"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoint("llama", tmp_path / "llama")


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
