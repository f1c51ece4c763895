"""Encoder-decoders: what is not known is not native; which matrices a file may hold, and which then are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from genctl.errors import ModelError
from genctl.models import hub
from genctl.models.architectures import ARCHITECTURES, read_native
from genctl.native.config import NotNative
from genctl.native.plan import WeightPlan
from genctl.native.runtime import NativeModel
from genctl.params import Runtime
from tests.native.seq2seq_variations import VARIATIONS, model


def config(name: str, **changes: Any) -> dict[str, Any]:
    made = {key: value for key, value in model(name).config.to_dict().items() if value is not None}
    return {**made, **changes}


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in model(name).state_dict().items()}


@pytest.mark.parametrize("name", VARIATIONS)
def test_every_variation_is_known(name: str) -> None:
    spec, _ = read_native(config(name))
    assert spec.family == VARIATIONS[name][0]
    assert ARCHITECTURES[spec.family].native.model_class == type(model(name)).__name__


@pytest.mark.parametrize("name", sorted({family for family, _ in VARIATIONS.values()}))
def test_a_field_that_nobody_knows_is_named(name: str) -> None:
    with pytest.raises(NotNative, match="attend_twice = True"):
        read_native(config(name, attend_twice=True))


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder"),
        ("t5", {"is_decoder": True}, "is_decoder"),
        ("t5", {"feed_forward_proj": "gated-gelu-new"}, "feed_forward_proj"),
        ("t5", {"feed_forward_proj": "gated_gelu"}, "dense_act_fn|gated_gelu"),
        ("t5", {"dense_act_fn": "gelu"}, "dense_act_fn"),
        ("t5", {"is_gated_act": True}, "is_gated_act"),
        ("t5", {"num_hidden_layers": 3}, "disagree"),
        ("t5", {"scale_decoder_outputs": "yes"}, "scale_decoder_outputs"),
        ("t5", {"relative_attention_num_buckets": 2}, "buckets"),
        ("t5", {"relative_attention_max_distance": 6}, "buckets"),
        ("t5", {"relative_attention_max_distance": 10**12}, "buckets"),
        ("mt5", {"num_decoder_layers": -1}, "num_decoder_layers"),
        ("bart", {"num_hidden_layers": 3}, "disagree"),
        ("bart", {"normalize_before": True}, "normalize_before"),
        ("bart", {"add_final_layer_norm": True}, "add_final_layer_norm"),
        ("mbart", {"normalize_before": False}, "normalize_before"),
        ("pegasus", {"static_position_embeddings": False}, "static_position_embeddings"),
        ("marian", {"normalize_embedding": True}, "normalize_embedding"),
        ("marian", {"decoder_vocab_size": 280}, "one matrix"),
        ("marian", {"decoder_attention_heads": 3}, "3"),
        ("bart", {"activation_function": ["gelu"]}, "activation"),
        ("bart", {"d_model": "wide"}, "d_model"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_its_name(name: str, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(NotNative, match=word):
        read_native(config(name, **changes))


def test_a_config_may_say_what_its_family_is() -> None:
    read_native(
        config("bart", normalize_before=False, add_final_layer_norm=False, normalize_embedding=True, num_beams=4)
    )
    read_native(config("pegasus", normalize_before=True, add_final_layer_norm=True, static_position_embeddings=True))
    read_native(config("t5", n_positions=512, output_past=True))


def test_tensors_that_are_missing_or_not_used_are_named() -> None:
    held = shapes("bart")
    name = "model.decoder.layers.1.encoder_attn.v_proj.bias"
    with pytest.raises(NotNative, match=name):
        WeightPlan(*read_native(config("bart")), {key: shape for key, shape in held.items() if key != name})
    with pytest.raises(NotNative, match=r"\[1, 2\]"):
        WeightPlan(*read_native(config("bart")), {**held, name: (1, 2)})
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
    """Each matrix that is there has its own numbers: the native model has the logits of what transformers ties."""
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
    """Older Marian files hold their sines; today they are computed."""
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
