"""The tensors of a GGUF file, mapped: matrices as they lie where they are multiplied so, else unpacked."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from genctl.native import pages
from genctl.native.blocks import KINDS, Blocks
from genctl.native.gguf_names import GgufTensors
from genctl.native.pages import DTYPES


class GgufFile:
    """A file, in one part or several, whose header has been checked (see `models.gguf`).

    `check_tensor` is shown each tensor once, by its name, and may raise; of blocks it is shown the scales.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tensors: GgufTensors,
        check_tensor: Callable[[str, Tensor], object] | None = None,
    ) -> None:
        self.tensors, self.check_tensor = tensors, check_tensor
        self.checked: set[str] = set()
        self.memory: list[mmap.mmap] = []
        for path in files:
            with path.open("rb") as file:
                # private and writable, so that torch takes it; nothing is written
                self.memory.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def blocks(self, name: str) -> Blocks | None:
        """A matrix in a form of `KINDS`; None for a tensor in another."""
        place = self.tensors.places[name]
        if place.dtype not in KINDS or len(place.shape) != 2:
            return None
        raw = self._bytes(place).view(place.shape[0], -1)
        blocks = Blocks(place.dtype, self._in_halves(name, raw), place.shape[1])
        self._look(name, blocks.scales)
        return blocks

    def matrix(self, name: str) -> Blocks | Tensor | None:
        """A matrix as it lies: in a form of `KINDS`, or in 16 bits; None for another tensor."""
        place = self.tensors.places[name]
        if place.dtype in ("F16", "BF16") and len(place.shape) == 2:
            return self.tensor(name)
        return self.blocks(name)

    def tensor(self, name: str) -> Tensor:
        """A tensor as it lies if it holds floating-point numbers; else unpacked to float32."""
        place = self.tensors.places[name]
        if place.dtype in DTYPES:
            found = self._bytes(place).view(DTYPES[place.dtype]).view(place.shape)
        elif (blocks := self.blocks(name)) is not None:
            return blocks.numbers()
        else:
            found = self._unpacked(place)
        self._look(name, lambda: found)
        found = self._in_halves(name, found)
        return found.float() - 1 if self.tensors.from_one and name.endswith("_norm.weight") else found

    def _bytes(self, place: Any) -> Tensor:
        """uint8 [bytes of a tensor]; a copy where the file does not align it."""
        memory, begin, end = self.memory[place.part], place.begin, place.end
        if begin % 4 or begin == end:
            return torch.frombuffer(bytearray(memory[begin:end]) or bytearray(1), dtype=torch.uint8)[: end - begin]
        return torch.frombuffer(memory, dtype=torch.uint8, count=end - begin, offset=begin)

    def _unpacked(self, place: Any) -> Tensor:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        raw = self._bytes(place).view(*place.shape[:-1], -1)
        return torch.from_numpy(dequantize(raw.numpy(), GGMLQuantizationType[place.dtype])).view(place.shape)

    def _in_halves(self, name: str, rows: Tensor) -> Tensor:
        """Rows of queries or keys whose pairs are neighbours -> pairs half a head apart; other tensors as they are."""
        heads = self.tensors.neighbours.get(name)
        if heads is None:
            return rows
        turned, rest = rows.tensor_split([heads * self.tensors.head_dim])
        pairs = turned.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(turned.shape)
        in_halves = torch.cat([pairs, rest]) if len(rest) else pairs
        pages.release(rows, pages.mapped_files())
        return in_halves

    def _look(self, name: str, numbers: Callable[[], Tensor]) -> None:
        if self.check_tensor is not None and name not in self.checked:
            self.checked.add(name)
            self.check_tensor(name, numbers())
