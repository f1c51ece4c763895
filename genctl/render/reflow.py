"""A window that was made narrower while something was drawn in it.

Most terminals of today then wrap the lines that no longer fit, so that what was drawn takes more rows than it had; the
others cut the lines off, and it takes as many. Which one this is cannot be asked, only known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

# Variables that terminals which wrap set for the programs in them.
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
    """Whether this terminal wraps lines anew when its window becomes narrower."""
    known = os.environ if environ is None else environ
    return any(known.get(name) for name in WRAPPING) or known.get("TERM_PROGRAM") in PROGRAMS


class Drawn:
    """Remembers how wide the lines on the screen are, so that all their rows can be taken away again."""

    def __init__(self, console: Console, environ: Mapping[str, str] | None = None) -> None:
        self._console = console
        self._environ = environ
        self._width = 0
        self._cells: list[int] = []

    def note(self, cells: Sequence[int]) -> None:
        """These lines, so many columns each, are on the screen now, and the cursor is in the last one."""
        self._width, self._cells = self._console.width, list(cells)

    @property
    def outdated(self) -> bool:
        """Whether the window has another width than when they were drawn."""
        return bool(self._cells) and self._console.width != self._width

    def clear(self) -> None:
        """Erase the rows that the lines have come to take beyond one each; the others are for who drew them."""
        width = max(self._console.width, 1)
        more = sum(max(-(-cells // width), 1) for cells in self._cells) - len(self._cells)
        self._cells = []
        if more > 0 and wraps(self._environ):
            up = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * more
            self._console.control(Control(ControlType.CARRIAGE_RETURN, *up))
