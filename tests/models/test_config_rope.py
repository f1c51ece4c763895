"""Angles of positions that cannot be computed are refused in one line, whoever would compute them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from genctl.models import config_limits
from tests.cli.tool import genctl
from tests.tiny import checkpoint

_YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("runtime", ["auto", "native", "transformers"])
@pytest.mark.parametrize(
    ("arch", "changes", "sentence"),
    [
        ("llama", {"rope_theta": 0}, "rope_theta = 0, which is not a number above 0"),
        ("llama", {"rope_theta": -1.5}, "rope_theta = -1.5, which is not a number above 0"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_parameters.rope_theta = 0"),
        ("gpt_neox", {"rotary_emb_base": 0}, "rotary_emb_base = 0"),
        ("gemma3", {"rope_local_base_freq": 0}, "rope_local_base_freq = 0"),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_theta": 0}}}, "full_attention.rope_theta = 0"),
        ("llama", {"rope_parameters": None, "rope_theta": 1, "rope_scaling": _YARN}, "yarn with rope_theta = 1"),
        ("llama", {"rope_parameters": {**_YARN, "beta_fast": -1}}, "beta_fast = -1, which is below 0"),
        ("llama", {"rope_parameters": {**_YARN, "factor": 0}}, "factor = 0, which is a divisor"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor = 0, which is a divisor"),
        ("llama", {"rope_parameters": {**_LLAMA3, "low_freq_factor": 0}}, "low_freq_factor = 0, which is a divisor"),
        ("llama", {"rope_parameters": {**_LLAMA3, "high_freq_factor": 0}}, "high_freq_factor = 0, which is a divisor"),
        ("gpt_neox", {"rotary_pct": 1.5}, "rotary_pct = 1.5, which is not between 0 and 1"),
        ("phi", {"partial_rotary_factor": 2}, "partial_rotary_factor = 2, which is not between 0 and 1"),
    ],
    ids=str,
)
def test_an_angle_that_cannot_be_computed_is_one_line(
    arch: str, changes: dict[str, Any], sentence: str, runtime: str, tmp_path: Path
) -> None:
    file = checkpoint(arch, tmp_path) / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    done = genctl("run", "-m", str(tmp_path), "-n", "2", "the cat", "--runtime", runtime)
    assert done.status == 3
    assert sentence in " ".join(done.err.split())
    assert "this is a bug" not in done.err.lower()


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1},
        {"rope_theta": None, "partial_rotary_factor": 1},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 0}},  # no factor at all
        {"rope_parameters": {**_YARN, "beta_fast": 0}},  # the default
        {"rope_theta": 1, "rope_scaling": {"type": "yarn", "short_factor": [1.0], "long_factor": [1.0]}},  # Phi-3's
    ],
    ids=str,
)
def test_what_can_be_computed_passes(config: dict[str, Any]) -> None:
    config_limits.check_angles(config)
