"""The length of a context is found in one way: the list of models and a run agree on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from genctl.models.architectures import read_native
from genctl.models.config_limits import context_of
from genctl.native.runtime import NativeConfig

_LINES = (Path(__file__).parent.parent / "data" / "real_configs.jsonl").read_text().splitlines()
PUBLISHED: dict[str, dict[str, Any]] = {line["name"]: line["config"] for line in map(json.loads, _LINES)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_context_of_config_json_is_that_of_the_loaded_configuration(name: str) -> None:
    fields = PUBLISHED[name]
    native = NativeConfig(fields, read_native(fields)[0])
    assert context_of(fields) == context_of(native)
    assert context_of(fields) == context_of(AutoConfig.for_model(**fields))


def test_a_model_without_a_limit_is_listed_without_one() -> None:
    """The length of training: BLOOM's biases and T5's relative positions reach further."""
    assert context_of({"model_type": "bloom", "seq_length": 2048}) is None
    assert context_of({"model_type": "t5", "n_positions": 512}) is None


def test_a_composite_has_the_context_of_the_part_that_writes() -> None:
    text = {"model_type": "llama", "max_position_embeddings": 77}
    assert context_of({"model_type": "llava", "text_config": text}) == 77
    encoder = {"model_type": "bert", "max_position_embeddings": 33}
    assert context_of({"model_type": "encoder-decoder", "encoder": encoder, "decoder": text}) == 77
    assert context_of({"model_type": "llava", "text_config": {"model_type": "llama"}}) == 2048  # the class's default


def test_only_a_whole_number_above_zero_is_a_length() -> None:
    assert context_of(PretrainedConfig()) is None
    for size in (0, -1, True, "many", 1.5):
        assert context_of({"model_type": "unheard-of", "n_positions": size}) is None


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, None),
        # the number in the file counts the factor already
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}, 64),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}}, 192),
        ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, 64),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e400}}, 64),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [2.0] * 8}}, None),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 512),
        # as Gemma 3 is published
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            131072,
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default"},
                    "sliding_attention": {"rope_type": "dynamic", "factor": 2.0},
                }
            },
            64,
        ),
    ],
    ids=str,
)
def test_scaled_positions_reach_as_far_as_generate_runs(fields: dict[str, Any], context: int | None) -> None:
    assert context_of({"model_type": "llama", "max_position_embeddings": 64, **fields}) == context
