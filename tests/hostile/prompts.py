"""Saved prompts (`--prompt-cache`), spoilt by a random number and signed again: anybody can compute their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE = "prompt.cache"
_DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool)
_WAYS: dict[str, Callable[[Tensor, Random], Tensor]] = {
    "another type": lambda tensor, random: tensor.to(random.choice(_DTYPES)),
    "a value less": lambda tensor, random: tensor.narrow(*_cut(tensor, random)),
    "twice": lambda tensor, random: torch.cat([tensor, tensor], random.randrange(max(tensor.dim(), 1))),
    "empty": lambda tensor, random: tensor.narrow(random.randrange(max(tensor.dim(), 1)), 0, 0),
    "a dimension less": lambda tensor, random: tensor[0],
    "a dimension more": lambda tensor, random: tensor[None],
    "one number": lambda tensor, random: tensor.flatten()[0].reshape(()),
    "turned": lambda tensor, random: tensor.transpose(0, -1),
    "not a number": lambda tensor, random: torch.full_like(tensor.float(), float("nan")).to(tensor.dtype),
    "large": lambda tensor, random: torch.full_like(tensor, 10**12 if tensor.dtype == torch.int64 else 1e38),
}


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


def spoil(folder: Path, random: Random) -> str:
    """Change one tensor of the saved prompt in a folder; returns what was done."""
    metadata, tensors = content(folder / FILE)
    name = random.choice(sorted(tensors))
    way = random.choice(["removed", "renamed", *_WAYS])
    tensor = tensors.pop(name)
    if way == "renamed":
        tensors[f"{name}.0"] = tensor
    elif way != "removed":
        tensors[name] = _WAYS[way](tensor, random)
    signed(folder / FILE, metadata, tensors)
    return f"{name}: {way}"


def _cut(tensor: Tensor, random: Random) -> tuple[int, int, int]:
    axis = random.randrange(max(tensor.dim(), 1))
    return axis, 0, tensor.shape[axis] - 1
