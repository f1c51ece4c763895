"""What is not known is not native: a field, a kind of rope, a tensor that is missing or has another shape."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers

from genctl.models.architectures import ARCHITECTURES, read_native
from genctl.native.config import NotNative
from genctl.native.plan import WeightPlan
from genctl.native.positions import alibi_slopes
from tests.native.variations import VARIATIONS, model


def config(name: str = "llama", **changes: Any) -> dict[str, Any]:
    made = {key: value for key, value in model(name).config.to_dict().items() if value is not None}
    return {**made, **changes}


@pytest.mark.parametrize("name", VARIATIONS)
def test_every_variation_is_known(name: str) -> None:
    spec, _ = read_native(config(name))
    assert spec.family == VARIATIONS[name][0]


@pytest.mark.parametrize("name", sorted({family for family, _ in VARIATIONS.values()}))
def test_a_field_that_nobody_knows_is_named(name: str) -> None:
    with pytest.raises(NotNative, match="attend_twice = True"):
        read_native(config(name, attend_twice=True))


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("llama", {"model_type": "mamba"}, "mamba"),
        ("llama", {"model_type": ["llama"]}, "llama"),
        ("llama", {"hidden_act": "xielu"}, "xielu"),
        ("llama", {"hidden_act": ["silu"]}, "silu"),
        ("llama", {"rope_parameters": {"rope_type": "proportional"}}, "proportional"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "four"}}, "factor"),
        ("llama", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "4 of 8"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 16}}, "factor"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 0}}, "factor = 0"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor = 0"),
        ("llama", {"sliding_window": 4}, "sliding_window"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "longrope alone"),
        ("phi", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}}, "12 of 8"),
        ("falcon", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection"),
        ("gpt_neox", {"rope_theta": 500.0}, "rope_theta"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"num_key_value_heads": 3}, "3"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("llama", {"layer_types": ["full_attention"]}, "layer_types"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("qwen2", {"layer_types": ["linear_attention"] * 2}, "layer_types"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "many", "layer_types": None}, "another type"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, "another type"),
        (  # transformers reads it beside the two kinds of layers, where it cannot be
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}},
            "truncate",
        ),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ("gptj", {"rotary_dim": 5}, "rotary_dim"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_its_name(name: str, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(NotNative, match=word):
        read_native(config(name, **changes))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "falcon"])
@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0}, {"original_max_position_embeddings": 12}], ids=str)
@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 3.0},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=str,
)
def test_older_fields_of_angles_mean_what_transformers_reads(
    family: str, scaling: dict[str, Any], more: dict[str, Any]
) -> None:
    """The newer fields, which transformers writes for them, give the same spec: which `type` counts, whose length."""
    written = {key: value for key, value in config(family).items() if key not in ("rope_parameters", "rope_theta")}
    written |= {"rope_scaling": scaling, **more}
    read = type(model(family).config).from_dict(deepcopy(written)).to_dict()
    if family == "gemma3_text":  # its angles are computed from `rope_parameters` alone
        read.pop("original_max_position_embeddings", None)
    assert read_native(written)[0] == read_native({key: value for key, value in read.items() if value is not None})[0]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"use_cache": None}),
        ("llama", {"rms_norm_eps": 1}),
        ("llama", {"original_max_position_embeddings": None, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}),
    ],
    ids=str,
)
def test_what_transformers_refuses_without_need_is_read(name: str, changes: dict[str, Any]) -> None:
    """A type that its class does not allow, but that leaves nothing open."""
    assert read_native(config(name, **changes))


def test_a_missing_context_is_that_of_the_class() -> None:
    contexts = {row.name: row.native.context for row in ARCHITECTURES.values() if row.native and row.native.context}
    assert len(contexts) > 20
    for family, tokens in contexts.items():
        assert transformers.CONFIG_MAPPING[family]().max_position_embeddings == tokens


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in model(name).state_dict().items()}


def test_a_bare_decoder_has_no_prefix() -> None:
    bare = {key.removeprefix("transformer."): shape for key, shape in shapes("gpt2, tied").items()}
    assert WeightPlan(*read_native(config("gpt2, tied")), bare).decoder.prefix == ""


def test_a_missing_tensor_and_another_shape_are_named() -> None:
    held = shapes("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(NotNative, match=name):
        WeightPlan(*read_native(config()), {key: shape for key, shape in held.items() if key != name})
    with pytest.raises(NotNative, match=r"\[1, 2\]"):
        WeightPlan(*read_native(config()), {**held, name: (1, 2)})


def test_a_head_of_its_own_is_read_even_where_it_could_be_tied() -> None:
    plan = WeightPlan(*read_native(config("llama", tie_word_embeddings=True)), shapes("llama"))
    assert plan.embeddings["head"] == "lm_head.weight"
    without = {key: shape for key, shape in shapes("llama").items() if not key.startswith("lm_head")}
    plan = WeightPlan(*read_native(config("llama", tie_word_embeddings=True)), without)
    assert plan.embeddings["head"] == "model.embed_tokens.weight"
    with pytest.raises(NotNative, match="lm_head"):
        WeightPlan(*read_native(config("llama")), without)


def test_tensors_that_are_not_used_are_told() -> None:
    held = {**shapes("gpt2"), "transformer.h.0.attn.bias": (1,), "transformer.h.0.extra": (1,)}
    assert WeightPlan(*read_native(config("gpt2")), held).unused == ["transformer.h.0.extra"]


@pytest.mark.parametrize("heads", [4, 5, 6, 12, 16])
def test_slopes_of_alibi_are_those_of_transformers(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    mask = torch.ones(1, 2, dtype=torch.int64)
    assert build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1].tolist() == alibi_slopes(heads).tolist()
