"""The screen of a terminal as a picture: everything is printed to a terminal that is not there, then drawn by Rich."""

from __future__ import annotations

import io
import re

from rich.ansi import AnsiDecoder
from rich.console import Console

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


def picture(console: Console, title: str) -> str:
    """What was written on a `terminal`, as SVG. It loads nothing: fonts are those of the reader."""
    assert isinstance(console.file, _Screen)
    canvas = Console(record=True, width=console.width, file=io.StringIO(), markup=False, highlight=False, emoji=False)
    for line in AnsiDecoder().decode(console.file.getvalue()):
        canvas.print(line, no_wrap=True, crop=True)
    return _REMOTE_FONTS.sub("", canvas.export_svg(title=title, unique_id="genctl"))
