"""Sizes in a config.json are checked before anything is allocated; angles that cannot be computed are one line."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from genctl.errors import ModelError
from genctl.models import config_limits
from genctl.models.hub import load
from genctl.params import Runtime
from tests.cli.tool import genctl
from tests.hostile.damage import edit
from tests.tiny import checkpoint

BIG = 10**10


@pytest.mark.parametrize(
    ("arch", "name", "value"),
    [
        ("llama", "head_dim", BIG),
        ("llama", "head_dim", 10**6),
        ("mixtral", "num_local_experts", 10**6),
        ("mamba", "state_size", BIG),
        ("jamba", "mamba_d_state", BIG),
        ("gptj", "rotary_dim", BIG),
        ("t5", "d_kv", BIG),
        ("t5", "relative_attention_num_buckets", BIG),
        ("opt", "word_embed_proj_dim", BIG),
        ("bart", "encoder_attention_heads", BIG),
        ("llama", "rope_parameters", {"rope_type": "default", "inner_dim": BIG}),
        ("llama", "audio_config", {"deep": {"deeper": {"d_model": BIG}}}),
        ("llama", "conv_dim", [8, BIG]),
    ],
)
def test_an_absurd_size_is_refused_by_its_name(arch: str, name: str, value: Any, tmp_path: Path) -> None:
    folder = checkpoint(arch, tmp_path)
    edit("config.json", **{name: value})(folder)
    with pytest.raises(ModelError, match=rf"config\.json (says {name}|implies)"):
        load(Runtime(model=str(folder)))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_attention_heads": 60_000, "num_key_value_heads": 60_000, "head_dim": 60_000}, "implies at least"),
        (
            {"hidden_size": 2, "intermediate_size": 1, "num_hidden_layers": 50_000},
            "says num_hidden_layers = 50,000, but the weight files hold 21 tensors",
        ),
    ],
)
def test_sizes_that_are_absurd_only_together_are_refused(sizes: dict[str, int], words: str, tmp_path: Path) -> None:
    folder = checkpoint("llama", tmp_path)
    edit("config.json", **sizes)(folder)
    with pytest.raises(ModelError, match=words):
        load(Runtime(model=str(folder)))


@pytest.mark.night
def test_no_architecture_of_transformers_is_above_the_bounds_by_its_defaults() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    looked_at = 0
    for name in CONFIG_MAPPING_NAMES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                config = json.loads(CONFIG_MAPPING[name]().to_json_string())
            except Exception:  # it needs a library that is not here, or has no defaults
                continue
        config_limits.check_widths(config, 1 << 19)
        looked_at += 1
    assert looked_at > 300


# -- angles of rotary positions ----------------------------------------------------------------------------------------

_YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
_LLAMA3 = {**_YARN, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("runtime", ["auto", "native", "transformers"])
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": ..., "rope_theta": 1, "rope_scaling": _YARN},
        {"rope_parameters": {**_YARN, "beta_fast": -1}},
        {"rope_parameters": {**_LLAMA3, "low_freq_factor": 0}},
    ],
    ids=str,
)
def test_an_angle_that_cannot_be_computed_is_one_line(changes: dict[str, Any], runtime: str, tmp_path: Path) -> None:
    edit("config.json", **changes)(checkpoint("llama", tmp_path))
    done = genctl("run", "-m", str(tmp_path), "-n", "2", "the cat", "--runtime", runtime)
    assert done.status == 3
    assert re.fullmatch(r"error: .* cannot be loaded: (float |)(division by zero|math domain error)\n", done.err)
