"""Tensors that stay mapped from safetensors files: nothing is read before it is used, and nothing is copied."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def mapped(files: Sequence[Path], look: Callable[[str, Tensor], object] | None = None) -> Callable[[str], Tensor]:
    """A function from a name to the tensor of that name in the files. `models.weights` has checked their headers.

    `look` is called with each tensor, and may raise.
    """
    places: dict[str, tuple[mmap.mmap, int, dict[str, Any]]] = {}
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            # private and writable, so that torch takes it; nothing is written
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
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
        if look is not None:
            look(name, tensor)
        return tensor

    return get
