"""The weight files of a checkpoint, from their headers alone: no tensor is read.

A safetensors file: 8 bytes with the header's length N (little endian), N bytes of JSON with each tensor's dtype, shape
and byte range, then the tensors, without gaps (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genctl.config import reader
from genctl.config.reader import DuplicateKey, Unreadable, once
from genctl.errors import ModelError, reason_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_FORMATS = ("*.safetensors", "*.gguf", "*.h5", "*.msgpack", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
LARGEST_JSON = 64_000_000  # bytes; the index of the largest public checkpoints has a tenth of this
LARGEST_NUMBER = 1 << 63  # in a shape or a byte range
_SHARD = re.compile(r"\w[\w .+-]{,200}\.safetensors", re.ASCII)


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int  # in bytes, from the start of the file
    end: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a checkpoint. `tensors` is empty for pickle files, which cannot be inspected.

    `dtype` is what transformers uses if config.json has none: the type in the index, else that of the
    first floating-point tensor of the first file, by name.
    """

    files: tuple[Path, ...]
    tensors: dict[str, Tensor]
    pickled: bool = False
    dtype: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of all tensors; of the files, if no header lists the tensors."""
        if self.tensors:
            return sum(tensor.end - tensor.begin for tensor in self.tensors.values())
        return sum(file.stat().st_size for file in self.files if file.is_file())


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError, naming `what`, for anything else."""
    try:
        text = reader.read(path, LARGEST_JSON, regular=True).decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=once)
    except Unreadable as error:
        raise ModelError(f"cannot read {what}: {error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{what} is {reason_of(error)}") from error
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, DuplicateKey) else reason_of(error)
        raise ModelError(f"{what} is not usable JSON: {reason}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{what} holds a JSON {type(value).__name__}, not an object")
    return value


def find(folder: Path, config: dict[str, Any], *, allow_pickle: bool) -> WeightFiles:
    """The weights of a checkpoint folder, with every header checked. Raises ModelError."""
    if (named := config.get("transformers_weights")) is not None:
        raise ModelError(f"config.json names its weights {named!r:.80}; rename that file to {SINGLE}")
    if (folder / SINGLE).is_file():
        header = read_header(folder / SINGLE)
        return WeightFiles((folder / SINGLE,), header, dtype=_first_dtype(header))
    if (folder / INDEX).is_file():
        return _sharded(folder, folder / INDEX)
    if dangling := [name for name in (SINGLE, INDEX) if (folder / name).is_symlink()]:
        raise ModelError(f"{dangling[0]} in {folder} is a link to a file that is gone")
    pickles = sorted(path for path in folder.glob("pytorch_model*.bin"))
    if pickles and allow_pickle:
        return WeightFiles(tuple(pickles), {}, pickled=True)
    if pickles:
        message = f"{folder} has only pickle weights ({few([path.name for path in pickles])})"
        hint = "safetensors weights are safe; pickle files can run code as they are read"
        raise ModelError(f"{message}, refused without --allow-pickle", hint=hint)
    others = sorted({path.name for pattern in _OTHER_FORMATS for path in folder.glob(pattern)} - {"training_args.bin"})
    if others:
        problem = f"{folder} has weights under another name or format ({few(others)})"
        raise ModelError(f"{problem}; expected {SINGLE} or {INDEX}")
    raise ModelError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")


def read_header(path: Path) -> dict[str, Tensor]:
    """Each tensor of a safetensors file, by name. Raises ModelError if it is truncated or inconsistent."""
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as file:
            data = 8 + int.from_bytes(file.read(8), "little")
            if data == 8:
                raise ValueError("its header is empty")  # before a sparse file is mapped completely
            with safe_open(path, framework="np"):  # which checks types, shapes and byte ranges
                header = json.loads(file.read(data - 8), object_pairs_hook=once)
    except OSError as error:
        raise ModelError(f"cannot read {path.name}: {reason_of(error)}") from error
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is truncated or corrupt: {shown(str(error), 200)}") from error
    header.pop("__metadata__", None)
    return {
        name: Tensor(entry["dtype"], tuple(entry["shape"]), *(data + at for at in entry["data_offsets"]))
        for name, entry in header.items()
    }


def _sharded(folder: Path, index: Path) -> WeightFiles:
    content = read_json(index, index.name)
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index.name} has no weight_map, so it is not an index of shards")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            problem = f"{index.name} names a weight file outside the folder, or of another format"
            raise ModelError(f"{problem}: {shown(str(shard), 80)}")
    shards = sorted(set(weight_map.values()))
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise ModelError(f"{len(missing)} of {len(shards)} shards are missing: {few(missing)}")
    headers = {shard: read_header(folder / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise ModelError(f"{index.name} says that {shard} holds {shown(name)}, but it does not")
    dtype_name = metadata.get("dtype") if isinstance(metadata, dict) else None
    dtype = dtype_name if isinstance(dtype_name, str) else _first_dtype(headers[shards[0]])
    tensors = {name: headers[shard][name] for name, shard in weight_map.items()}
    return WeightFiles(tuple(folder / shard for shard in shards), tensors, dtype=dtype)


def _first_dtype(header: dict[str, Tensor]) -> str:
    """The type of the first floating-point tensor by name, in torch's spelling; "" if there is none."""
    kinds = (header[name].dtype for name in sorted(header))
    return next((_FLOATS[kind] for kind in kinds if kind in _FLOATS), "")


def shown(name: str, most: int = 120) -> str:
    """An untrusted name, made safe for one line of a message."""
    text = "".join(char if char.isprintable() else "\ufffd" for char in name)
    return text if len(text) <= most else text[: most - 1] + "…"


def few(names: list[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shown(name) for name in names[:most]) + more
