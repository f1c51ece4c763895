"""What two checkpoints say otherwise of what is computed, beside their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from genctl.errors import ModelError
from genctl.models.weights import read_json

# fields of config.json that do not say what is computed
OTHER = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
    "pad_token_id", "quantization_config", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
SHOWN = 4  # fields in a sentence


def different_settings(reference: Path, other: Path) -> str:
    """The fields of both folders' config.json that differ, with their values; "" for none, or without such a file."""
    mine, theirs = ({name: value for name, value in _fields(_read(folder))} for folder in (reference, other))
    if not mine or not theirs:
        return ""
    names = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    shown = [f"{name} ({_value(mine.get(name))} and {_value(theirs.get(name))})" for name in names[:SHOWN]]
    left = len(names) - SHOWN
    return ", ".join([*shown, *([f"{left} more"] if left > 0 else [])])


def _read(folder: Path) -> Mapping[str, Any]:
    try:
        return read_json(folder / "config.json", "config.json")
    except ModelError:
        return {}


def _fields(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """All fields with their paths; null is as no field."""
    for name, value in config.items():
        if name in OTHER or value is None:
            continue
        if isinstance(value, Mapping):
            yield from _fields(value, f"{before}{name}.")
        else:
            yield before + name, value


def _value(value: Any) -> str:
    return "not set" if value is None else f"{value}"[:40]
