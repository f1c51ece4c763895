"""Saved prompts (`--prompt-cache`), changed and signed again: anybody can compute their digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def signed(path: Path, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a prompt cache with the digest of its content."""
    metadata = {name: value for name, value in metadata.items() if name != "digest"}
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    tensors = {name: tensors[name].contiguous().clone() for name in sorted(tensors)}
    for name, tensor in tensors.items():
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    metadata["digest"] = digest.hexdigest()
    save_file(tensors, path, metadata={"genctl": json.dumps(metadata)})


def content(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata and the tensors of a prompt cache."""
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["genctl"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
