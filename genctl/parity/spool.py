"""Logits of one block of texts in a temporary file: only a few rows of them are in memory at a time."""

from __future__ import annotations

import tempfile
from types import TracebackType
from typing import TypeAlias

import torch
from torch import Tensor

Place: TypeAlias = tuple[str, int]  # the id of a text, the index of a token


class Spool:
    """Rows f32 [V] by their place. A context manager, which removes the file."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="genctl-parity-")  # noqa: SIM115 — closed by `__exit__`
        self._offsets: dict[Place, int] = {}
        self.size = 0  # bytes

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __contains__(self, place: Place) -> bool:
        return place in self._offsets

    def clear(self) -> None:
        """Forget all rows; their room in the file is used again."""
        self._offsets.clear()
        self.size = 0

    def write(self, place: Place, logits: Tensor) -> None:
        """Keep one row, f32 [V]."""
        row = logits.detach().float().cpu().contiguous().numpy()
        self._file.seek(self.size)
        self._file.write(row.data)
        self._offsets[place] = self.size
        self.size += row.nbytes

    def read(self, place: Place, vocabulary: int) -> Tensor:
        """The row of a place, f32 [V]."""
        self._file.seek(self._offsets[place])
        return torch.frombuffer(bytearray(self._file.read(4 * vocabulary)), dtype=torch.float32)
