"""Tensors that a model does not take: an error where they belong to it, a note where nobody misses them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from genctl.errors import ModelError
from genctl.models.hub import LoadedModel, load
from genctl.params import Runtime
from tests.hostile.damage import edit
from tests.tiny import save, tiny

WEIGHTS = "model.safetensors"
FolderOf = Callable[[str], Path]


def copy(checkpoint_of: FolderOf, arch: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint_of(arch), tmp_path / arch))


def add(folder: Path, **tensors: torch.Tensor) -> None:
    held = load_file(folder / WEIGHTS)
    save_file({**held, **{name.replace("__", "."): one for name, one in tensors.items()}}, folder / WEIGHTS)


def read(folder: Path, runtime: Literal["auto", "transformers"] = "auto", **options: Any) -> LoadedModel:
    return load(Runtime(model=str(folder), runtime=runtime), **options)


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        read(folder, **options)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("arch", "changes", "held", "said"),
    [
        ("llama", {"num_hidden_layers": 1}, "model.layers.1", "num_hidden_layers = 1"),
        ("gpt2", {"n_layer": 0}, "transformer.h.0 to transformer.h.1", "n_layer = 0"),
        ("t5", {"num_layers": 1}, "encoder.block.1", "num_layers = 1"),
        ("t5", {"num_decoder_layers": 1}, "decoder.block.1", "num_decoder_layers = 1"),
        ("bart", {"encoder_layers": 1}, "model.encoder.layers.1", "encoder_layers = 1"),
        ("encoder_decoder", {"decoder__n_layer": 1}, "decoder.transformer.h.1", "decoder.n_layer = 1"),
        ("encoder_decoder", {"encoder__num_hidden_layers": 1}, "encoder.encoder.layer.1", "num_hidden_layers = 1"),
    ],
)
def test_fewer_layers_than_the_files_hold(
    arch: str, changes: dict[str, Any], held: str, said: str, checkpoint_of: FolderOf, tmp_path: Path
) -> None:
    """Each of these wrote other text and ended with 0."""
    folder = copy(checkpoint_of, arch, tmp_path)
    edit("config.json", **changes)(folder)
    message = refused(folder)
    assert message.startswith(f"the weight files hold {held}, but config.json says ")
    assert message.endswith(said)


def test_shards_and_pickles_are_no_different(checkpoint_of: FolderOf, tmp_path: Path) -> None:
    sharded, pickled = tmp_path / "sharded", copy(checkpoint_of, "gpt2", tmp_path)
    tiny("llama").save_pretrained(sharded, max_shard_size="60KB")
    edit("config.json", num_hidden_layers=1)(sharded)
    assert "hold model.layers.1, but config.json says num_hidden_layers = 1" in refused(sharded, need_tokenizer=False)
    torch.save(tiny("gpt2").state_dict(), pickled / "pytorch_model.bin")
    (pickled / WEIGHTS).unlink()
    assert read(pickled, allow_pickle=True).notes == ()
    edit("config.json", n_layer=1)(pickled)
    assert "hold transformer.h.1, but config.json says n_layer = 1" in refused(pickled, allow_pickle=True)


def test_names_without_the_models_prefix_are_the_same_names(checkpoint_of: FolderOf, tmp_path: Path) -> None:
    """GPT-2's own checkpoint has them so."""
    folder = copy(checkpoint_of, "gpt2", tmp_path)
    held = {name.removeprefix("transformer."): one for name, one in load_file(folder / WEIGHTS).items()}
    save_file(held, folder / WEIGHTS, metadata={"format": "pt"})
    assert read(folder).notes == ()
    edit("config.json", n_layer=1)(folder)
    assert "hold transformer.h.1, but config.json says n_layer = 1" in refused(folder)


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias"),
        ("llama", "model.layers.0.self_attn.q_norm.weight"),
        ("llama", "model.layers.0.mlp.experts.0.w1.weight"),
        ("llama", "model.norm.bias"),
        ("llama", "lm_head.bias"),
        ("gpt2", "transformer.h.0.attn.c_attn.scale"),
        ("t5", "decoder.block.0.layer.0.SelfAttention.q.bias"),
        ("bart", "model.encoder.layers.0.self_attn.gate.weight"),
    ],
)
def test_a_part_of_the_model_that_its_config_leaves_out(
    arch: str, name: str, checkpoint_of: FolderOf, tmp_path: Path
) -> None:
    folder = copy(checkpoint_of, arch, tmp_path)
    add(folder, **{name: torch.ones(32)})
    message = refused(folder)
    assert "the weight files hold 1 tensor that belongs to the model, but config.json makes one without it" in message
    assert name in message


