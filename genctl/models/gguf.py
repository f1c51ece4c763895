"""GGUF files: one file with the config, the tokenizer and the weights, which transformers reads as its own classes.

The weights are unpacked to floating-point numbers when they are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from genctl.errors import ModelError, reason_of
from genctl.models import check, fingerprint, optional_packages
from genctl.models.generation_settings import GenerationSettings
from genctl.models.library_errors import guarded
from genctl.models.weights import WeightFiles, shown

SUFFIX = ".gguf"
_MAGIC = b"GGUF"


def inspect(path: Path, *, need_tokenizer: bool) -> check.Checkpoint:
    """Check a GGUF file and read its config. Raises ModelError."""
    name = shown(path.name)
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(f"cannot read {name}: {reason_of(error)}") from error
    if magic != _MAGIC:
        raise ModelError(f"{name} is no GGUF file: it does not begin with GGUF")
    optional_packages.require(name, ("gguf",), "gguf")
    config, has_tokenizer = guarded(lambda: _read(path), f"{name} cannot be read")
    if need_tokenizer and not has_tokenizer:
        raise ModelError(
            f"{name} holds no tokenizer, so it cannot read text",
            hint='prompts in token ids need none: rows such as {"prompt_ids": [5, 60, 7]} in a JSONL input',
        )
    check.check_numbers(config)
    stamps = fingerprint.stamps(path.parent, [path], code=False)
    own = {path.name: stamps[path.name]}
    settings = GenerationSettings({}, name)
    return check.Checkpoint(path.parent, config, settings, WeightFiles((path,), {}), has_tokenizer, own, path.name)


def _read(path: Path) -> tuple[dict[str, Any], bool]:
    """The config as transformers reads it, and whether there is a tokenizer."""
    from gguf import GGUFReader
    from transformers import AutoConfig

    fields = GGUFReader(path).fields
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    return {**config.to_dict(), "model_type": config.model_type}, "tokenizer.ggml.tokens" in fields
