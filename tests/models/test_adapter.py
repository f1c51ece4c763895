"""`--adapter`: a base with an adapter gives the tokens of peft, merged or not; what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from genctl.errors import ModelError, UsageError
from genctl.models import libraries
from genctl.models.hub import load
from genctl.params import Runtime
from tests.cli.tool import genctl
from tests.hostile.damage import edit
from tests.tiny import checkpoint

peft = pytest.importorskip("peft")
PROMPT = [5, 60, 250, 7]
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


def lora(base: Path, folder: Path, **settings: Any) -> Path:
    """A LoRA adapter with random weights, large enough to change the tokens."""
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings})
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(3)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lora(base, tmp_path_factory.mktemp("adapter"))


def greedy(model: Any, count: int = 12) -> list[int]:
    ids = torch.tensor([PROMPT])
    made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    tokens: list[int] = made[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.parametrize("how", [[], ["--no-merge-adapter"], ["--no-pack"], ["--no-merge-adapter", "--no-pack"]])
def test_an_adapter_gives_the_tokens_of_peft(how: list[str], base: Path, adapter: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt_ids": PROMPT}))
    done = genctl(
        *("run", "-m", str(base), "--adapter", str(adapter), "-i", str(tmp_path / "rows.jsonl")),
        *("--format", "jsonl", "--scores", "--max-new-tokens", "12", "--no-do-sample", *how),
    )
    assert done.status == 0, done.err
    found = [token["id"] for token in json.loads(done.out)["tokens"]]
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert found != greedy(plain), "the adapter changes nothing"
    assert found == greedy(peft.PeftModel.from_pretrained(plain, str(adapter)))


def test_an_adapter_is_part_of_the_identity(base: Path, adapter: Path, tmp_path: Path) -> None:
    plain = load(Runtime(model=str(base))).fingerprint()
    with_it = load(Runtime(model=str(base), adapter=str(adapter))).fingerprint()
    other = load(Runtime(model=str(base), adapter=str(lora(base, tmp_path, r=2)))).fingerprint()
    assert len({plain, with_it, other}) == 3


@pytest.mark.parametrize(
    ("settings", "arch", "changes", "said"),
    [
        ({}, "gpt2", {}, "does not fit the model: .*q_proj"),
        ({}, "llama", {"hidden_size": 64}, "does not fit the model: .*size mismatch"),
        ({}, "llama", {"num_hidden_layers": 3}, "lacks 4 tensors for this model: base_model.model.model.layers.2"),
        ({}, "llama", {"num_hidden_layers": 1}, "holds 4 tensors that this model has no place for: .*layers.1"),
    ],
)
def test_an_adapter_of_another_base_is_refused(
    settings: Any, arch: str, changes: Any, said: str, adapter: Path, tmp_path: Path
) -> None:
    other = checkpoint(arch, tmp_path / "other", **changes)
    with pytest.raises(ModelError, match=said):
        load(Runtime(model=str(other), adapter=str(adapter)))


def test_files_that_are_no_adapter_are_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(ModelError) as said:
            load(Runtime(model=str(base), adapter=str(folder)))
        return said.value.message

    assert "there is no adapter_config.json" in refused(tmp_path)
    shutil.copy(adapter / "adapter_config.json", tmp_path)
    assert "has no adapter_model.safetensors" in refused(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing")
    assert "adapter_model.safetensors is truncated or corrupt" in refused(tmp_path)
    edit("adapter_config.json", peft_type="PREFIX_TUNING")(tmp_path)
    assert "is of the kind 'PREFIX_TUNING'; genctl adds LORA" in refused(tmp_path)
    with pytest.raises(ModelError, match="is an adapter") as said:
        load(Runtime(model=str(adapter)))
    assert said.value.hint == f"give its base as the model, and --adapter {adapter}"


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"r": 10_000_000}, r"says r = 10000000, but no tensor .* \(at most 64\)"),
        ({"r": 5}, "does not fit the model"),
        ({"rank_pattern": {"q_proj": 10_000_000}}, "says rank_pattern of q_proj = 10000000, but no tensor"),
        ({"rank_pattern": [4]}, "rank_pattern in adapter_config.json is no object"),
        ({"layer_replication": [[0, 2]] * 500_000}, "layer_replication makes 1000000 layers, but .* holds 8 tensors"),
        ({"layer_replication": "all"}, "is no list of first and last layers"),
        ({"peft_type": "LOHA", "r": 10_000_000}, "says r = 10000000, but no tensor"),
    ],
)
def test_sizes_that_the_tensors_do_not_have_are_refused(
    settings: Any, said: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    lying = Path(shutil.copytree(adapter, tmp_path / "lying"))
    edit("adapter_config.json", **settings)(lying)
    with pytest.raises(ModelError, match=said) as caught:
        load(Runtime(model=str(base), adapter=str(lying)))
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "(([a-z_.0-9])*)*!"},
        {"target_modules": ".*" * 7 + "!"},
        {"exclude_modules": "a" * 1001},
    ],
)
def test_a_pattern_that_takes_for_ever_is_refused(settings: Any, base: Path, adapter: Path, tmp_path: Path) -> None:
    hostile = Path(shutil.copytree(adapter, tmp_path / "hostile"))
    edit("adapter_config.json", **settings)(hostile)
    with pytest.raises(ModelError, match=r"in adapter_config\.json may take for ever: patterns with repeated groups"):
        load(Runtime(model=str(base), adapter=str(hostile)))


def test_patterns_of_real_adapters_are_accepted(base: Path, tmp_path: Path) -> None:
    unsloth = (
        r"(?:.*?(?:language|text|layers).*?(?:self_attn|attention|attn).*?(?:q_proj|v_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn)\.(?:(?:q_proj|v_proj)))"
    )
    made = lora(base, tmp_path, target_modules=unsloth, rank_pattern={r"layers\.[1]\..*": 2})
    assert load(Runtime(model=str(base), adapter=str(made))).fingerprint()


def test_layers_that_are_used_twice_give_the_tokens_of_peft(base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    deep = lora(base, tmp_path / "deep", layer_replication=[[0, 2], [1, 2]])
    expected = greedy(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(deep)))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt_ids": PROMPT}))
    done = genctl(
        *("run", "-m", str(base), "--adapter", str(deep), "-i", str(tmp_path / "rows.jsonl")),
        *("--format", "jsonl", "--max-new-tokens", "12", "--no-do-sample"),
    )
    assert done.status == 0, done.err
    assert done.records[0]["token_ids"] == expected
    refused = genctl("run", "-m", str(base), "--adapter", str(deep), "--merge-adapter", "x")
    message = f"merge_adapter = true contradicts layer_replication of --adapter {deep}: the layers that it makes"
    assert (refused.status, refused.err) == (3, f"error: {message} share their weights\n")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("settings", "beside"),
    [
        ({"target_modules": ["lm_head"]}, "lm_head shares its weight with model.embed_tokens.weight"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "model.embed_tokens shares its weight with lm_head.weight"),
        ({"target_modules": ["embed_tokens", "lm_head"]}, "shares its weight with"),
        ({"modules_to_save": ["lm_head"]}, ""),
        ({"modules_to_save": ["embed_tokens"]}, ""),
        ({"trainable_token_indices": [5, 60]}, ""),
        ({"lora_bias": True}, "lora_bias, and model.layers.0.self_attn.q_proj has no bias"),
    ],
    ids=str,
)
def test_embeddings_heads_and_biases_give_the_logits_of_peft(
    tied: bool, settings: dict[str, Any], beside: str, tmp_path: Path
) -> None:
    """What is added to a weight that two layers share changes both: it stays beside it."""
    from transformers import AutoModelForCausalLM

    base = checkpoint("llama", tmp_path / "base", tie_word_embeddings=tied)
    adapter = lora(base, tmp_path / "adapter", **settings)
    ids = torch.tensor([PROMPT])
    wanted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))(ids).logits
    why = beside if tied or "lora_bias" in settings else ""
    for merge in (None, False, True):
        if merge and why:
            with pytest.raises(ModelError, match=f"merge_adapter = true contradicts --adapter .*{why}"):
                load(Runtime(model=str(base), adapter=str(adapter), merge_adapter=True))
            continue
        found = load(Runtime(model=str(base), adapter=str(adapter), merge_adapter=merge))
        assert (found.model(ids).logits - wanted).abs().max() < 1e-4
        assert any(why in note and ("beside" if why or merge is False else "merged") in note for note in found.notes)


def test_a_missing_peft_is_named(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "is_missing", lambda module: module == "peft")
    with pytest.raises(ModelError, match="needs peft, which is not installed") as said:
        load(Runtime(model=str(base), adapter=str(adapter)))
    assert said.value.hint == 'pip install "genctl[peft]"'


def test_options_that_contradict_an_adapter_are_refused(base: Path, adapter: Path) -> None:
    with pytest.raises(UsageError, match="--runtime native and --adapter contradict"):
        load(Runtime(model=str(base), adapter=str(adapter), runtime="native"))
    with pytest.raises(UsageError, match="--adapter and --device-map auto"):
        load(Runtime(model=str(base), adapter=str(adapter), device_map="auto"))
    done = genctl("run", "-m", str(base), "--no-merge-adapter", "the cat")
    assert (done.status, "adapter" in done.err) == (2, True), done.err
