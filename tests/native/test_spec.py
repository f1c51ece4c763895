"""What is unknown is not native: a field, a kind of rope, a tensor that is missing or has another shape.

For encoder-decoders also which matrices a file may hold, and which of them are then tied.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from genctl.errors import ModelError
from genctl.models import hub
from genctl.models.architectures import ARCHITECTURES, read_native
from genctl.native.config import NotNative
from genctl.native.plan import WeightPlan
from genctl.native.positions import alibi_slopes
from genctl.native.runtime import NativeModel
from genctl.params import Runtime
from tests.native import seq2seq_variations, variations

VARIATIONS = variations.VARIATIONS | seq2seq_variations.VARIATIONS


def model(name: str) -> Any:
    return (variations if name in variations.VARIATIONS else seq2seq_variations).model(name)


def config(name: str = "llama", **changes: Any) -> dict[str, Any]:
    made = {key: value for key, value in model(name).config.to_dict().items() if value is not None}
    return {**made, **changes}


@pytest.mark.parametrize("name", VARIATIONS)
def test_every_variation_is_known(name: str) -> None:
    spec, _ = read_native(config(name))
    assert spec.family == VARIATIONS[name][0]
    native = ARCHITECTURES[spec.family].native
    assert native is not None
    assert native.model_class == type(model(name)).__name__


def test_a_field_that_nobody_knows_is_named() -> None:
    for name in {family for family, _ in VARIATIONS.values()}:
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
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "longrope alone"),
        ("phi", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}}, "12 of 8"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"num_key_value_heads": 3}, "3"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("llama", {"layer_types": ["full_attention"]}, "layer_types"),
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
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ("gptj", {"rotary_dim": 5}, "rotary_dim"),
        ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder"),
        ("t5", {"feed_forward_proj": "gated-gelu-new"}, "feed_forward_proj"),
        ("t5", {"feed_forward_proj": "gated_gelu"}, "dense_act_fn|gated_gelu"),
        ("t5", {"dense_act_fn": "gelu"}, "dense_act_fn"),
        ("t5", {"num_hidden_layers": 3}, "disagree"),
        ("t5", {"scale_decoder_outputs": "yes"}, "scale_decoder_outputs"),
        ("t5", {"relative_attention_num_buckets": 2}, "buckets"),
        ("t5", {"relative_attention_max_distance": 10**12}, "buckets"),
        ("mt5", {"num_decoder_layers": -1}, "num_decoder_layers"),
        ("bart", {"normalize_before": True}, "normalize_before"),
        ("bart", {"add_final_layer_norm": True}, "add_final_layer_norm"),
        ("mbart", {"normalize_before": False}, "normalize_before"),
        ("pegasus", {"static_position_embeddings": False}, "static_position_embeddings"),
        ("marian", {"normalize_embedding": True}, "normalize_embedding"),
        ("marian", {"decoder_vocab_size": 280}, "one matrix"),
        ("marian", {"decoder_attention_heads": 3}, "3"),
        ("bart", {"activation_function": ["gelu"]}, "activation"),
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
    """The newer fields, which transformers writes for them, give the same spec: which `type` counts, which length."""
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
    """A type that its class does not allow, but that is unambiguous."""
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


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "model.layers.1.mlp.up_proj.weight"), ("bart", "model.decoder.layers.1.encoder_attn.v_proj.bias")],
)
def test_a_missing_tensor_and_another_shape_are_named(family: str, name: str) -> None:
    held = shapes(family)
    with pytest.raises(NotNative, match=name):
        WeightPlan(*read_native(config(family)), {key: shape for key, shape in held.items() if key != name})
    with pytest.raises(NotNative, match=r"\[1, 2\]"):
        WeightPlan(*read_native(config(family)), {**held, name: (1, 2)})


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


def test_tensors_of_an_encoder_that_are_not_used_are_named() -> None:
    held = shapes("bart")
    more = {**held, "model.encoder.version": (1,), "model.encoder.extra": (1,)}
    assert WeightPlan(*read_native(config("bart")), more).unused == ["model.encoder.extra"]
    assert WeightPlan(*read_native(config("bart")), held).unused == []
    bare = {key.removeprefix("model."): shape for key, shape in held.items() if key not in ("lm_head.weight",)}
    assert WeightPlan(*read_native(config("bart")), bare).decoder.prefix == "decoder."


def test_matrices_that_could_be_either_are_not_guessed() -> None:
    held = {key: shape for key, shape in shapes("t5").items() if key not in ("shared.weight", "lm_head.weight")}
    with pytest.raises(NotNative, match=r"no shared\.weight, and several"):
        WeightPlan(*read_native(config("t5")), held)
    without = {key: shape for key, shape in shapes("bart").items() if key != "lm_head.weight"}
    with pytest.raises(NotNative, match="lack"):
        WeightPlan(*read_native(config("bart", tie_word_embeddings=False)), without)


EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize(
    "held", [(0,), (1,), (2,), (3,), (0, 3), (0, 1, 2), (0, 2, 3), (1, 2, 3), (0, 1, 2, 3)], ids=str
)
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_what_a_file_holds_of_the_embeddings(name: str, held: tuple[int, ...], tmp_path: Path) -> None:
    """Each matrix of the file has its own numbers: the native model ties those that transformers ties."""
    model(name).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "" if name == "t5" else "model."
    names = [end if end.startswith("lm_head") else prefix + end for end in EMBEDDINGS]
    first = tensors.pop(names[0])
    for place in held:
        tensors[names[place]] = first + torch.randn(first.shape, generator=torch.Generator().manual_seed(place)) * 0.1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ours = hub.load(Runtime(model=str(tmp_path), runtime="native")).model
    theirs = hub.load(Runtime(model=str(tmp_path), runtime="transformers", pack=False)).model
    assert isinstance(ours, NativeModel)
    assert ours.encoder is not None
    source, feed = torch.tensor([[5, 9, 17, 4]]), torch.tensor([[2, 7, 8]])
    with torch.no_grad():
        wanted = theirs(source, decoder_input_ids=feed).logits
    logits = ours.decoder(feed, torch.arange(3)[None], source=ours.encoder(source))
    assert ((logits - wanted).abs().max() / wanted.abs().max()).item() < 1e-5


def test_tables_of_positions_are_read_where_they_are_there(tmp_path: Path) -> None:
    """Older Marian files contain the table of sines; for newer ones it is computed."""
    model("marian").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert not any("embed_positions" in name for name in tensors)
    ours = hub.load(Runtime(model=str(tmp_path), runtime="native")).model
    table = ours.encoder.weights.positions
    assert torch.equal(table, model("marian").model.encoder.embed_positions.weight)
    tensors["model.encoder.embed_positions.weight"] = table + 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ours = hub.load(Runtime(model=str(tmp_path), runtime="native")).model
    assert torch.equal(ours.encoder.weights.positions, table + 1)
    assert torch.equal(ours.decoder.weights.positions, table)


def test_float16_is_transformers(tmp_path: Path) -> None:
    model("t5").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="float16"):
        hub.load(Runtime(model=str(tmp_path), runtime="native", dtype="float16"))
