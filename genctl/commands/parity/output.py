"""Where the results of a comparison go: records as they come, or tables at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text as Line

from genctl.commands.parity import by_text, records, view
from genctl.commands.parity.by_text import TextParity
from genctl.commands.parity.naming import Naming
from genctl.io import writers
from genctl.parity.values import Parity

if TYPE_CHECKING:
    from rich.console import Console


class ParityOutput:
    """Writes pairs of sides in a format: to `sink`, or as text to the console where there is none."""

    def __init__(self, format: str, console: Console, sink: writers.Sink | None, *, positions: bool) -> None:
        self._console, self._sink, self._positions = console, sink, positions
        self._pairs: list[Parity] = []
        self._texts: list[TextParity] = []
        self.naming = Naming()
        self._writer: writers.Writer | None = None
        if format != "text" and sink is not None:
            self._writer = writers.open_writer(format, sink, on_error=lambda record: None, formats=records.FORMATS)

    def pair(self, one: Parity, failed: Sequence[str]) -> None:
        """A pair is compared. `failed` are the sentences of checks that it fails."""
        self._pairs.append(one)
        if self._writer is not None:
            for record in records.records(one, self.naming, positions=self._positions, failed=failed):
                self._writer.write(record)

    def texts(self, one: TextParity) -> None:
        """A pair is compared by the bits of texts."""
        self._texts.append(one)
        if self._writer is not None:
            self._writer.write(by_text.record(one))

    def finish(self) -> None:
        """Write what is left, if anything was compared."""
        if self._writer is not None:
            self._writer.close()
        elif not self._pairs and not self._texts:
            return
        elif self._sink is not None:
            lines = self.lines(None)
            self._sink.write("".join(f"{line.plain}\n" for line in lines).encode("utf-8", "backslashreplace"))
            self._sink.close()
        else:
            self.draw(self._console)

    def draw(self, console: Console) -> None:
        """Print the tables."""
        for line in self.lines(console.width if console.is_terminal else None):
            console.print(line)

    def lines(self, width: int | None) -> list[Line]:
        """The tables, in lines of at most `width` cells."""
        if self._texts:
            return by_text.lines(self._texts, width)
        return view.lines(self._pairs, self.naming, width)
