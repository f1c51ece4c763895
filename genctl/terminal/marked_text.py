"""Text in lines, and under each line another with a mark for each piece of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rich.cells import cell_len, chop_cells
from rich.style import Style
from rich.text import Text

from genctl.terminal import theme
from genctl.terminal.text_width import last_cells, one_line


@dataclass(frozen=True)
class MarkedPiece:
    """The text of one or more tokens that became whole characters together, and its style."""

    text: str
    style: Style
    mark: str  # one cell


@dataclass
class MarkedText:
    """Pairs of lines, filled from left to right."""

    width: int
    lines: list[Text] = field(default_factory=list)
    text: Text = field(default_factory=lambda: Text(no_wrap=True))
    marks: Text = field(default_factory=lambda: Text(no_wrap=True))
    used: int = 0

    def fill(self, pieces: Iterable[MarkedPiece]) -> None:
        """Add pieces; a word is broken only if it is longer than a line."""
        for word in _words(pieces):
            self.put(word)

    def put(self, word: Sequence[MarkedPiece]) -> None:
        """Add pieces that stay on one line if possible."""
        size = cell_len(one_line("".join(group.text for group in word).split("\n")[0].rstrip()))
        if self.used and self.used + size > self.width:
            self._break()
            word = [replace(word[0], text=word[0].text.lstrip(" ") or " "), *word[1:]]
        for group in word:
            *whole, last = group.text.split("\n")
            mark = group.mark
            for part in whole:
                self._write(one_line(part) + "↵", group.style, mark)
                self._break()
                mark = " "
            if last:
                self._write(one_line(last), group.style, mark)

    def finish(self) -> list[Text]:
        """All lines."""
        if self.text.plain:
            self._break()
        return self.lines

    def _write(self, shown: str, style: Style, mark: str) -> None:
        while shown:
            room = self.width - self.used
            piece = shown if cell_len(shown) <= room else chop_cells(shown, room)[0] if room > 1 else ""
            if not piece:
                self._break()
                continue
            shown = shown[len(piece) :]
            cells = cell_len(piece)
            self.text.append(piece, style=style)
            indent = 0
            if mark != " " and piece.strip():
                indent = cells - cell_len(piece.lstrip())
            self.marks.append((" " * indent + mark).ljust(cells)[:cells], style=style)
            self.used += cells
            mark = " "
            if shown:
                self._break()

    def _break(self) -> None:
        self.lines.append(self.text)
        if self.marks.plain.strip():
            self.marks.rstrip()
            self.lines.append(self.marks)
        self.text, self.marks, self.used = Text(no_wrap=True), Text(no_wrap=True), 0


def marked(width: int, before: str, pieces: Iterable[MarkedPiece]) -> list[Text]:
    """Pieces in lines of at most `width` cells. The end of what comes `before` them is dimmed, on a line at most."""
    page = MarkedText(width)
    if before:
        page.put([MarkedPiece(last_cells(before, width), theme.PROMPT, " ")])
    page.fill(pieces)
    return page.finish()


@dataclass(frozen=True)
class Levels:
    """Sizes as digits and colours: 0 below the first of nine `steps`, 9 from the last on."""

    steps: tuple[float, ...]

    def digit(self, size: float) -> str:
        """The level of a size."""
        return str(sum(size >= step for step in self.steps))

    def colour(self, size: float) -> Style:
        """The ramp of probabilities, from no size to the last step and more."""
        return theme.colour(1 - int(self.digit(size)) / 9)


def _words(pieces: Iterable[MarkedPiece]) -> Iterable[list[MarkedPiece]]:
    """Pieces without white space between them, which stay on one line if possible."""
    word: list[MarkedPiece] = []
    for piece in pieces:
        if word and piece.text[0].isspace():
            yield word
            word = []
        word.append(piece)
    if word:
        yield word
