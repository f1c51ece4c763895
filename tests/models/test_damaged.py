"""Damaged and hostile checkpoints: each is refused with one clear line, and nothing of it is run."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from genctl.errors import GenctlError, ModelError
from genctl.models import weights
from genctl.models.hub import load
from genctl.params import Runtime
from tests.hostile.damage import CONFIG, WEIGHTS, Damage, edit, tensors, write


@pytest.fixture
def llama(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(checkpoint_of("llama"), tmp_path / "llama"))


def refused(folder: Path | str, **options: Any) -> str:
    """The one line with which a checkpoint is refused."""
    with pytest.raises(ModelError) as caught:
        load(Runtime(model=str(folder)), **options)
    assert "\n" not in caught.value.message
    assert "Traceback" not in caught.value.message
    assert len(caught.value.message) < 600
    return caught.value.message


def config(**changes: Any) -> Damage:
    return edit(CONFIG, **changes)


GATE = "model.layers.1.mlp.gate_proj.weight"
BIG = 10**9

# damage that tests/hostile/test_checkpoints.py does not do; that runs the whole program
DAMAGES: dict[str, tuple[Damage, str]] = {
    "binary config": (write("config.json", b"\x80\x81"), "config.json is not UTF-8 text"),
    "vocabulary huge": (config(vocab_size=1 << 23), "far above what any model has"),
    "inner large": (config(intermediate_size=60_000), "implies at least .* parameters"),
    "hidden true": (config(hidden_size=True), "hidden_size = True, which is not a positive whole number"),
    "start out of range": (
        edit("generation_config.json", decoder_start_token_id=300),
        "decoder_start_token_id is 300, but the model's ids are 0 to 299",
    ),
    "tokenizer of nonsense": (
        write("tokenizer.json", b'{"version":"1.0","model":{"type":"BPE","vocab":3,"merges":[]}}'),
        "the tokenizer in .* cannot be loaded",
    ),
    "another name": (
        lambda folder: (folder / WEIGHTS).rename(folder / "weights.safetensors"),
        r"weights under another name or format \(weights.safetensors\)",
    ),
    "weights named": (config(transformers_weights="x.bin"), "names its weights 'x.bin'; rename that file"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_with_one_line(name: str, llama: Path) -> None:
    import re

    damage, said = DAMAGES[name]
    damage(llama)
    assert re.search(said, refused(llama, need_tokenizer=True))


def test_no_other_runtime_is_offered_where_a_tensor_is_missing(llama: Path) -> None:
    tensors(lambda held: held.pop(GATE))(llama)
    with pytest.raises(ModelError, match=f"hold nothing as {GATE}") as caught:
        load(Runtime(model=str(llama), runtime="native"))
    assert not caught.value.hint


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("./nowhere", "no such folder: ./nowhere"),
        ("/nowhere/at/all", "no such folder: /nowhere/at/all"),
        ("~/nowhere/x", "no such folder"),
        ("../nowhere", "no such folder"),
        ("a/b/c", "no such folder: a/b/c"),
        ("bad name", "no such folder: bad name"),
        ("x.git", "no such folder"),
        ("builtin:nothing", "no built-in checkpoint 'nothing'; there are:"),
        ("builtin:../hub", "no built-in checkpoint"),
        ("x" * 5000, "cannot read|no such folder"),
    ],
)
def test_a_name_that_leads_nowhere(model: str, said: str) -> None:
    import re

    with pytest.raises(ModelError) as caught:
        load(Runtime(model=model, offline=True))
    assert re.search(said, caught.value.message)


def test_position_tables_cannot_be_blown_up(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    learned = Path(shutil.copytree(checkpoint_of("gpt2"), tmp_path / "gpt2"))
    config(n_positions=10**7)(learned)
    assert "n_positions = 10,000,000, but the position table has 256 rows" in refused(learned)
    computed = Path(shutil.copytree(checkpoint_of("marian"), tmp_path / "marian"))
    config(max_position_embeddings=10**8)(computed)
    assert "max_position_embeddings = 100000000, far above" in refused(computed)


def test_pickle_weights_load_when_allowed_but_run_no_code(llama: Path, tmp_path: Path) -> None:
    held = load_file(llama / WEIGHTS)
    expected = load(Runtime(model=str(llama), runtime="transformers")).model.state_dict()
    (llama / WEIGHTS).unlink()
    torch.save(held, llama / "pytorch_model.bin")
    loaded = load(Runtime(model=str(llama)), allow_pickle=True)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items())

    witness = tmp_path / "witness"
    torch.save({"a": Opener(str(witness))}, llama / "pytorch_model.bin")
    assert "cannot be loaded" in refused(llama, allow_pickle=True)
    assert not witness.exists()


class Opener:
    """Unpickled without restraint, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


# -- any damage at all ------------------------------------------------------------------------------------------------

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def scratch(checkpoint_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(checkpoint_of("llama"), tmp_path_factory.mktemp("scratch") / "llama"))


@SETTINGS
@given(data=st.data())
def test_flipped_header_bytes_are_refused_or_harmless(
    scratch: Path, checkpoint_of: Callable[[str], Path], data: st.DataObject
) -> None:
    raw = bytearray((checkpoint_of("llama") / WEIGHTS).read_bytes())
    length = struct.unpack("<Q", raw[:8])[0]
    for at in data.draw(st.lists(st.integers(0, 8 + length - 1), min_size=1, max_size=4)):
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    path = scratch / WEIGHTS
    path.write_bytes(raw)
    said, held = "", {}
    try:
        held = weights.read_header(path)
    except ModelError as error:
        said = error.message
    assert "\n" not in said
    assert sum(tensor.end - tensor.begin for tensor in held.values()) < len(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(SETTINGS, max_examples=100)
@given(data=st.data())
def test_any_value_of_any_config_key_loads_or_is_refused(
    scratch: Path, checkpoint_of: Callable[[str], Path], data: st.DataObject
) -> None:
    for name in ("config.json", WEIGHTS):
        shutil.copy(checkpoint_of("llama") / name, scratch / name)
    keys = sorted(json.loads((scratch / "config.json").read_text(encoding="utf-8")))
    config(**{data.draw(st.sampled_from(keys)): data.draw(JSON)})(scratch)
    said = ""
    try:
        load(Runtime(model=str(scratch)))
    except GenctlError as error:
        said = error.message
    assert "\n" not in said
