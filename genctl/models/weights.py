"""The weight files of a checkpoint, from their headers alone: no tensor is read.

A safetensors file: 8 bytes with the header's length N (little endian), N bytes of JSON with each tensor's dtype, shape
and byte range, then the tensors, without gaps (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from genctl.documents import reader
from genctl.documents.reader import DuplicateKey, Unreadable, once
from genctl.errors import ModelError, reason_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_LONGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors library
LARGEST_JSON = 64_000_000  # bytes; the index of the largest public checkpoints has a tenth of it
_MOST_DIMENSIONS = 64  # torch's limit
LARGEST_NUMBER = 1 << 63  # of a shape or a byte range
_LONGEST_NAME = 255  # bytes in the name of a file, the limit of common file systems


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

    transformers reads them as `dtype` if config.json has none: the type in the index, else that of the
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
    except UnicodeDecodeError as error:
        raise ModelError(f"{what} is not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{what} is {reason_of(error)}") from error
    except DuplicateKey as error:
        raise ModelError(f"{what} is not usable JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{what} is not usable JSON: {reason_of(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{what} holds a JSON {type(value).__name__}, not an object")
    return value


def find(folder: Path, config: dict[str, Any], *, allow_pickle: bool) -> WeightFiles:
    """The weights of a checkpoint folder, with every header checked. Raises ModelError."""
    named = config.get("transformers_weights")
    if named is not None:
        _plain_name(named, "config.json (transformers_weights)")
    places = [folder / named] if named is not None else [folder / SINGLE, folder / INDEX]
    for path in places:
        if path.is_file() and path.name.endswith(".index.json"):
            return _sharded(folder, path)
        if path.is_file():
            header = read_header(path)
            return WeightFiles((path,), header, dtype=_first_dtype(header))
    if dangling := [path.name for path in places if path.is_symlink()]:
        raise ModelError(f"{dangling[0]} in {folder} is a link to a file that is gone")
    if named is not None:
        raise ModelError(f"config.json names its weights {named!r}, but {folder} holds no such safetensors file")
    pickles = sorted({path.name for pattern in PICKLES for path in folder.glob(pattern)} - {"training_args.bin"})
    weights = [name for name in pickles if name.startswith("pytorch_model")]
    if weights and allow_pickle:
        return WeightFiles(tuple(folder / name for name in weights), {}, pickled=True)
    if pickles:
        hint = "safetensors weights are safe; pickle files can run code as they are read"
        if weights:
            message = f"{folder} has only pickle weights ({few(weights)}), refused without --allow-pickle"
            raise ModelError(message, hint=hint)
        raise ModelError(f"{folder} has no safetensors weights, only {few(pickles)}", hint=hint)
    unlisted = sorted(
        path.name for pattern in ("*.safetensors", "*.gguf", "*.h5", "*.msgpack") for path in folder.glob(pattern)
    )
    if unlisted:
        raise ModelError(
            f"{folder} has weights under another name or format ({few(unlisted)}); expected {SINGLE} or {INDEX}"
        )
    raise ModelError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")


def read_header(path: Path) -> dict[str, Tensor]:
    """Each tensor of a safetensors file, by name. Raises ModelError if the file is truncated or inconsistent."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise ModelError(f"{path.name} is truncated or corrupt: its header does not fit in {size:,} bytes")
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"cannot read {path.name}: {reason_of(error)}") from error
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is corrupt: its header is not JSON") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path.name} is corrupt: its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_ranges(path, tensors, 8 + length, size)
    return tensors


