"""The tensors of a GGUF file, mapped: as blocks where they are multiplied so, else as floating-point numbers."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from genctl.native import pages
from genctl.native.blocks import KINDS, Blocks
from genctl.native.gguf_names import GgufTensors, Located
from genctl.native.pages import DTYPES


class GgufFile:
    """A file whose header has been checked (see `models.gguf_header`).

    `check_tensor` is shown each tensor once, by its name, and may raise; of blocks it is shown the scales.
    """

    def __init__(
        self, path: Path, tensors: GgufTensors, check_tensor: Callable[[str, Tensor], object] | None = None
    ) -> None:
        self.tensors, self.check_tensor = tensors, check_tensor
        self.looked: set[str] = set()
        with path.open("rb") as file:
            # private and writable, so that torch takes it; nothing is written
            self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def blocks(self, name: str) -> Blocks | None:
        """A matrix in a form of `KINDS`; None for a tensor in another."""
        place = self.tensors.places[name]
        if place.dtype not in KINDS or len(place.shape) != 2:
            return None
        size, width = place.shape
        kind = KINDS[place.dtype]
        raw = self._bytes(place, size * width // kind.numbers * kind.bytes).view(size, -1)
        blocks = Blocks(place.dtype, self._in_halves(name, raw), width)
        self._look(name, blocks.scales)
        return blocks

    def tensor(self, name: str) -> Tensor:
        """A tensor as it lies if it holds floating-point numbers; else unpacked to float32."""
        place = self.tensors.places[name]
        count = math.prod(place.shape)
        if place.dtype in DTYPES:
            dtype = DTYPES[place.dtype]
            found = self._bytes(place, count * dtype.itemsize).view(dtype).view(place.shape)
        elif (blocks := self.blocks(name)) is not None:
            return blocks.numbers()
        else:
            found = self._unpacked(place, count)
        self._look(name, lambda: found)
        return self._in_halves(name, found)

    def _bytes(self, place: Located, size: int) -> Tensor:
        """uint8 [`size`]; a copy where the file does not align it."""
        if place.begin % 4:
            return torch.frombuffer(bytearray(self.memory[place.begin : place.begin + size]), dtype=torch.uint8)
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=place.begin)

    def _unpacked(self, place: Located, count: int) -> Tensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType[place.dtype]
        numbers, size = GGML_QUANT_SIZES[kind]
        raw = self._bytes(place, count // numbers * size).view(*place.shape[:-1], -1)
        return torch.from_numpy(dequantize(raw.numpy(), kind)).view(place.shape)

    def _in_halves(self, name: str, rows: Tensor) -> Tensor:
        """Rows of queries or keys whose pairs are neighbours -> pairs half a head apart; other tensors as they are."""
        heads = self.tensors.neighbours.get(name)
        if heads is None:
            return rows
        in_halves = rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
        pages.release(rows, pages.mapped_files())
        return in_halves

    def _look(self, name: str, numbers: Callable[[], Tensor]) -> None:
        if self.check_tensor is not None and name not in self.looked:
            self.looked.add(name)
            self.check_tensor(name, numbers())
