"""Tensors mapped from safetensors files: nothing is read before it is used, and aligned tensors are not copied.

Pages of a mapped file of weights stay in memory until the file is unmapped, although each tensor is needed only until
it has been repacked. Repacking also makes temporary copies; glibc keeps freed blocks of up to 32 MiB, and the next
weight may not fit into them. Only Linux lists the mapped ranges; elsewhere no pages are released.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MAPS = Path("/proc/self/maps")
_LARGE = 8 << 20  # bytes of weights after which trimming is worth a few milliseconds
_worked = [0]  # bytes of weights since the last trim


def memory_of(path: Path) -> mmap.mmap:
    """Map a file, private and writable because torch requires a writable buffer; nothing is written."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def mapped(
    files: Sequence[Path], check_tensor: Callable[[str, Tensor], object] | None = None
) -> Callable[[str], Tensor]:
    """Return a function that looks up a tensor by name in the files. `models.weights` has checked their headers.

    `check_tensor` is called with each name and tensor, and may raise.
    """
    places: dict[str, tuple[mmap.mmap, int, dict[str, Any]]] = {}
    for path in files:
        memory = memory_of(path)
        length = int.from_bytes(memory[:8], "little")
        header = json.loads(memory[8 : 8 + length])
        header.pop("__metadata__", None)
        places.update((name, (memory, 8 + length, entry)) for name, entry in header.items())

    def get(name: str) -> Tensor:
        memory, data, entry = places[name]
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        if (data + begin) % dtype.itemsize:  # the header is not padded
            tensor = torch.frombuffer(bytearray(memory[data + begin : data + end]), dtype=dtype)
        else:
            tensor = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=data + begin)
        tensor = tensor.view(shape)
        if check_tensor is not None:
            check_tensor(name, tensor)
        return tensor

    return get


def mapped_files() -> list[tuple[int, int]]:
    """Address ranges that are mapped from weight files, in order; empty where the system does not list them."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    places = []
    for line in lines:
        # the system resolves links: the Hub's cache links to blobs named by their hashes
        if line.endswith((".safetensors", ".gguf")) or "/blobs/" in line:
            begin, _, end = line.split(" ", 1)[0].partition("-")
            places.append((int(begin, 16), int(end, 16)))
    return sorted(places)


def release(tensor: Tensor, mapped: list[tuple[int, int]]) -> int:
    """Release the whole pages inside a mapped, contiguous tensor; returns their bytes.

    Nothing is lost: the pages were not written to, and would be read from the file again.
    """
    advise = _function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if advise is None or not mapped or not tensor.is_contiguous():
        return 0
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    at = bisect_right(mapped, (begin, 1 << 64)) - 1
    if at < 0 or end > mapped[at][1]:
        return 0
    page = mmap.PAGESIZE
    begin, end = -(-begin // page) * page, end // page * page
    if end <= begin or advise(begin, end - begin, mmap.MADV_DONTNEED) != 0:
        return 0
    return end - begin


def replaced(weight: Tensor) -> None:
    """Release the pages of a weight (maybe transposed) that was copied; every `_LARGE` bytes, trim the C library."""
    release(weight if weight.is_contiguous() else weight.t(), mapped_files())
    _worked[0] += weight.nbytes
    if _worked[0] >= _LARGE:
        trim_rest()


def trim_rest() -> None:
    """Return memory that the C library has freed but still holds to the system."""
    function = _function("malloc_trim", ctypes.c_size_t)
    if function is not None:
        function(0)
    _worked[0] = 0


def converted(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | None = None) -> Tensor:
    """Convert a tensor to a type and move it to a device. If that makes a copy, release the original's pages."""
    copy = tensor.to(device=device, dtype=dtype)
    if copy is not tensor:
        release(tensor, mapped_files())
    return copy


@cache
def _function(name: str, *arguments: type) -> Any:
    """A function of the C library that returns an int; None if there is no such function."""
    function = getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
    if function is not None:
        function.argtypes, function.restype = arguments, ctypes.c_int
    return function
