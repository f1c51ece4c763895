"""Texts beyond a model's training context, with scaled rotary positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.cli.tool import Done, genctl
from tests.tiny import checkpoint

TRAINED = 32  # tokens
_LONG = {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 8.0]}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0},
    "longrope": {"factor": 4.0, **_LONG},
}
NOTE = f"the text is longer than the {TRAINED} tokens that the model was trained on"
IDS = tuple(torch.randint(3, 300, (60,), generator=torch.Generator().manual_seed(4)).tolist())


def scaled(folder: Path, arch: str = "llama", **fields: Any) -> Path:
    """A checkpoint whose config.json has these fields in place of its own position fields."""
    file = checkpoint(arch, folder) / "config.json"
    own = {key: value for key, value in json.loads(file.read_text()).items() if not key.startswith("rope")}
    file.write_text(json.dumps({**own, "max_position_embeddings": TRAINED, **fields}))
    return folder


def written(folder: Path, runtime: str, ids: tuple[int, ...], new: int, *flags: str) -> Done:
    row = json.dumps({"prompt_ids": ids})
    flags = (*flags, "--runtime", runtime, "--format", "jsonl", "-n", str(new))
    return genctl("run", "-m", str(folder), "-i", "-", "--input-format", "jsonl", *flags, stdin=row)


def generated(folder: Path, ids: tuple[int, ...], new: int) -> list[int]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([ids])
    rows = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new)
    found: list[int] = rows[0, len(ids) :].tolist()
    return found


def forms(kind: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The ways in which files specify a kind of scaling: architecture, and fields of config.json."""
    entry = SCALINGS[kind]
    nested = {
        "full_attention": {"rope_type": kind, "rope_theta": 1e6, **entry},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    original = {"original_max_position_embeddings": TRAINED}
    return {
        "rope_parameters": ("llama", {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **entry}}),
        "rope_scaling": ("llama", {"rope_scaling": {"type": kind, **entry}}),
        "with the original length": ("llama", {"rope_scaling": {"rope_type": kind, **entry, **original}}),
        "for each kind of layer": ("gemma3", {"rope_parameters": nested}),
        "for each kind of layer, older": ("gemma3", {"rope_scaling": {"rope_type": kind, **entry}}),
    }


@pytest.mark.parametrize("runtime", ["native", "transformers"])
@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("form", forms("linear"))
def test_texts_beyond_the_trained_length_are_those_of_generate(
    form: str, kind: str, runtime: str, tmp_path: Path
) -> None:
    arch, fields = forms(kind)[form]
    folder = scaled(tmp_path, arch, **fields)
    for length, new in ((TRAINED - 4, 12), (len(IDS), 6)):  # one grows beyond it, one is beyond it from the start
        done = written(folder, runtime, IDS[:length], new)
        assert done.status == 0, done.err
        assert done.records[0]["token_ids"] == generated(folder, IDS[:length], new)
        assert done.records[0]["finish_reason"] == "length"
        assert done.err.count(NOTE) == 1


def test_the_context_ends_at_the_factor_times_the_original_length_or_nowhere(tmp_path: Path) -> None:
    folder = scaled(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
    done = written(folder, "native", IDS, 100)
    assert (done.records[0]["finish_reason"], done.records[0]["usage"]["new_tokens"]) == ("context", 4)
    assert written(folder, "native", IDS + IDS, 1).records[0]["error"]["message"].endswith("context is 64")
    folder = scaled(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0})
    done = written(folder, "native", IDS * 4, 100)
    assert (done.records[0]["finish_reason"], done.records[0]["usage"]["new_tokens"]) == ("length", 100)


def test_a_note_comes_only_where_the_trained_length_is_passed(tmp_path: Path) -> None:
    folder = scaled(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0})
    assert "trained" not in written(folder, "native", IDS[:8], TRAINED - 8).err
    assert NOTE in written(folder, "native", IDS[:8], TRAINED - 7).err
    assert "trained" not in written(folder, "native", IDS, 4, "-q").err


def test_without_a_bound_plans_and_windows_have_the_trained_length(tmp_path: Path) -> None:
    folder = str(scaled(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0}))
    plan = json.loads(genctl("inspect-cache", "-m", folder, "--plan", "--format", "json").out)["plan"]
    assert (plan["length"], plan["context"]) == (TRAINED, None)
    assert genctl("score", "-m", folder, "the cat sat on the mat. " * 4, "--stride", "8").status == 0
