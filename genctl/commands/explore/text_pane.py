"""The text of the current branch, each token coloured by its probability, with the cursor on one."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message
from textual.strip import Strip

from genctl.commands.explore import marks
from genctl.commands.explore.flow import TextFlow, TextPiece
from genctl.commands.explore.rows_pane import RowsPane
from genctl.terminal import theme


class TextPane(RowsPane):
    """Lines of tokens. Only the lines in view are drawn."""

    class Clicked(Message):
        """A token was clicked. `index` counts the pieces; the number of pieces stands for the end."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self, *, coloured: bool, id: str | None = None) -> None:
        super().__init__(id=id)
        self.coloured = coloured  # else a line of digits stands below each line
        self.flow = TextFlow(2)
        self.cursor = 0  # index of a piece; their number: the end

    @property
    def rows(self) -> int:
        """Screen rows for each line of text."""
        return 1 if self.coloured else 2

    def show(self, pieces: Sequence[TextPiece], cursor: int) -> None:
        """Show this branch, the cursor on a piece."""
        before = self.cursor
        first = self.flow.update(pieces)
        self.cursor = cursor
        self._measure()
        self._refresh_lines(first, len(self.flow) + 1)
        if before != cursor:
            self._refresh_lines(*self._lines_of(before))
            self._refresh_lines(*self._lines_of(cursor))
        self._follow()

    def _lines_of(self, index: int) -> tuple[int, int]:
        line = self.flow.line_of(min(index, max(len(self.flow.pieces) - 1, 0)))
        end = self.flow.line_of(index + 1) if index + 1 < len(self.flow.pieces) else len(self.flow)
        return line, max(end, line) + 1

    def line_of_cursor(self) -> int:
        """The line that the cursor is on."""
        return self.flow.line_of(self.cursor) if self.cursor < len(self.flow.pieces) else len(self.flow) - 1

    def neighbour(self, lines: int) -> int:
        """The index of the piece that is `lines` below the cursor."""
        here = self.line_of_cursor()
        cell = self.flow.cell_of(self.cursor) if self.cursor < len(self.flow.pieces) else self.flow.cells(here)
        line = min(max(here + lines, 0), len(self.flow) - 1)
        found = self.flow.at(line, cell)
        if found is None:
            runs = self.flow.line(line)
            found = runs[-1].piece if runs and line < len(self.flow) - 1 else len(self.flow.pieces)
        return found

    def _measure(self) -> None:
        self.measure(len(self.flow) * self.rows)

    def _refresh_lines(self, first: int, end: int) -> None:
        self.redraw(first * self.rows, end * self.rows)

    def _follow(self) -> None:
        """Keep the line of the cursor in view."""
        self.keep_in_view(self.line_of_cursor() * self.rows, self.rows)

    def on_resize(self) -> None:
        """Lay out for the new width, with a cell for the cursor at the end of a line."""
        self.flow.resize(self.room.width - 1)
        self._measure()
        self._follow()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One row: a line of text, or the digits below it."""
        self.drawn += 1
        number, below = divmod(y + self.scroll_offset.y, self.rows)
        width = self.room.width
        if number >= len(self.flow):
            return Strip.blank(width)
        segments = []
        for run in self.flow.line(number):
            piece = self.flow.pieces[run.piece]
            if below:
                segments.append(Segment(marks.tenth(piece.probability).ljust(run.cells)[: run.cells], marks.DIM))
            else:
                segments.append(Segment(run.text, self._style(run.piece, piece)))
        if self.cursor >= len(self.flow.pieces) and number == len(self.flow) - 1:
            segments.append(Segment(" ", marks.PART if below else marks.CURSOR))
        return Strip(segments).extend_cell_length(width).crop(0, width)

    def _style(self, index: int, piece: TextPiece) -> Style:
        if piece.probability is None:
            style = marks.DIM
        else:
            style = theme.colour(piece.probability) if self.coloured else theme.PLAIN
        if piece.differs:
            style += marks.PART
        return style + marks.CURSOR if index == self.cursor else style

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the token that was clicked."""
        place = event.get_content_offset(self)
        if place is None:
            return
        line = (place.y + self.scroll_offset.y) // self.rows
        found = self.flow.at(line, place.x)
        self.post_message(self.Clicked(len(self.flow.pieces) if found is None else found))
