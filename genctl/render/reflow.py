"""Erase drawn lines correctly after the window became narrower.

Most terminals then wrap the lines that no longer fit, which take more rows; others cut them off. A program cannot ask
which, so terminals that wrap are recognised by their environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

# Set by terminals that wrap.
WRAPPING = (
    "ALACRITTY_WINDOW_ID",
    "GHOSTTY_RESOURCES_DIR",
    "KITTY_WINDOW_ID",
    "KONSOLE_VERSION",
    "TMUX",
    "VTE_VERSION",
    "WEZTERM_EXECUTABLE",
    "WT_SESSION",
)
PROGRAMS = ("Apple_Terminal", "iTerm.app", "vscode", "WezTerm", "ghostty")


def wraps(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this terminal rewraps lines when its window becomes narrower."""
    variables = os.environ if environ is None else environ
    return any(variables.get(name) for name in WRAPPING) or variables.get("TERM_PROGRAM") in PROGRAMS


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
        width = max(self._console.width, 1)
        more = sum(max(-(-cells // width), 1) for cells in self._cells) - len(self._cells)
        self._cells = []
        if more > 0 and wraps(self._environ):
            up = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * more
            self._console.control(Control(ControlType.CARRIAGE_RETURN, *up))
