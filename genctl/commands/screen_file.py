"""`--svg`: what a terminal shows when a run is done, as a picture."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.text import Text

from genctl.commands.page_file import FileAtEnd, repeating
from genctl.events import Event
from genctl.terminal import theme
from genctl.terminal.widgets import visible

if TYPE_CHECKING:
    from rich.console import Console


# -- the screen of a terminal as a picture: everything is printed to a terminal that is not there, then drawn by Rich


MOST, LAST = 200, 40  # lines of a picture, and how many of them are the last ones
_REMOTE_FONTS = re.compile(r"@font-face\s*\{.*?\}\s*", re.DOTALL)


class _Screen(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def terminal(width: int) -> Console:
    """A console for a terminal of `width` cells that animates nothing, so that only what stays is written."""
    return Console(
        file=_Screen(),
        force_terminal=True,
        force_interactive=False,
        color_system="truecolor",
        no_color=False,
        width=width,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
        _environ={"TERM": "xterm-256color"},
    )


def picture(console: Console, title: str, command: str = "") -> str:
    """What was written on a `terminal`, as SVG, after the `command`. It loads nothing: fonts are those of the reader.

    Of more than MOST lines the first and the last are drawn.
    """
    assert isinstance(console.file, _Screen)
    canvas = Console(record=True, width=console.width, file=io.StringIO(), markup=False, highlight=False, emoji=False)
    if command:
        canvas.print(Text(visible(f"$ {command}"), style=theme.DIM, overflow="fold"))
    lines = list(AnsiDecoder().decode(console.file.getvalue()))
    if len(lines) > MOST:
        left = Text(f"⋮ {len(lines) - MOST:,} lines are left out of this picture", style=theme.DIM)
        lines = [*lines[: MOST - LAST], left, *lines[-LAST:]]
    for line in lines:
        canvas.print(line, no_wrap=True, crop=True)
    return _REMOTE_FONTS.sub("", canvas.export_svg(title=title, unique_id="genctl"))


WIDTH = 100  # cells, where there is no terminal to be as wide as


class ScreenFile(FileAtEnd):
    """A picture in the making: it shows what is printed on `console`."""

    def __init__(self, path: str, *, force: bool) -> None:
        super().__init__(path, force=force)
        self.console = terminal(shutil.get_terminal_size((WIDTH, 24)).columns)
        self._view: Any = None  # takes events, and draws what is left when it is closed
        self.load_s = 0.0  # what loading took

    def feed(self, event: Event) -> None:
        """Take one event."""
        if self._view is not None:
            self._view.feed(event)

    def draw(self, draw: Callable[[Console], Any]) -> None:
        """Let a command draw on the console, as on a terminal; a view that is returned receives the events."""
        self._view = draw(self.console)

    def content(self) -> bytes:
        """The picture."""
        if self._view is not None:
            self._view.load_s = self.load_s
            self._view.close()
        title, command = "genctl " + " ".join(sys.argv[1:2]), repeating()
        return picture(self.console, title, command).encode("utf-8", "replace")
