"""A checkpoint larger than the memory it may take: the same tokens, less memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.tool import genctl
from tests.tiny import sharpen

LIMIT = 190 << 20
MEASURE = """
import json, sys
import torch, accelerate, transformers
from transformers import AutoModelForCausalLM
import transformers.models.llama.modeling_llama
from genctl.params import Runtime
from genctl.models.hub import load

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))

before = resident()
options = {"device_map": "auto", "max_memory": sys.argv[2], "offload_folder": sys.argv[3]} if sys.argv[2:] else {}
model = load(Runtime(model=sys.argv[1], runtime="transformers", pack=False, **options)).model
ids, most = [5, 60, 250, 7], 0
with torch.no_grad():
    for _ in range(3):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        most = max(most, resident() - before)
print(json.dumps({"ids": ids, "bytes": most}))
"""


def large(folder: Path) -> int:
    """A llama of 1.5 times the limit, in small shards; its bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=8,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    model: Any = LlamaForCausalLM(config)
    sharpen(model)
    model.save_pretrained(folder, max_shard_size="50MB")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def measured(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_a_checkpoint_larger_than_its_memory_runs_within_it(tmp_path: Path) -> None:
    assert large(tmp_path / "large") > 1.5 * LIMIT
    whole = measured(str(tmp_path / "large"))
    bounded = measured(str(tmp_path / "large"), f"cpu={LIMIT >> 20}MiB", str(tmp_path / "off"))
    assert bounded["ids"] == whole["ids"]
    assert bounded["bytes"] < LIMIT < whole["bytes"], (bounded["bytes"], whole["bytes"])


def test_a_folder_that_cannot_be_written_to_is_refused_early(tmp_path: Path) -> None:
    def refused(folder: str) -> str:
        done = genctl(
            "run", "-m", "builtin:stories", "--device-map", "auto", "--offload-folder", folder, "-n", "3", "a"
        )
        assert (done.status, done.out) == (2, "")
        return done.err

    (tmp_path / "file").write_bytes(b"")
    problem = f"error: --offload-folder {tmp_path}/file cannot be written to"
    assert refused(str(tmp_path / "file")) == f"{problem}: File exists\n"
    assert "/file/below cannot be written to: Not a directory" in refused(str(tmp_path / "file" / "below"))
    assert "--offload-folder /proc/nowhere cannot be written to: No such file or directory" in refused("/proc/nowhere")
    assert "--offload-folder is empty" in refused("")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of a file's size stands for a full disk")
def test_a_full_disk_is_reported_with_the_flag(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        done = genctl("run", "-m", "builtin:stories", "--device-map", "auto", "--offload-folder", str(tmp_path), "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (done.status, done.err) == (2, f"error: --offload-folder {tmp_path} cannot be written to: File too large\n")
    assert not list(tmp_path.iterdir())
