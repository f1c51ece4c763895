"""`--runtime auto` is native for well-known checkpoints, and computes what transformers computes.

`real_configs.jsonl` holds their config.json as published, written down from the libraries' documentation and model
cards, with sizes and ids shrunk. There is no generation_config.json, as in many of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from genctl.decode.runtime import Pass
from genctl.engines.strategy_choice import runtime_of
from genctl.models import hub
from genctl.native.runtime import NativeModel
from genctl.params import Runtime
from tests.cli.tool import genctl
from tests.tiny import sharpen, tokenizer
from tests.versions import OLDER, as_loaded, corrected

_LINES = (Path(__file__).parent.parent / "data" / "real_configs.jsonl").read_text().splitlines()
CONFIGS: dict[str, dict[str, Any]] = {row["name"]: row["config"] for row in map(json.loads, _LINES)}
NEW = 8
PROMPT = (5, 60, 7, 90, 33, 12, 4, 99, 100, 45, 3, 201)

# Tensors that some files hold beside the weights.
BESIDE: dict[str, dict[str, torch.Tensor]] = {
    "gpt2": {"h.0.attn.bias": torch.ones(1, 1, 8, 8).tril()},
    "pythia-70m": {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8).tril().bool(),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(1),
    },
    "llama-2-7b": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    "falcon-7b": {"transformer.h.0.self_attention.rotary_emb.inv_freq": torch.ones(4)},
    "stablelm-2-1.6b": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)},
}
# Files of the bare model: the prefix that their tensor names lack.
BARE = {"gpt2": "transformer.", "distilgpt2": "transformer.", "opt-125m": "model.", "bloom-560m": "transformer."} | {
    "bart-base": "model."
}


def saved(name: str, folder: Path) -> Path:
    """A checkpoint with random weights and this config.json."""
    config = CONFIGS[name]
    (folder / "config.json").write_text(json.dumps(config))
    read = transformers.AutoConfig.from_pretrained(folder)
    sources = config.get("is_encoder_decoder", False)
    kind = transformers.AutoModelForSeq2SeqLM if sources else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = kind.from_config(read)
        sharpen(model)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    file, bare = folder / "model.safetensors", BARE.get(name, "")
    tensors = {key.removeprefix(bare): value for key, value in load_file(file).items()}
    if "BartModel" in config["architectures"]:  # it was saved without its head
        tensors.pop("final_logits_bias", None)
    save_file({**tensors, **BESIDE.get(name, {})}, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_there_are_many() -> None:
    assert len(CONFIGS) >= 40


@pytest.mark.parametrize("name", CONFIGS)
def test_auto_is_native_and_logits_and_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path)
    loaded = hub.load(Runtime(model=str(folder), runtime="auto"))
    assert isinstance(loaded.model, NativeModel), loaded.runtime
    sources = loaded.is_encoder_decoder
    kind = transformers.AutoModelForSeq2SeqLM if sources else transformers.AutoModelForCausalLM
    config = corrected(transformers.AutoConfig.from_pretrained(folder))
    theirs = as_loaded(kind.from_pretrained(folder, config=config)).eval()
    if not sources:
        forward, ids = runtime_of(loaded.model), torch.tensor([PROMPT])
        with torch.no_grad():
            wanted = theirs(ids).logits
        torch.testing.assert_close(forward(Pass(ids, None, first=True)).logits, wanted, atol=1e-4, rtol=1e-4)
    # the greedy texts, where config.json's own settings would ask for beams
    plain = {"do_sample": False, "num_beams": 1, "max_new_tokens": NEW, "min_length": 0, "early_stopping": False}
    plain |= {"length_penalty": 1.0}
    theirs.generation_config.update(**plain)
    ids = torch.tensor([PROMPT])
    # with a cache, older versions re-read a text that outgrows its bound wrongly (phi3)
    rows = theirs.generate(ids, attention_mask=torch.ones_like(ids), use_cache=not OLDER)
    written = rows[0, 0 if sources else len(PROMPT) :].tolist()
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt_ids": PROMPT}))
    done = genctl(
        "run", "-m", str(folder), "-i", str(tmp_path / "in.jsonl"), "--runtime", "native", "--format", "jsonl",
        "-n", str(NEW), "--num-beams", "1", "--no-do-sample", "--min-length", "0",
    )  # fmt: skip
    assert done.status == 0, done.err
    found = json.loads(done.out)["token_ids"]
    assert found == (written[1:] if sources else written)[: len(found)]
    assert len(found) >= min(NEW, len(written) - sources)