def _sharded(folder: Path, index: Path) -> WeightFiles:
    content = read_json(index, index.name)
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index.name} has no weight_map, so it is not an index of shards")
    for shard in weight_map.values():
        _plain_name(shard, index.name)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        wanted = {name.lower() for name in missing}
        other = next((path.name for path in sorted(folder.iterdir()) if path.name.lower() in wanted), "")
        case = f"; {other} has another case" if other else ""
        raise ModelError(f"{len(missing)} of {len(shards)} shards are missing: {few(missing)}{case}")
    headers = {shard: read_header(folder / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise ModelError(f"{index.name} says that {shard} holds {shown(name)}, but it does not")
    dtype_name = metadata.get("dtype") if isinstance(metadata, dict) else None
    dtype = dtype_name if isinstance(dtype_name, str) else _first_dtype(headers[shards[0]])
    tensors = {name: headers[shard][name] for name, shard in weight_map.items()}
    return WeightFiles(tuple(folder / shard for shard in shards), tensors, dtype=dtype)


@contextmanager
def with_whole_index(folder: Path) -> Iterator[Path]:
    """The folder; one of links, with a whole index of shards, where the index lacks the `metadata` of transformers.

    Raises ModelError.
    """
    index = folder / INDEX
    content = read_json(index, INDEX) if index.is_file() and not (folder / SINGLE).is_file() else {"metadata": {}}
    if isinstance(content.get("metadata"), dict):
        yield folder
        return
    with TemporaryDirectory(prefix="genctl-") as temporary:
        for path in folder.iterdir():
            if path.name != INDEX:
                Path(temporary, path.name).symlink_to(path.absolute())
        Path(temporary, INDEX).write_text(json.dumps({**content, "metadata": {}}))
        yield Path(temporary)


def _first_dtype(header: dict[str, Tensor]) -> str:
    """The type of the first floating-point tensor by name, in torch's words; "" if there is none."""
    kinds = (header[name].dtype for name in sorted(header))
    return next((_FLOATS[kind] for kind in kinds if kind in _FLOATS), "")


def _plain_name(name: Any, where: str) -> None:
    ordinary = isinstance(name, str) and name and not set(name) & set("/\\:\0") and not name.startswith(".")
    if not ordinary:
        raise ModelError(f"{where} names a weight file outside the folder: {name!r:.80}")
    length = len(name.encode("utf-8", "surrogatepass"))
    if length > _LONGEST_NAME or not name.isprintable():
        raise ModelError(f"{where} names a weight file by what is no file name ({length:,} bytes): {shown(name, 40)}")
    if not name.endswith((".safetensors", ".index.json")):
        raise ModelError(f"{where} names {name!r:.80} as weights, which is no safetensors file")


def _tensor(path: Path, name: str, entry: Any, data: int) -> Tensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise ModelError(f"{path.name} is corrupt: tensor {shown(name)} has no dtype, shape or byte range") from error
    name = shown(name)
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ModelError(f"{path.name} is corrupt: tensor {name} has the unknown dtype {dtype!r:.40}")
    numbers = [*shape, begin, end] if isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS else [None]
    if not all(type(number) is int and 0 <= number < LARGEST_NUMBER for number in numbers):
        raise ModelError(f"{path.name} is corrupt: tensor {name} has an impossible shape or byte range")
    if math.prod(shape) * _BITS[dtype] != (end - begin) * 8:
        size = "×".join(map(str, shape)) or "a single number"
        raise ModelError(
            f"{path.name} is corrupt: tensor {name} ({size} {dtype}) does not fill its {end - begin:,} bytes"
        )
    return Tensor(dtype, tuple(shape), data + begin, data + end)


def _check_ranges(path: Path, tensors: dict[str, Tensor], data: int, size: int) -> None:
    at = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != at:
            how = "overlaps the one before it" if tensor.begin < at else "leaves a gap before it"
            raise ModelError(f"{path.name} is corrupt: tensor {shown(name)} {how}")
        at = tensor.end
    if at > size:
        raise ModelError(f"{path.name} is truncated: {at - size:,} of {at:,} bytes are missing")
    if at < size:
        raise ModelError(f"{path.name} is corrupt: {size - at:,} bytes after its last tensor belong to none")


def shown(name: str, most: int = 120) -> str:
    """An untrusted name, made safe for one line of a message."""
    text = "".join(char if char.isprintable() else "\ufffd" for char in name)
    return text if len(text) <= most else text[: most - 1] + "…"


def few(names: list[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shown(name) for name in names[:most]) + more
