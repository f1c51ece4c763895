"""A prefilled prompt on disk: its keys and values, so that later runs need not compute them again.

One safetensors file. Tensors: `tokens` int64 [T]; `hidden` f32 [1, T, H]; for each layer `self.I.keys` and
`self.I.values` `[1, heads, T, head_dim]` (windows in full, so that any prefix of the prompt can be reused), or
`self.I.conv.J` and `self.I.recurrent.J`; of an encoder-decoder also `source.tokens`, `source.states` and `cross.I.*`.
Metadata: one JSON object (`genctl`) with the identity of the file and a digest of it and of every tensor, because
safetensors detects a truncated file but not a changed number.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from genctl.config import reader
from genctl.config.reader import Unreadable
from genctl.decode.cache.cache import Cache
from genctl.decode.types import Prefix, Source
from genctl.errors import InputError, ModelError, reason_of
from genctl.identity import change, checkpoint_change

if TYPE_CHECKING:
    from genctl.decode.runtime import ModelRuntime

SCHEMA = "genctl-prompt-cache/1"
_LONGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors library
_TOKENS = {"prompt": "tokens", "source": "source.tokens"}


@dataclass(frozen=True)
class PromptIdentity:
    """The model that a saved prompt belongs to. It is refused for any other."""

    checkpoint: str  # `LoadedModel.fingerprint`
    model: str  # as the user named it; shown in messages, not compared
    dtype: str
    transformers: str
    layout: str = ""  # how keys and values are stored, if the runtimes differ (`NativeModel.cache_layout`)

    def fields(self) -> dict[str, str]:
        """The metadata of a file."""
        return {name: value for name, value in asdict(self).items() if value or name != "layout"}


def packed(prefix: Prefix, identity: PromptIdentity) -> bytes:
    """The file of a prefix that was prefilled with `whole`. Raises ModelError if the model keeps no cache."""
    from safetensors.torch import save as serialize

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _tensors(prefix).items()}
    metadata = {"schema": SCHEMA, **identity.fields()}
    metadata["digest"] = _digest(metadata, tensors)
    return bytes(serialize(tensors, metadata={"genctl": json.dumps(metadata)}))


def _tensors(prefix: Prefix) -> dict[str, Tensor]:
    """The tensors of a prefix's file. Raises ModelError if the model keeps no cache."""
    if prefix.cache is None:
        raise ModelError("the model keeps no cache, so there is none to save")
    tensors: dict[str, Tensor] = {"tokens": prefix.tokens[0]}
    if prefix.hidden is not None:
        tensors["hidden"] = prefix.hidden
    tensors |= prefix.cache.state_dict()
    if prefix.source is not None:
        tensors |= {"source.tokens": prefix.source.ids[0], "source.states": prefix.source.states}
    return tensors


def load(path: Path, identity: PromptIdentity, forward: ModelRuntime) -> Prefix:
    """The prefix that `packed` wrote, prefilled with `whole`.

    Anybody can compute the digest of a file, so names, types and shapes are also compared with those of a new prefix.
    Raises InputError if the file is damaged, or of another checkpoint or dtype.
    """
    from safetensors import SafetensorError, safe_open

    try:
        _check_header(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = reader.loads((file.metadata() or {}).get("genctl", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — a handle, not a dict
    except Unreadable as error:
        raise InputError(f"cannot read the prompt cache {path}: {error}") from None
    except OSError as error:
        raise InputError(f"cannot read the prompt cache {path}: {reason_of(error)}") from error
    except (SafetensorError, ValueError) as error:
        raise InputError(f"{path} is damaged, or not a prompt cache: it is not a safetensors file") from error
    if not isinstance(metadata, dict) or metadata.get("schema") != SCHEMA:
        raise InputError(f"{path} is not a prompt cache: genctl inspect-cache --save-cache writes them")
    if metadata.pop("digest", None) != _digest(metadata, tensors):
        raise InputError(f"{path} is damaged: its content has changed since it was written")
    _compare(path, metadata, identity)
    if problem := _misfit(tensors, forward):
        raise InputError(f"{path} is damaged: {problem}")
    return _prefix({name: tensor.to(forward.device) for name, tensor in tensors.items()}, forward.new_cache(whole=True))


def _check_header(path: Path) -> None:
    """Raises Unreadable, or ValueError for a file that safetensors need not map to refuse it."""
    with reader.opened(path, regular=True) as file:
        size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= _LONGEST_HEADER:
        raise ValueError("no header")


def _misfit(tensors: dict[str, Tensor], forward: ModelRuntime) -> str:
    """Why the tensors of a file do not fit a model; "" if they do."""
    source = forward.encode((0,)) if forward.is_encoder_decoder else None
    expected = _tensors(forward.prefill((0,), source, whole=True, hidden="hidden" in tensors))
    if lacking := sorted(expected.keys() - tensors.keys()):
        return f"it lacks {lacking[0]}"
    if more := sorted(tensors.keys() - expected.keys()):
        return f"the model has no place for {more[0]!r:.60}"
    lengths = {part: tensors[name].numel() for part, name in _TOKENS.items() if name in tensors}
    for name, example in expected.items():
        tensor, shape = tensors[name], list(example.shape)
        part, axis = _length_axis(name)
        if axis is not None:
            shape[axis] = lengths[part]
        if list(tensor.shape) != shape or tensor.dtype != example.dtype or not tensor.numel():
            kinds = [f"{str(kind).removeprefix('torch.')} {list(size)}" for kind, size in
                     ((tensor.dtype, tensor.shape), (example.dtype, shape))]  # fmt: skip
            return f"{name} is {kinds[0]}, not {kinds[1]}"
    return ""


def _length_axis(name: str) -> tuple[str, int | None]:
    """The part whose tokens a tensor has, and its dimension of tokens: None for a state of a fixed size."""
    part = "source" if name.startswith(("source.", "cross.")) else "prompt"
    last = name.rpartition(".")[2]
    return part, {"tokens": 0, "hidden": 1, "states": 1, "keys": 2, "values": 2}.get(last)


def _compare(path: Path, metadata: dict[str, Any], identity: PromptIdentity) -> None:
    expected = asdict(identity)
    differ = []
    if (made := metadata.get("checkpoint")) != identity.checkpoint:
        before = str(metadata.get("model"))
        differ.append(checkpoint_change(identity.model, made, identity.checkpoint, before=before))
    for key in ("dtype", "transformers"):
        if metadata.get(key) != expected[key]:
            differ.append(change(key, metadata.get(key), expected[key]))
    if metadata.get("layout", "") != identity.layout:
        differ.append("the runtime that made it keeps keys and values in another way (--runtime native, transformers)")
    if differ:
        raise InputError(
            f"the prompt cache {path} does not fit: {'; '.join(differ)}", hint="write it again with --save-cache"
        )


def _prefix(tensors: dict[str, Tensor], cache: Cache) -> Prefix:
    cache.load_state_dict(tensors, len(tensors["tokens"]))
    source = None
    if cache.cross is not None:
        source = Source(tensors["source.tokens"][None], tensors["source.states"])
    nothing = torch.empty(1, 0)  # the logits: a run reads the last token of the prompt again
    return Prefix(tensors["tokens"][None], cache, nothing, tensors.get("hidden"), None, source)


def _digest(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
