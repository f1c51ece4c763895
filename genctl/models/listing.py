"""The checkpoints that run without the network: the built-in ones, and those in the Hub's cache.

Reads config.json and the headers of weight files, as loading does. Imports no torch and no transformers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from genctl.errors import GenctlError, reason_of
from genctl.models import check, resolve, runtime_choice
from genctl.models.libraries import brief
from genctl.models.sizes import context_of
from genctl.params import Runtime


@dataclass(frozen=True)
class ListedModel:
    """A checkpoint. One with an `error` cannot be used; its unknown fields are None."""

    name: str  # as -m takes it
    path: str
    bytes: int | None  # on disk, all cached revisions together
    architecture: str | None = None
    dtype: str | None = None
    runtime: str | None = None
    why_not_native: str | None = None
    context: int | None = None  # tokens; None if there is no limit
    error: str | None = None

    def record(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def available() -> Iterator[ListedModel]:
    """The built-in checkpoints, then the cached ones by name. A damaged one has an `error`."""
    for name in resolve.builtins():
        folder = resolve.BUILTIN / name
        yield _listed(f"builtin:{name}", folder, folder)
    from huggingface_hub import constants

    try:
        folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--*"))
    except OSError:
        return
    for folder in folders:
        name = folder.name.removeprefix("models--").replace("--", "/")
        try:
            snapshot = resolve.HubCheckpoint(name, allow_pickle=True).cached()
        except Exception as error:  # any error of the Hub's client
            yield ListedModel(name, str(folder), _bytes(folder), error=brief(error))
            continue
        if snapshot is None:
            why = "the cache holds no whole snapshot of it with a config.json"
            yield ListedModel(name, str(folder), _bytes(folder), error=why)
        else:
            yield _listed(name, snapshot, folder)


def _listed(name: str, folder: Path, counted: Path) -> ListedModel:
    """The entry of a checkpoint folder. `counted` is the folder whose size counts."""
    size = _bytes(counted)
    try:
        checkpoint = check.inspect(folder, allow_pickle=True, trust_remote_code=True, need_tokenizer=False)
        native, why = runtime_choice.plan(Runtime(model=name), checkpoint, trust_remote_code=False)
        dtype = runtime_choice.dtype_of(Runtime(), checkpoint)
    except (GenctlError, OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if isinstance(error, GenctlError):
            reason = error.message
        else:
            reason = reason_of(error) if isinstance(error, OSError) else f"config.json cannot be used: {error}"
        return ListedModel(name, str(folder), size, error=" ".join(reason.split()))
    classes = checkpoint.config.get("architectures")
    kind = classes[0] if isinstance(classes, list) and classes else checkpoint.config.get("model_type", "unknown")
    return ListedModel(
        name,
        str(folder),
        size,
        architecture=str(kind),
        dtype=dtype,
        runtime="transformers" if native is None else "native",
        why_not_native=why or None,
        context=context_of(checkpoint.config),
    )


def _bytes(folder: Path) -> int | None:
    """The bytes of all files below a folder; a link and its target count once."""
    total = 0
    try:
        for parent, _, names in os.walk(folder):
            total += sum(os.lstat(os.path.join(parent, name)).st_size for name in names)  # noqa: PTH118 (as walked)
    except OSError:
        return None
    return total