@pytest.mark.parametrize(
    ("arch", "name", "shape"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", (4,)),
        ("llama", "model.layers.0.self_attn.masked_bias", ()),
        ("llama", "model.layers.0.self_attn.bias", (1, 1, 8, 8)),
        ("llama", "model.vision_tower.layers.7.weight", (8,)),
        ("llama", "model.image_newline", (8,)),
        ("llama", "vision_tower.encoder.layers.0.weight", (8,)),
        ("llama", "model.encoder.layers.0.fc1.weight", (8,)),
        ("llama", "model.layers.2.eh_proj.weight", (8,)),
        ("llama", "mtp.layers.0.weight", (8,)),
        ("llama", "score.weight", (8,)),
        ("llama", "stray", (8,)),
        ("gpt2", "transformer.h.0.attn.masked_bias", ()),
        ("encoder_decoder", "encoder.pooler2.classifier.weight", (8,)),
        ("encoder_decoder", "encoder.embeddings.position_ids", (1, 8)),
        ("bart", "model.encoder.version", (1,)),
        ("t5", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", (32, 4)),
    ],
)
def test_what_nobody_misses(
    arch: str, name: str, shape: tuple[int, ...], checkpoint_of: FolderOf, tmp_path: Path
) -> None:
    folder = copy(checkpoint_of, arch, tmp_path)
    plain = read(checkpoint_of(arch), runtime="transformers").model.state_dict()
    add(folder, **{name: torch.ones(shape)})
    found = read(folder, runtime="transformers")
    assert all(torch.equal(one, plain[key]) for key, one in found.model.state_dict().items())
    assert all("tensors in the weight files are not used" in note for note in found.notes)


def test_a_whole_layer_that_predicts_further_tokens_is_not_missed(checkpoint_of: FolderOf, tmp_path: Path) -> None:
    """DeepSeek-V3 and GLM-4.5 keep it behind the last layer of the model, under the next number."""
    folder = copy(checkpoint_of, "llama", tmp_path)
    layer = {name: one for name, one in load_file(folder / WEIGHTS).items() if name.startswith("model.layers.1.")}
    further = {name.replace("layers.1", "layers.2"): one.clone() for name, one in layer.items()}
    add(folder, **further, **{"model.layers.2.eh_proj.weight": torch.ones(32, 64)})
    assert "tensors in the weight files are not used" in read(folder).notes[0]
    add(folder, **{name.replace("layers.1", "layers.3"): one.clone() for name, one in layer.items()})
    assert "hold model.layers.3, but" in refused(folder)


def test_a_layer_whose_number_transformers_takes_for_the_one_that_predicts_further(tmp_path: Path) -> None:
    """Its list names layer 46 of one checkpoint; here that is a layer like the others."""
    settings = transformers.Glm4MoeConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=47,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, n_routed_experts=2, num_experts_per_tok=1,
        first_k_dense_replace=47, max_position_embeddings=64, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    save(transformers.Glm4MoeForCausalLM(settings).eval(), tmp_path)
    assert read(tmp_path).notes == ()
    edit("config.json", num_hidden_layers=46)(tmp_path)
    assert "hold model.layers.46, but config.json says num_hidden_layers = 46" in refused(tmp_path)
