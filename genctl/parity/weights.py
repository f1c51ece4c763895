"""What two checkpoints have of their own: weights, and fields of config.json that say what is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from genctl.errors import ModelError, percent
from genctl.models.hub import LoadedModel
from genctl.models.weights import read_json

MOST = 2**22  # numbers of a tensor that are compared: rows spread over it
SHOWN = 3  # tensors in a sentence
# fields of config.json that do not say what is computed
OTHER = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
    "pad_token_id", "quantization_config", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
SHOWN_FIELDS = 4  # of config.json in a sentence
_BLOCKS = (0, 128, 64, 32)  # numbers that share a scale; 0: a row
_ON_GRID = 0.02  # of a step


def different_settings(reference: Path, other: Path) -> str:
    """The fields of both folders' config.json that differ, with their values; "" for none, or without such a file."""
    fields: list[dict[str, Any]] = []
    for folder in (reference, other):
        try:
            fields.append(dict(_fields(read_json(folder / "config.json", "config.json"))))
        except ModelError:
            return ""
    mine, theirs = fields
    if not mine or not theirs:
        return ""
    names = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    values = [["not set" if (value := own.get(name)) is None else f"{value}"[:40] for own in fields] for name in names]
    shown = [f"{name} ({' and '.join(both)})" for name, both in zip(names[:SHOWN_FIELDS], values, strict=False)]
    left = len(names) - SHOWN_FIELDS
    return ", ".join([*shown, *([f"{left} more"] if left > 0 else [])])


def _fields(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """All fields with their paths; null is as no field."""
    for name, value in config.items():
        if name in OTHER or value is None:
            continue
        if isinstance(value, Mapping):
            yield from _fields(value, f"{before}{name}.")
        else:
            yield before + name, value


def other_weights(reference: LoadedModel, other: LoadedModel) -> str:
    """Which tensors of `other` are neither rounded nor quantised copies, and by how much they differ; "" for none.

    Files that cannot be compared tensor by tensor (GGUF, pickles, other names) say nothing.
    """
    found: list[tuple[float, str]] = []
    count = 0
    for name, mine, theirs in _pairs(reference, other):
        count += 1
        if mine.shape != theirs.shape:
            return f"{name} has another shape"
        if not _is_copy(mine, theirs):
            norm = float(mine.norm())
            found.append((float((mine - theirs).norm()) / norm if norm else float("inf"), name))
    if not found:
        return ""
    found.sort(reverse=True)
    shown = ", ".join(f"{name} by {percent(share)}" for share, name in found[:SHOWN])
    left = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{len(found)} of {count} tensors are neither rounded nor quantised copies: {shown}{left}"


def equal_weights(reference: LoadedModel, other: LoadedModel) -> bool:
    """Whether all tensors of both are equal, as far as files can be compared."""
    found = [mine.shape == theirs.shape and torch.equal(mine, theirs) for _, mine, theirs in _pairs(reference, other)]
    return bool(found) and all(found)


def _pairs(reference: LoadedModel, other: LoadedModel) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The tensors of both with their names, rows f32 spread over each."""
    from safetensors import safe_open

    places: list[dict[str, Path]] = []
    for loaded in (reference, other):
        checkpoint, own = loaded.checkpoint, dict[str, Path]()
        if checkpoint is None or checkpoint.gguf or checkpoint.weights.pickled or loaded.adapter is not None:
            return
        for path in checkpoint.weights.files:
            with safe_open(path, framework="pt") as file:
                own |= dict.fromkeys(file.keys(), path)
        places.append(own)
    for name in sorted(places[0].keys() & places[1].keys()):
        rows = []
        for own in places:
            with safe_open(own[name], framework="pt") as file:
                part = file.get_slice(name)
                shape = part.get_shape()
                step = max(-(-torch.Size(shape).numel() // MOST), 1)
                tensor = part[::step] if shape and step > 1 else file.get_tensor(name)
                rows.append(tensor)
        if all(tensor.is_floating_point() for tensor in rows):
            yield name, rows[0].float(), rows[1].float()


def _is_copy(mine: Tensor, theirs: Tensor) -> bool:
    """Whether `theirs` are `mine`, rounded to a dtype or to codes."""
    if torch.equal(mine, theirs):
        return True
    if any(torch.equal(mine.to(dtype).float(), theirs) or torch.equal(theirs.to(dtype).float(), mine)
           for dtype in (torch.bfloat16, torch.float16)):  # fmt: skip
        return True
    return mine.dim() > 1 and (_is_coded(mine, theirs) or _is_coded(theirs, mine))


def _is_coded(numbers: Tensor, codes: Tensor) -> bool:
    """Whether `codes` are `numbers` on a grid of 8 bits, or of 16 values, in blocks: none is further than a step."""
    for size in _BLOCKS:
        size = size or codes.shape[-1]
        if codes.shape[-1] % size:
            continue
        blocks, own = codes.reshape(-1, size), numbers.reshape(-1, size)
        most = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        off = (blocks - own).abs()
        for levels in (127, 128):
            scaled = blocks / most * levels
            if bool(((scaled - scaled.round()).abs() < _ON_GRID * 8).float().mean() > 0.99) and bool(
                (off <= 1.01 * most / levels).all()
            ):
                return True
        ordered = blocks.sort(-1).values
        values = (ordered.diff(dim=-1) > 1e-3 * most).sum(-1) + 1
        if bool((values <= 16).all()) and size > 16 and bool((off <= most / 3).all()):
            return True
    return False
