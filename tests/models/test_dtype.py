"""`--dtype auto`: a checkpoint's own numbers, except that a GPU computes float32 checkpoints in half of the bits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from genctl.models import check, hub, with_transformers
from genctl.params import Runtime
from tests.tiny import checkpoint


def chosen(folder: Path, said: Any, device: str | None, **options: Any) -> tuple[Any, list[str]]:
    made = check.inspect(folder, allow_pickle=False, trust_remote_code=False, need_tokenizer=True)
    runtime = Runtime(model=str(folder), **options)
    config = {key: value for key, value in made.config.items() if key not in ("dtype", "torch_dtype")}
    if said is not None:
        config["dtype"] = str(said).removeprefix("torch.")
    made = dataclasses.replace(made, config=config)
    return with_transformers.dtype_on(None if device is None else torch.device(device), made, runtime)


def test_a_gpu_reads_float32_as_what_it_is_good_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("gpt2", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    told = ["float32 weights are read as bfloat16 on this GPU; --dtype float32 keeps them"]
    assert chosen(folder, torch.float32, "cuda") == (torch.bfloat16, told)
    assert chosen(folder, None, "cuda") == (torch.bfloat16, told)  # a config without a word: its tensors say
    assert chosen(folder, torch.float16, "cuda:1") == ("auto", [])
    assert chosen(folder, torch.float32, "cuda", dtype="float32") == (torch.float32, [])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert chosen(folder, torch.float32, "cuda")[0] is torch.float16


def test_weights_that_are_spread_go_by_the_gpus_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("gpt2", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    for there, wanted in ((True, torch.bfloat16), (False, "auto")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert chosen(folder, torch.float32, None)[0] == wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_float32_checkpoint_lies_on_a_gpu_in_half_of_the_bits(tmp_path: Path) -> None:
    found = hub.load(Runtime(model=str(checkpoint("gpt2", tmp_path)), device="cuda"))
    assert found.model.dtype in (torch.bfloat16, torch.float16)
    assert any("float32 weights are read as" in note for note in found.notes)


# Of the tensor that is first by name, of the last, and of all others; sorted by name they need not lie so in the file.
MIXED = [
    (torch.float16, torch.float32, torch.float32),
    (torch.float32, torch.float16, torch.float32),
    (torch.bfloat16, torch.float32, torch.float16),
    (torch.float32, torch.bfloat16, torch.bfloat16),
]


@pytest.mark.parametrize("kinds", MIXED, ids=str)
@pytest.mark.parametrize("shards", [1, 3])
def test_without_a_word_in_config_json_mixed_types_are_read_as_transformers_reads_them(
    kinds: tuple[torch.dtype, torch.dtype, torch.dtype], shards: int, tmp_path: Path
) -> None:
    folder = checkpoint("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    kind_of = dict.fromkeys(names, kinds[2]) | {names[0]: kinds[0], names[-1]: kinds[1]}
    tensors = {name: tensors[name].to(kind_of[name]) for name in reversed(names)}
    write_by_hand(folder, tensors, shards)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "dtype" not in k}))
    wanted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype
    assert {hub.load(Runtime(model=str(folder), runtime=name)).model.dtype for name in ("native", "transformers")} == {
        wanted
    }


@pytest.mark.parametrize("named", ["bfloat16", "float32"])
def test_an_index_may_name_the_type(named: str, tmp_path: Path) -> None:
    folder = checkpoint("llama", tmp_path)
    tensors = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    write_by_hand(folder, tensors, 2, {"dtype": named})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "dtype" not in k}))
    wanted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype
    assert wanted == getattr(torch, named)
    assert hub.load(Runtime(model=str(folder), runtime="native")).model.dtype == wanted


def write_by_hand(
    folder: Path, tensors: dict[str, torch.Tensor], shards: int, metadata: dict[str, Any] | None = None
) -> None:
    """Safetensors files whose tensors lie in the given order, which their library would not keep."""
    names = list(tensors)
    each = -(-len(names) // shards)
    weight_map = {}
    for number in range(shards):
        file = folder / ("model.safetensors" if shards == 1 else f"model-{number + 1}.safetensors")
        header, data = {}, b""
        for name in names[number * each : (number + 1) * each]:
            raw = tensors[name].contiguous().view(torch.uint8).numpy().tobytes()
            kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[tensors[name].dtype]
            place = [len(data), len(data) + len(raw)]
            header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": place}
            weight_map[name] = file.name
            data += raw
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    if shards > 1:
        index = {"metadata": metadata or {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
