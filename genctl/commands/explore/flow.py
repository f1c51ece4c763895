"""Tokens in lines of a given width: words stay whole, and a change lays out only what follows it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.cells import cell_len, chop_cells

from genctl.terminal.widgets import visible

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")
OPEN = "▯"  # a token that completes no character, which would have no place of its own


class TextPiece(NamedTuple):
    """A token of the branch, or the prompt."""

    node: int
    text: str
    probability: float | None = None  # by the model; None: not a token of the tree
    differs: bool = False  # another model or preset would write something else here


class TextRun(NamedTuple):
    """Some text of one piece on one line."""

    piece: int  # index
    text: str  # as it is shown
    cells: int


@dataclass(slots=True)
class _FlowLine:
    runs: list[TextRun] = field(default_factory=list)
    cells: int = 0
    word: int = 0  # index of the run where the last word begins, which moves to the next line if it does not fit
    first: bool = False  # whether its first run is the beginning of its piece
    ended: bool = False  # by a newline of the text


class TextFlow:
    """Pieces, laid out. `lines` are what is shown; `place` says on which line each piece begins."""

    def __init__(self, width: int) -> None:
        self.width = max(width, 2)
        self.pieces: list[TextPiece] = []
        self._lines: list[_FlowLine] = [_FlowLine(first=True)]
        self.laid_out = 0  # pieces that were laid out, since the beginning

    def __len__(self) -> int:
        return len(self._lines)

    def line(self, number: int) -> list[TextRun]:
        """The runs of a line, from left to right."""
        return self._lines[number].runs if number < len(self._lines) else []

    def cells(self, number: int) -> int:
        """The cells that a line takes."""
        return self._lines[number].cells

    def update(self, pieces: Sequence[TextPiece]) -> int:
        """Show these pieces. Returns the first line that changed."""
        same = _common(self.pieces, pieces)
        if same == len(pieces) == len(self.pieces):
            return len(self._lines)
        begin = self._cut(same)
        line = len(self._lines) - 1
        self.pieces[same:] = pieces[same:]
        for index in range(begin, len(self.pieces)):
            self._add(index)
        return line

    def resize(self, width: int) -> None:
        """Lay everything out anew."""
        if max(width, 2) == self.width:
            return
        pieces, self.pieces = self.pieces, []
        self.width = max(width, 2)
        self._lines = [_FlowLine(first=True)]
        self.update(pieces)

    def line_of(self, index: int) -> int:
        """The line on which a piece begins."""
        low, high = 0, len(self._lines) - 1
        while low < high:  # the last line that begins before the piece, or with it
            middle = (low + high + 1) // 2
            runs = self._lines[middle].runs
            if runs and (runs[0].piece < index or (runs[0].piece == index and self._lines[middle].first)):
                low = middle
            else:
                high = middle - 1
        return low

    def at(self, number: int, cell: int) -> int | None:
        """The index of the piece at a cell of a line."""
        if not 0 <= number < len(self._lines):
            return None
        for run in self._lines[number].runs:
            cell -= run.cells
            if cell < 0:
                return run.piece
        return None

    def cell_of(self, index: int) -> int:
        """The cell at which a piece begins, on its line."""
        cell = 0
        for run in self.line(self.line_of(index)):
            if run.piece == index:
                return cell
            cell += run.cells
        return cell

    # -- laying out ----------------------------------------------------------------------------------------------------

    def _cut(self, same: int) -> int:
        """Take away what may change when the pieces from `same` on do. Returns the piece to go on with.

        It begins with white space, so that the word before it, and with it the line, is complete.
        """
        begin = same - 1
        while begin > 0 and not self.pieces[begin].text[:1].isspace():
            begin -= 1
        if begin <= 0:
            self._lines = [_FlowLine(first=True)]
            return 0
        number = self.line_of(begin)
        del self._lines[number + 1 :]
        line = self._lines[number]
        while line.runs and line.runs[-1].piece >= begin:
            line.cells -= line.runs.pop().cells
        if not line.runs and number and not self._lines[number - 1].ended:
            del self._lines[number]
        return begin

    def _add(self, index: int) -> None:
        self.laid_out += 1
        text, begins = self.pieces[index].text or OPEN, True
        for part in _PARTS.findall(text):
            if part == "\n":
                self._put(index, "↵", begins, space=True)
                self._lines[-1].ended = True
                self._lines.append(_FlowLine())
            else:
                self._put(index, visible(part.replace("\t", "⇥")), begins, space=part.isspace())
            begins = False

    def _put(self, index: int, shown: str, begins: bool, *, space: bool) -> None:
        line = self._lines[-1]
        cells = cell_len(shown)
        if line.cells + cells > self.width and line.runs:
            line = self._next(line, cells, space)
            if space and not self.pieces[index].text.isspace():
                shown, cells = "", 0  # the word begins the line
                self._append(line, TextRun(index, "", 0), begins, space)
        while line.cells + cells > self.width:  # longer than a line
            head = chop_cells(shown, max(self.width - line.cells, 1))[0]
            self._append(line, TextRun(index, head, cell_len(head)), begins, space)
            begins, shown = False, shown[len(head) :]
            cells = cell_len(shown)
            line = _FlowLine()
            self._lines.append(line)
        if shown:
            self._append(line, TextRun(index, shown, cells), begins, space)

    def _append(self, line: _FlowLine, run: TextRun, begins: bool, space: bool) -> None:
        if not line.runs:
            line.first = begins
        line.runs.append(run)
        line.cells += run.cells
        if space:
            line.word = len(line.runs)

    def _next(self, line: _FlowLine, cells: int, space: bool) -> _FlowLine:
        """A new line, with the word that was begun on this one if it fits there."""
        moved = [] if space else line.runs[line.word :]
        size = sum(run.cells for run in moved)
        new = _FlowLine()
        self._lines.append(new)
        if moved and line.word > 0 and size + cells <= self.width:
            before = line.runs[line.word - 1]
            del line.runs[line.word :]
            line.cells -= size
            new.runs, new.cells = moved, size
            new.first = moved[0].piece != before.piece
        return new


def _common(old: Sequence[TextPiece], new: Sequence[TextPiece]) -> int:
    """How many pieces both begin with."""
    if old is new:
        return len(new)
    low, high = 0, min(len(old), len(new))
    while low < high:  # comparing slices is much faster than comparing one by one
        middle = (low + high + 1) // 2
        if old[low:middle] == new[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
