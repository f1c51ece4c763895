"""Which class loads a checkpoint: as transformers would, or a sentence that is true."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import genctl
from genctl.errors import ModelError
from genctl.models.hub import load
from genctl.params import Runtime
from tests.cli.tool import genctl as tool
from tests.zoo import recipes
from tests.zoo.compare import PROMPTS, quiet

_TEXT = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama4() -> Any:
    """The whole model, as it lies on the Hub; AutoModelForCausalLM takes the text model from it."""
    vision = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 28,
        "patch_size": 14, "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32,
    }  # fmt: skip
    text = {
        **_TEXT, **_IDS, "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1,
    }  # fmt: skip
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    return transformers.Llama4ForConditionalGeneration(config)


def test_the_text_model_of_a_larger_one_writes_what_generate_writes(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = llama4().eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim >= 2:
                    weight.normal_(0.0, 1.0 / weight.shape[-1] ** 0.5)
    model.save_pretrained(tmp_path)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[11, 48, 205, 93, 160]])
    made = oracle.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=2)
    (result,) = genctl.load(str(tmp_path)).generate([ids[0].tolist()], max_new_tokens=12)
    assert list(result.sequences[0].token_ids) == made[0, 5:].tolist()


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("voxtral_realtime", "VoxtralRealtimeForConditionalGeneration", "does not run without sound"),
        ("emu3", "Emu3ForConditionalGeneration", "is none of the classes with which transformers continues a text"),
        ("llava", "LlavaForConditionalGeneration", "is none of the classes with which transformers continues a text"),
        ("bark", "BarkModel", "has no language-model head"),
        ("bert", "BertForMaskedLM", "has no language-model head, so it cannot generate text"),
        ("gpt2", "GPT2Model", "has no language-model head, so it cannot generate text"),
        ("gpt2", "GPT2ForSequenceClassification", "has no language-model head"),
    ],
)
def test_the_others_are_refused_with_a_sentence_that_is_true(
    kind: str, name: str, said: str, tmp_path: Path, llama: Path
) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "copy"))
    sizes = {key: value for key, value in json.loads((folder / "config.json").read_text()).items() if key == "dtype"}
    (folder / "config.json").write_text(json.dumps({**sizes, "model_type": kind, "architectures": [name]}))
    with pytest.raises(ModelError) as caught:
        load(Runtime(model=str(folder)))
    assert said in caught.value.message
    assert name in caught.value.message


def test_a_text_model_by_itself_is_loaded_with_its_own_class(tmp_path: Path) -> None:
    config = copy.deepcopy(recipes.build("causal/mllama").config.text_config)
    with quiet():
        torch.manual_seed(0)
        model = transformers.MllamaForCausalLM(config).eval()
        recipes.draw(model)
        recipes.tiny.save(recipes._with_ids(model), tmp_path)
        loaded = genctl.load(str(tmp_path), device="cpu")
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
            found = loaded.generate([list(prompt)], max_new_tokens=8, do_sample=False)[0].sequences[0].tokens
            assert [token.id for token in found] == wanted[0, len(prompt) :].tolist()
    assert tool("inspect-cache", "-m", str(tmp_path), "--plan", "--length", "16").status == 0


def test_an_outer_vocabulary_of_nested_configs_is_no_size_of_a_tensor(tmp_path: Path) -> None:
    name = "seq2seq/t5gemma"
    with quiet():
        file = recipes.make(name, tmp_path) / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 256_000}))
        loaded = genctl.load(str(tmp_path), device="cpu")
        model = recipes.auto_class(name).from_pretrained(tmp_path).eval()
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
            found = loaded.generate([list(prompt)], max_new_tokens=8, do_sample=False)[0].sequences[0].tokens
            assert [token.id for token in found] == wanted[0, 1 : 1 + len(found)].tolist()
