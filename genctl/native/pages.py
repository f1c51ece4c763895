"""Handing memory back: weights that were read from a mapped file and copied elsewhere need not stay resident.

transformers maps safetensors files; what was read of them stays in memory until the whole mapping goes, although each
tensor is needed only until it has been repacked. Only Linux says what is mapped; elsewhere nothing is handed back.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

_MAPS = Path("/proc/self/maps")


def mapped_files() -> list[tuple[int, int]]:
    """Address ranges that are mapped from safetensors files, in order; empty where the system does not tell."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        if line.endswith(".safetensors"):
            begin, _, end = line.split(" ", 1)[0].partition("-")
            found.append((int(begin, 16), int(end, 16)))
    return sorted(found)


def release(tensor: Tensor, mapped: list[tuple[int, int]]) -> int:
    """Let the whole pages inside a mapped, contiguous tensor go; returns their bytes.

    Nothing is lost: the pages were not written to, and would be read from the file again.
    """
    advise = _madvise()
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


@cache
def _madvise() -> Any:
    if os.name != "posix" or not hasattr(mmap, "MADV_DONTNEED"):
        return None
    try:
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    advise.argtypes, advise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return advise
