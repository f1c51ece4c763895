"""Both sides read the same texts, a block at a time, so that memory holds a few rows of logits.

A reference writes and reads its texts once (`ReadOnce`), however many sides are compared with it.
"""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Self

import torch
from torch import Tensor

from genctl.engines.protocol import Request, never
from genctl.errors import ModelError
from genctl.parity.oracle import Reading, places_read
from genctl.parity.sides import LocalSide, ReceiveLogits
from genctl.parity.statistics import Pairs
from genctl.parity.values import Place, Position, Text

# -- logits of one block of texts in a temporary file: only a few rows of them are in memory at a time -----------------


class _Files(ABC):
    """A context manager that removes temporary files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Remove the files."""


class Spool(_Files):
    """Rows f32 [V] by their place."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="genctl-parity-")  # noqa: SIM115 — closed by `close`
        self._offsets: dict[Place, int] = {}
        self.size = 0  # bytes

    def close(self) -> None:
        """Remove the file."""
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


class ReadOnce(_Files, LocalSide):
    """A side with the logits that it has read, in a temporary file."""

    def __init__(self, side: LocalSide, *, keep: bool = False) -> None:
        """`keep`: all rows stay, if half of the free disk holds them; else those of the last `fill` alone."""
        super().__init__(side.name, side.session, side.resolved, width=side.width, whole=side.whole)
        self.threaded = side.threaded
        self._side, self._rows = side, Spool()
        self._room = shutil.disk_usage(tempfile.gettempdir()).free // 2 if keep else 0
        self._written: dict[tuple[str, ...], tuple[list[Text], dict[str, str]]] = {}
        self._failed: dict[str, str] = {}

    def close(self) -> None:
        """Remove the file."""
        self._rows.close()

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


SPOOLED = 2**31  # bytes of logits of a side in the temporary file, unless a block of texts has more


class ReadBoth(_Files):
    """Texts that a reference and another side read, by way of temporary files."""

    def __init__(
        self,
        reference: LocalSide,
        other: LocalSide,
        texts: Sequence[Text],
        *,
        interrupted: Callable[[], str] = never,
    ) -> None:
        """Raises ModelError for sides whose distributions have different sizes."""
        self.other = other
        self.vocabulary = reference.vocabulary
        self.interrupted = interrupted
        if other.vocabulary != self.vocabulary:
            sizes = f"{reference.name} has {self.vocabulary} entries in a distribution, {other.name} has"
            raise ModelError(f"{sizes} {other.vocabulary}")
        self.blocks = blocks(texts, max(reference.width, other.width), self.vocabulary)
        self.failed: dict[str, str] = {}  # id of a text -> why it could not be read
        self._stack = ExitStack()  # with the temporary files
        enter = self._stack.enter_context
        self.reference = reference if isinstance(reference, ReadOnce) else enter(ReadOnce(reference))
        self._theirs = enter(Spool())
        self._held: int | None = None  # the block whose rows are in the files

    def close(self) -> None:
        """Remove the files."""
        self._stack.close()

    def read(self, receive: Callable[[Position], object]) -> None:
        """Hand out the figures of each position, text by text."""
        for number, block in enumerate(self.blocks):
            if self.interrupted():
                return
            found = self._read(number)
            order = {text.id: place for place, text in enumerate(block)}
            for position in sorted(found, key=lambda each: (order[each.text], each.index)):
                if position.text not in self.failed:
                    receive(position)

    def rows(self, readings: Sequence[Reading]) -> tuple[Tensor, Tensor]:
        """The logits f32 [M, V] of both sides at some positions, as they were read."""
        found: dict[Place, tuple[Tensor, Tensor]] = {}
        for number, block in enumerate(self.blocks):
            ids = {text.id for text in block}
            wanted = [reading for reading in readings if reading.text.id in ids]
            if wanted and number != self._held:
                self._read(number)
            for place in places_read(wanted):
                found[place] = self.reference.row(*place), self._theirs.read(place, self.vocabulary)
        rows = [found[place] for place in places_read(readings)]
        return torch.stack([mine for mine, _ in rows]), torch.stack([theirs for _, theirs in rows])

    def _read(self, number: int) -> list[Position]:
        block, theirs = self.blocks[number], self._theirs
        theirs.clear()
        self._held = number
        found: list[Position] = []
        pairs = Pairs(found.append)

        def pair(place: int, index: int, logits: Tensor) -> None:
            text = block[place]
            if self.reference.has(text.id, index):
                row = logits.detach().float().cpu()
                theirs.write((text.id, index), row)
                pairs.add((text.id, index, text.token_ids[index]), self.reference.row(text.id, index), row)

        self.failed |= self.reference.fill(block, interrupted=self.interrupted)
        self.failed |= self.other.read(block, pair, interrupted=self.interrupted)
        pairs.flush()
        return found


def blocks(texts: Sequence[Text], width: int, vocabulary: int) -> list[list[Text]]:
    """Texts to be spooled together: at least `width`, and not more than `SPOOLED` bytes beyond that."""
    made: list[list[Text]] = []
    size = 0
    for text in texts:
        own = 4 * vocabulary * len(text.token_ids)
        if not made or (len(made[-1]) >= width and size + own > SPOOLED):
            made.append([])
            size = 0
        made[-1].append(text)
        size += own
    return made
