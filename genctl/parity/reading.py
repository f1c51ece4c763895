"""Both sides read the same texts, a block at a time, so that memory holds a few rows of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import Tensor

from genctl.engines.protocol import never
from genctl.errors import ModelError
from genctl.parity.figures import Pairs
from genctl.parity.oracle import Reading
from genctl.parity.read_once import ReadOnce, Spool
from genctl.parity.sides import LocalSide
from genctl.parity.values import Position, Text

SPOOLED = 2**31  # bytes of logits of a side in the temporary file, unless a block of texts has more


class ReadBoth:
    """Texts that a reference and another side read. A context manager, which removes the temporary files."""

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

    def __enter__(self) -> ReadBoth:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

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
        found: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        for number, block in enumerate(self.blocks):
            ids = {text.id for text in block}
            wanted = [reading for reading in readings if reading.text.id in ids]
            if wanted and number != self._held:
                self._read(number)
            for reading in wanted:
                for index in reading.indices:
                    place = reading.text.id, index
                    found[place] = self.reference.row(*place), self._theirs.read(place, self.vocabulary)
        rows = [found[reading.text.id, index] for reading in readings for index in reading.indices]
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
