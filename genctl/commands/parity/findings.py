"""Output that `genctl parity` and `genctl audit` share: progress, a verdict with details, records or text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from genctl.errors import count
from genctl.io import writers
from genctl.terminal import theme, widgets
from genctl.terminal.live_region import LiveRegion
from genctl.terminal.text_width import hanging, labelled

PLAIN_WIDTH = 80  # width of headings without a terminal


class Finding(NamedTuple):
    """A verdict on something against a reference, with labelled details."""

    name: str
    reference: str
    verdict: str
    style: Style  # of the verdict
    reason: str
    details: Sequence[tuple[str, str]]

    @property
    def title(self) -> str:
        """Both names."""
        return f"{self.name} against {self.reference}"

    def lines(self, width: int | None) -> list[Text]:
        """The names in a rule, the verdict, and the details. Without a `width`, lines are not broken."""
        title = widgets.visible(self.title)
        lines = [widgets.header(max(PLAIN_WIDTH, cell_len(title) + 6) if width is None else width, title)]
        lines += labelled(f"{self.verdict}: ", self.style + theme.CHOSEN, widgets.visible(self.reason), width)
        for label, words in self.details:
            lines += hanging(label, widgets.visible(words), width)
        return lines

    def fact(self) -> tuple[str, str]:
        """The finding for the summary of a page: its title, and the rest as one text."""
        details = [f"{label.strip(': ')}: {words}" for label, words in self.details]
        return self.title, "; ".join([f"{self.verdict}: {self.reason}", *details])


class StageLine:
    """A line on a terminal while sides are compared or a trace is audited: the name, the stage, and positions."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console, self._region = console, LiveRegion(console, time.monotonic)
        self._draws = console.is_interactive and not quiet
        self._name = self._stage = ""
        self._positions = 0

    def begin(self, name: str) -> None:
        """Begin with another side or trace."""
        self._name, self._positions = name, 0
        self.stage("")

    def stage(self, stage: str) -> None:
        """Begin the next stage."""
        self._stage = stage
        self._show(at_once=True)

    def position(self, position: object) -> None:
        """Count one more compared position."""
        self._positions += 1
        self._show()

    def hide(self) -> None:
        """Erase the line."""
        self._region.hide()

    def _show(self, *, at_once: bool = False) -> None:
        positions = count(self._positions, "position") if self._positions else ""
        words = " · ".join(filter(None, (widgets.visible(self._name), self._stage, positions)))
        if self._draws and (at_once or self._region.is_due(time.monotonic())):
            self._region.draw([widgets.fit(Text(words, style=theme.DIM), self._console.width)])


class FindingsWriter:
    """Writes the findings of a command to `sink`: each record as it comes, or text at the end.

    Without a `sink`, text is printed on the console. `lines` gives the text for a width; None: lines are not broken.
    `--format tsv` has `columns`: `flat` gives their values for a record, or None to leave the record out.
    """

    def __init__(
        self,
        format: str,
        console: Console,
        sink: writers.Sink | None,
        columns: Sequence[str],
        flat: Callable[[writers.Record], writers.Record | None],
        lines: Callable[[int | None], Sequence[Text]],
    ) -> None:
        self._console, self._sink, self._lines = console, sink, lines
        self._flat = flat if format == "tsv" else None
        self._writer: writers.Writer | None = None
        if format != "text" and sink is not None:
            formats = writers.FORMATS | {
                "tsv": writers.OutputFormat(lambda sink, setup: writers.TsvWriter(sink, columns))
            }
            self._writer = writers.open_writer(format, sink, on_error=lambda record: None, formats=formats)

    def records(self, records: Iterable[writers.Record]) -> None:
        """Write records if the format has them."""
        if self._writer is not None:
            for record in records:
                written = record if self._flat is None else self._flat(record)
                if written is not None:
                    self._writer.write(written)

    def finish(self) -> None:
        """Write the rest."""
        if self._writer is not None:
            self._writer.close()
        elif self._sink is None:
            for line in self._lines(self._console.width if self._console.is_terminal else None):
                self._console.print(line)
        elif lines := self._lines(None):
            self._sink.write("".join(f"{line.plain}\n" for line in lines).encode("utf-8", "backslashreplace"))
            self._sink.close()
