"""Erase drawn lines correctly after the window became narrower, where the terminal wraps them (`rewrapping`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

from genctl.terminal.rewrapping import rows, wraps


class DrawnLines:
    """The widths of the lines on the screen, for erasing all their rows."""

    def __init__(self, console: Console, environ: Mapping[str, str] | None = None) -> None:
        self._console = console
        self._environ = environ
        self._width = 0
        self._cells: list[int] = []

    def note(self, cells: Sequence[int]) -> None:
        """Note that lines of these widths are on the screen, with the cursor in the last one."""
        self._width, self._cells = self._console.width, list(cells)

    @property
    def outdated(self) -> bool:
        """Whether the window's width changed since they were drawn."""
        return bool(self._cells) and self._console.width != self._width

    def clear(self) -> None:
        """Erase the additional rows of rewrapped lines. Rich erases one row per line."""
        width = self._console.width
        more = sum(rows(cells, width) for cells in self._cells) - len(self._cells)
        self._cells = []
        if more > 0 and wraps(self._environ):
            up = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * more
            self._console.control(Control(ControlType.CARRIAGE_RETURN, *up))
