"""Tensors that stay mapped from safetensors files: nothing is read before it is used, and nothing is copied."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from genctl.models import weights

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def mapped(files: Sequence[Path], look: Callable[[str, Tensor], object] | None = None) -> Callable[[str], Tensor]:
    """What gives a tensor by its name in the files. `look` is shown each one, and may raise.

    Raises ModelError for a file that is truncated or contradicts itself.
    """
    places: dict[str, tuple[mmap.mmap, weights.Tensor]] = {}
    for path in files:
        headers = weights.read_header(path)
        with path.open("rb") as file:
            # private and writable, so that torch takes it; nothing is written
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        places.update((name, (memory, header)) for name, header in headers.items())

    def get(name: str) -> Tensor:
        memory, header = places[name]
        dtype, count = DTYPES[header.dtype], math.prod(header.shape)
        if not count:
            return torch.empty(header.shape, dtype=dtype)
        if header.begin % dtype.itemsize:  # a header that is not padded
            buffer = bytearray(memory[header.begin : header.end])
            tensor = torch.frombuffer(buffer, dtype=dtype)
        else:
            tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=header.begin)
        tensor = tensor.view(header.shape)
        if look is not None:
            look(name, tensor)
        return tensor

    return get
