"""A reference that writes and reads its texts once, however many sides are compared with it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeAlias

import torch
from torch import Tensor

from genctl.engines.protocol import Request, never
from genctl.parity.sides import LocalSide, ReceiveLogits
from genctl.parity.values import Text

# -- logits of one block of texts in a temporary file: only a few rows of them are in memory at a time -----------------


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


class ReadOnce(LocalSide):
    """A side with the logits that it has read, in a temporary file. A context manager, which removes the file."""

    def __init__(self, side: LocalSide, *, keep: bool = False) -> None:
        """`keep`: all rows stay, if half of the free disk holds them; else those of the last `fill` alone."""
        super().__init__(side.name, side.session, side.resolved, width=side.width, whole=side.whole)
        self.threaded = side.threaded
        self._side, self._rows = side, Spool()
        self._room = shutil.disk_usage(tempfile.gettempdir()).free // 2 if keep else 0
        self._written: dict[tuple[str, ...], tuple[list[Text], dict[str, str]]] = {}
        self._failed: dict[str, str] = {}

    def __enter__(self) -> ReadOnce:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rows.__exit__(kind, error, trace)

    def write(
        self, requests: Sequence[Request], *, interrupted: Callable[[], str] = never
    ) -> tuple[list[Text], dict[str, str]]:
        """As `LocalSide.write`; the same requests are written once."""
        key = tuple(request.id for request in requests)
        if key not in self._written:
            self._written[key] = self._side.write(requests, interrupted=interrupted)
        return self._written[key]

    def read(
        self, texts: Sequence[Text], receive: ReceiveLogits, *, interrupted: Callable[[], str] = never
    ) -> dict[str, str]:
        """As `LocalSide.read`; what is kept comes from the file."""
        if self._size(texts) > self._room:
            return self._side.read(texts, receive, interrupted=interrupted)
        failed = self.fill(texts, interrupted=interrupted)
        for place, text in enumerate(texts):
            for index in range(len(text.token_ids)):
                if text.id not in failed and self.has(text.id, index):
                    receive(place, index, self.row(text.id, index))
        return failed

    def fill(self, texts: Sequence[Text], *, interrupted: Callable[[], str] = never) -> dict[str, str]:
        """See to it that `row` has all of these texts. Returns those that cannot be read."""
        missing = [text for text in texts if text.id not in self._failed and not self._has_all(text)]
        if missing:
            if self._rows.size + self._size(missing) > self._room:
                self._rows.clear()
                missing = [text for text in texts if text.id not in self._failed]
            self._failed |= self._side.read(
                missing,
                lambda place, index, logits: self._rows.write((missing[place].id, index), logits),
                interrupted=interrupted,
            )
        return {text.id: self._failed[text.id] for text in texts if text.id in self._failed}

    def has(self, text: str, index: int) -> bool:
        """Whether the logits before a token of a text, by its id, are in the file."""
        return (text, index) in self._rows

    def row(self, text: str, index: int) -> Tensor:
        """The logits f32 [V] before a token of a text, by its id."""
        return self._rows.read((text, index), self.vocabulary)

    def _has_all(self, text: Text) -> bool:
        return all(self.has(text.id, index) for index in range(len(text.token_ids)))

    def _size(self, texts: Sequence[Text]) -> int:
        """Bytes of the logits of texts."""
        return sum(4 * self.vocabulary * len(text.token_ids) for text in texts)
