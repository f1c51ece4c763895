"""What `genctl parity` and `genctl audit` show and write alike: a verdict with its details, and records or text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from genctl.io import writers
from genctl.terminal import theme, widgets
from genctl.terminal.text_width import hanging, labelled, last_cells

PLAIN_WIDTH = 80  # of headings where there is no terminal


class FindingsWriter:
    """Writes what a command finds to `sink`: each record as it comes, or text at the end.

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
        """Write records, in the formats that have them."""
        if self._writer is not None:
            for record in records:
                written = record if self._flat is None else self._flat(record)
                if written is not None:
                    self._writer.write(written)

    def finish(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
        elif self._sink is None:
            for line in self._lines(self._console.width if self._console.is_terminal else None):
                self._console.print(line)
        elif lines := self._lines(None):
            self._sink.write("".join(f"{line.plain}\n" for line in lines).encode("utf-8", "backslashreplace"))
            self._sink.close()


def verdict_lines(
    names: tuple[str, str],
    verdict: str,
    style: Style,
    reason: str,
    details: Iterable[tuple[str, str]],
    width: int | None,
) -> list[Text]:
    """Both names in a rule, the verdict with its reason, and details, each with its label.

    Without a `width`, lines are not broken.
    """
    found = [_heading(names, width)]
    found += labelled(f"{verdict}: ", style + theme.CHOSEN, widgets.visible(reason), width)
    for label, words in details:
        found += hanging(label, widgets.visible(words), width)
    return found


def _heading(both: tuple[str, str], width: int | None) -> Text:
    """Both names in a rule; of names that are too long the ends, where paths differ."""
    names, between = [widgets.visible(name) for name in both], " against "
    first, second = map(cell_len, names)
    if width is None:
        return widgets.header(max(PLAIN_WIDTH, first + second + len(between) + 6), between.join(names))
    room = max(width - 6 - len(between), 8)
    if first + second > room:
        rooms = max(room // 2, room - second), max(room - room // 2, room - first)
        names = [last_cells(name, cells) for name, cells in zip(names, rooms, strict=True)]
    return widgets.header(width, between.join(names))
