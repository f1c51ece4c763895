"""Quantised checkpoints: the tokens are those of transformers, or the missing package is named."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from genctl.errors import ModelError
from genctl.models.hub import load
from genctl.params import Runtime
from tests.cli.tool import genctl
from tests.hostile.damage import edit
from tests.tiny import checkpoint, tokenizer

PROMPT = [5, 60, 250, 7]


def torchao(folder: Path) -> None:
    """int8 weights, as torchao writes them through transformers."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    base = checkpoint("llama", folder / "base")
    config = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(base, quantization_config=config).save_pretrained(folder / "packed")


def compressed_tensors(folder: Path) -> None:
    """int8 weights with a scale for each row, packed in words."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama", folder / "base"))
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            scale = module.weight.detach().abs().amax(1, keepdim=True) / 127
            module.weight_scale.data = scale.to(module.weight_scale.dtype)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="pack-quantized")
    compressor.compress_model(model)
    model.save_pretrained(folder / "packed")
    compressor.update_config(folder / "packed")


def greedy(model: Any, count: int = 12) -> list[int]:
    ids = torch.tensor([PROMPT])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    tokens: list[int] = made[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [torchao, compressed_tensors])
def test_a_quantised_checkpoint_continues_as_with_transformers(make: Callable[[Path], None], tmp_path: Path) -> None:
    pytest.importorskip(make.__name__)
    from transformers import AutoModelForCausalLM

    make(tmp_path)
    folder = tmp_path / "packed"
    assert json.loads((folder / "config.json").read_text())["quantization_config"]
    tokenizer().save_pretrained(folder)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt_ids": PROMPT}))
    done = genctl(
        "run",
        *("-m", str(folder), "-i", str(tmp_path / "rows.jsonl"), "--format", "jsonl", "--scores"),
        *("--max-new-tokens", "12", "--no-do-sample"),
    )
    assert done.status == 0, done.err
    found = [token["id"] for token in json.loads(done.out)["tokens"]]
    assert found == greedy(AutoModelForCausalLM.from_pretrained(folder))
    assert len(found) > 4


def test_a_quantization_config_of_another_type_is_refused(tmp_path: Path) -> None:
    edit("config.json", quantization_config="gptq")(checkpoint("llama", tmp_path))
    with pytest.raises(ModelError, match=r"config\.json cannot be used"):
        load(Runtime(model=str(tmp_path)))


@pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is not None, reason="gptqmodel is installed")
def test_a_package_that_a_quantised_checkpoint_needs_is_named(tmp_path: Path) -> None:
    edit("config.json", quantization_config={"quant_method": "awq", "bits": 4})(checkpoint("llama", tmp_path))
    with pytest.raises(ModelError, match=r"cannot be loaded: .*gptqmodel"):
        load(Runtime(model=str(tmp_path)))
