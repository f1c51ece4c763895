"""Prompts that need more than their ids: saved prompts, which are prefilled already, and token healing.

A saved prompt is one safetensors file. Tensors: `tokens` int64 [T]; `hidden` f32 [1, T, H]; of each layer `self.I.keys`
and `self.I.values` `[1, heads, T, head_dim]` (windows in full, so that any prefix of the prompt can be reused), or
`self.I.conv.J` and `self.I.recurrent.J`; of an encoder-decoder also `source.tokens`, `source.states` and `cross.I.*`.
Metadata: one JSON object (`genctl`) with the model's identity and a digest of the metadata and of every tensor, because
safetensors detects a truncated file but not a changed number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from genctl.config import reader
from genctl.config.reader import Unreadable
from genctl.decode.processors.token_bytes import Spelling, spelling
from genctl.decode.types import Prefix, Source
from genctl.errors import InputError, ModelError, change, checkpoint_change, reason_of

if TYPE_CHECKING:
    from genctl.decode.runtime import ModelRuntime

SCHEMA = "genctl-prompt-cache/1"


@dataclass(frozen=True)
class PromptIdentity:
    """The model that a saved prompt belongs to. Any other model refuses the prompt."""

    checkpoint: str  # `LoadedModel.fingerprint`
    model: str  # as the user named it; shown in messages, not compared
    dtype: str
    transformers: str
    layout: str = ""  # how keys and values are stored, if the runtimes differ (`NativeModel.cache_layout`)


def packed(prefix: Prefix, identity: PromptIdentity) -> bytes:
    """The file content for a prefix that was read with `whole`. Raises ModelError if the model keeps no cache."""
    from safetensors.torch import save as serialize

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _tensors(prefix).items()}
    fields = {name: value for name, value in asdict(identity).items() if value or name != "layout"}
    metadata = {"schema": SCHEMA, **fields}
    metadata["digest"] = _digest(metadata, tensors)
    return bytes(serialize(tensors, metadata={"genctl": json.dumps(metadata)}))


def load(path: Path, identity: PromptIdentity, forward: ModelRuntime) -> Prefix:
    """Load the prefix from a file made by `packed`.

    Anybody can compute the digest of a file, so names, types and shapes are also compared with those of a new prefix.
    Raises InputError if the file is damaged, or from another checkpoint, dtype, cache layout or transformers version.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with reader.opened(path, regular=True) as start:
            header = int.from_bytes(start.read(8), "little")
        if not header:  # all of a sparse file would be mapped
            raise ValueError("it has no header")
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = reader.loads((file.metadata() or {}).get("genctl", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — a handle, not a dict
    except (Unreadable, OSError) as error:
        why = reason_of(error) if isinstance(error, OSError) else error
        raise InputError(f"cannot read the prompt cache {path}: {why}") from error
    except (SafetensorError, ValueError) as error:
        raise InputError(f"{path} is damaged, or not a prompt cache: it is not a safetensors file") from error
    if not isinstance(metadata, dict) or metadata.get("schema") != SCHEMA:
        raise InputError(f"{path} is not a prompt cache: genctl inspect-cache --save-cache writes them")
    if metadata.pop("digest", None) != _digest(metadata, tensors):
        raise InputError(f"{path} is damaged: its content has changed since it was written")
    if differences := _differences(metadata, identity):
        why = "; ".join(differences)
        raise InputError(f"the prompt cache {path} does not fit: {why}", hint="write it again with --save-cache")
    if problem := _misfit(tensors, forward):
        raise InputError(f"{path} is damaged: {problem}")
    tensors = {name: tensor.to(forward.device) for name, tensor in tensors.items()}
    cache = forward.new_cache(whole=True)
    cache.load_state_dict(tensors, len(tensors["tokens"]))
    source = None if cache.cross is None else Source(tensors["source.tokens"][None], tensors["source.states"])
    nothing = torch.empty(1, 0)  # no logits: a run reads the last token of the prompt again
    return Prefix(tensors["tokens"][None], cache, nothing, tensors.get("hidden"), None, source)


def _tensors(prefix: Prefix) -> dict[str, Tensor]:
    """The tensors to save of a prefix. Raises ModelError if the model keeps no cache."""
    if prefix.cache is None:
        raise ModelError("the model keeps no cache, so there is none to save")
    tensors = {"tokens": prefix.tokens[0]}
    if prefix.hidden is not None:
        tensors["hidden"] = prefix.hidden
    tensors |= prefix.cache.state_dict()
    if prefix.source is not None:
        tensors |= {"source.tokens": prefix.source.ids[0], "source.states": prefix.source.states}
    return tensors


def _differences(metadata: dict[str, Any], identity: PromptIdentity) -> list[str]:
    """How the model differs from the one that wrote the file, a clause for each difference."""
    differ = []
    if (made := metadata.get("checkpoint")) != identity.checkpoint:
        before = str(metadata.get("model"))
        differ.append(checkpoint_change(identity.model, made, identity.checkpoint, before=before))
    for key in ("dtype", "transformers"):
        if metadata.get(key) != getattr(identity, key):
            differ.append(change(key, metadata.get(key), getattr(identity, key)))
    if metadata.get("layout", "") != identity.layout:
        differ.append("the runtime that made it keeps keys and values in another way (--runtime native, transformers)")
    return differ


def _misfit(tensors: dict[str, Tensor], forward: ModelRuntime) -> str:
    """Why the tensors of a file do not fit a model; "" if they do."""
    source = forward.encode((0,)) if forward.is_encoder_decoder else None
    expected = _tensors(forward.prefill((0,), source, whole=True, hidden="hidden" in tensors))
    if lacking := sorted(expected.keys() - tensors.keys()):
        return f"it lacks {lacking[0]}"
    if more := sorted(tensors.keys() - expected.keys()):
        return f"the model has no place for {more[0]!r:.60}"
    for name, example in expected.items():
        tensor, shape = tensors[name], list(example.shape)
        of_source = name.startswith(("source.", "cross."))
        # the tokens' dimension; states of a fixed size have none
        axis = {"tokens": 0, "hidden": 1, "states": 1, "keys": 2, "values": 2}.get(name.rpartition(".")[2])
        if axis is not None:
            shape[axis] = tensors["source.tokens" if of_source else "tokens"].numel()
        if list(tensor.shape) != shape or tensor.dtype != example.dtype or not tensor.numel():
            found, wanted = (f"{kind} {size}".removeprefix("torch.") for kind, size in
                             ((tensor.dtype, list(tensor.shape)), (example.dtype, shape)))  # fmt: skip
            return f"{name} is {found}, not {wanted}"
    return ""


def _digest(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class HealedPrompt(NamedTuple):
    """A prompt without its last tokens, and their `text`, which is empty if there was nothing to heal."""

    ids: tuple[int, ...]
    text: str
    words: Spelling


def heal(tokenizer: Any, ids: Sequence[int], vocab_size: int, stops: Sequence[str] = ()) -> HealedPrompt:
    """Remove the tokens at the end of `ids` that a longer token could cover; the new text must begin with their text.

    A prompt that ends in "http:" was tokenised without the following "//", and "://" is one token. transformers'
    `heal_tokens` removes one token and prefers tokens that begin with its text. This removes as many as a longer token
    could cover, the strategy chooses as usual, and any number of tokens may spell the text, but it is spelled exactly.

    At least one id stays. Nothing is removed across special tokens, inside a character, or where a stop string could
    begin. Raises UsageError if the tokenizer's text is not the sum of its tokens.
    """
    words = spelling(tokenizer, vocab_size, "token_healing")
    end = b""
    best = HealedPrompt(tuple(ids), "", words)
    for place in range(len(ids) - 1, 0, -1):
        token = ids[place]
        piece = words.pieces[token] if 0 <= token < len(words.pieces) else b""
        end = piece + end
        if not piece or len(end) >= words.longest:
            break
        if not any(len(words.pieces[longer]) > len(end) for longer in words.beginning(end)):
            continue
        try:
            text = end.decode()
        except UnicodeDecodeError:
            continue
        # a stop must not be in the text, nor begin there and continue after it
        if not any(stop in text or any(text.endswith(stop[:n]) for n in range(1, len(stop))) for stop in stops):
            best = HealedPrompt(tuple(ids[:place]), text, words)
    return best
