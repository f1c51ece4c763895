"""Both sides read the same texts, a block at a time, so that memory holds a few rows of logits.

A reference writes and reads its texts once (`ReadOnce`), however many sides are compared with it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from genctl.engines.protocol import Request, never
from genctl.errors import ModelError
from genctl.parity.oracle import Reading, places_read
from genctl.parity.sides import LocalSide, ReceiveLogits
from genctl.parity.statistics import Pairs
from genctl.parity.values import Place, Position, Text

SPOOLED = 2**31  # bytes of logits of a side in its temporary file, unless a block of texts has more


class ReadOnce(LocalSide, AbstractContextManager["ReadOnce"]):
    """A side with the logits that it has read, in a temporary file. A context manager, which removes the file."""

    def __init__(self, side: LocalSide, *, keep: bool = False) -> None:
        """`keep`: all rows stay, if half of the free disk holds them; else those of the last `fill` alone."""
        super().__init__(side.name, side.session, side.resolved, width=side.width, whole=side.whole)
        self.threaded = side.threaded
        self._side = side
        self._room = shutil.disk_usage(tempfile.gettempdir()).free // 2 if keep else 0
        self._file = tempfile.TemporaryFile(prefix="genctl-parity-")  # noqa: SIM115 — `__exit__` closes it
        self._offsets: dict[Place, int] = {}  # of rows f32 [V]
        self._end = 0
        self._written: dict[tuple[str, ...], tuple[list[Text], dict[str, str]]] = {}
        self._failed: dict[str, str] = {}

    def __exit__(self, *error: object) -> None:
        self._file.close()

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
        """As `LocalSide.read`; texts in the file are not read again."""
        if self._size(texts) > self._room:
            return self._side.read(texts, receive, interrupted=interrupted)
        failed = self.fill(texts, interrupted=interrupted)
        for place, text in enumerate(texts):
            for index in range(len(text.token_ids)):
                if text.id not in failed and self.has(text.id, index):
                    receive(place, index, self.row(text.id, index))
        return failed

    def fill(self, texts: Sequence[Text], *, interrupted: Callable[[], str] = never) -> dict[str, str]:
        """Read those of these texts that the file does not have. Returns those that cannot be read."""
        failed = {text.id: self._failed[text.id] for text in texts if text.id in self._failed}
        readable = [text for text in texts if text.id not in failed]
        missing = [text for text in readable if not all(self.has(text.id, at) for at in range(len(text.token_ids)))]
        if missing and self._end + self._size(missing) > self._room:
            self._offsets.clear()
            self._end, missing = 0, readable

        def keep(place: int, index: int, logits: Tensor) -> None:
            row = logits.detach().float().cpu().contiguous().numpy()
            self._file.seek(self._end)
            self._file.write(row.data)
            self._offsets[missing[place].id, index] = self._end
            self._end += row.nbytes

        if missing:
            failed |= self._side.read(missing, keep, interrupted=interrupted)
            self._failed |= failed
        return failed

    def has(self, text: str, index: int) -> bool:
        """Whether the logits before a token of a text, by its id, are in the file."""
        return (text, index) in self._offsets

    def row(self, text: str, index: int) -> Tensor:
        """The logits f32 [V] before a token of a text, by its id."""
        self._file.seek(self._offsets[text, index])
        return torch.frombuffer(bytearray(self._file.read(4 * self.vocabulary)), dtype=torch.float32)

    def _size(self, texts: Sequence[Text]) -> int:
        """Bytes of the logits of texts."""
        return sum(4 * self.vocabulary * len(text.token_ids) for text in texts)


class ReadBoth:
    """Texts that two sides read."""

    def __init__(
        self, mine: ReadOnce, theirs: ReadOnce, texts: Sequence[Text], *, interrupted: Callable[[], str] = never
    ) -> None:
        """Raises ModelError for sides whose distributions have different sizes."""
        self._mine, self._theirs, self._interrupted = mine, theirs, interrupted
        if theirs.vocabulary != mine.vocabulary:
            sizes = f"{mine.name} has {mine.vocabulary} entries in a distribution, {theirs.name} has"
            raise ModelError(f"{sizes} {theirs.vocabulary}")
        self._blocks = blocks(texts, max(mine.width, theirs.width), mine.vocabulary)
        self.failed: dict[str, str] = {}  # id of a text -> why it could not be read

    def read(self, receive: Callable[[Position], object]) -> None:
        """Hand out the figures of each position, text by text."""
        for block in self._blocks:
            if self._interrupted():
                return
            self._fill(block)
            pairs = Pairs(receive)
            for text in block:
                for index, token in enumerate(text.token_ids if text.id not in self.failed else ()):
                    if self._mine.has(text.id, index) and self._theirs.has(text.id, index):
                        rows = self._mine.row(text.id, index), self._theirs.row(text.id, index)
                        pairs.add((text.id, index, token), *rows)
            pairs.flush()

    def rows(self, readings: Sequence[Reading]) -> tuple[Tensor, Tensor]:
        """The logits f32 [M, V] of both sides at some positions, as they were read."""
        found: dict[Place, tuple[Tensor, Tensor]] = {}
        for block in self._blocks:
            ids = {text.id for text in block}
            if wanted := places_read([reading for reading in readings if reading.text.id in ids]):
                self._fill(block)
                found |= {place: (self._mine.row(*place), self._theirs.row(*place)) for place in wanted}
        mine, theirs = zip(*(found[place] for place in places_read(readings)), strict=True)
        return torch.stack(mine), torch.stack(theirs)

    def _fill(self, block: Sequence[Text]) -> None:
        for side in (self._mine, self._theirs):
            self.failed |= side.fill(block, interrupted=self._interrupted)


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
