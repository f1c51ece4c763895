"""Text in lines, and under each line another with a mark for each piece of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from genctl.terminal import theme
from genctl.terminal.text_width import last_cells, one_line, wrap


@dataclass(frozen=True)
class MarkedPiece:
    """The text of one or more tokens that became whole characters together, and its style."""

    text: str
    style: Style
    mark: str  # one cell


def marked(width: int, before: str, pieces: Iterable[MarkedPiece], *, lines: int = 1) -> list[Text]:
    """Pieces in lines of at most `width` cells, each mark under the first letter of its piece.

    A word is broken only if it is longer than a line. The end of what comes `before` the pieces is dimmed, on so many
    `lines` at most.
    """
    text = Text(no_wrap=True).append(last_cells(before, lines * width) if before else "", style=theme.PROMPT)
    marks: dict[int, MarkedPiece] = {}  # by the character under which each stands
    for piece in pieces:
        shown = "↵\n".join(map(one_line, piece.text.split("\n")))
        indent = len(shown) - len(shown.lstrip())
        if piece.mark != " ":
            marks[len(text) + (indent if indent < len(shown) else 0)] = piece
        text.append(shown, style=piece.style)
    plain = text.plain
    ends: list[int] = []  # where lines end, each with its line break
    for part in wrap(plain, width):
        end = (ends[-1] if ends else 0) + len(part)
        ends.append(end + (plain[end : end + 1] == "\n"))
    found: list[Text] = []
    for start, line in zip([0, *ends], text.divide(ends), strict=False):
        under = Text(no_wrap=True)
        cells = accumulate(map(cell_len, line.plain), initial=0)
        for place, cell in enumerate(cells, start):
            if place in marks and place < start + len(line) and cell < width:
                under.append(" " * (cell - under.cell_len)).append(marks[place].mark, style=marks[place].style)
        line.rstrip()
        found += [line, under] if under else [line] if line else []
    return found


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

    def piece(self, token: int, text: str, size: float) -> MarkedPiece:
        """A token marked with the level of a size."""
        return MarkedPiece(text or f"‹id {token}›", self.colour(size), self.digit(size))
