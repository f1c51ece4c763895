"""The two consoles of a run, made in one place: who is a terminal, who gets colour, who may be animated."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Mapping
from typing import IO, Literal, TypeAlias

from rich.console import Console

from genctl.render.unseen import never_fail_to_encode

Color: TypeAlias = Literal["auto", "always", "never"]


def make_consoles(
    color: Color,
    *,
    stdout: IO[str] | None = None,
    stderr: IO[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[Console, Console]:
    """The consoles for results and for everything else, each judged by its own stream.

    `color` goes before the environment. With "auto", NO_COLOR goes before FORCE_COLOR (which stands for "always"), and
    both before TERM=dumb and whether the stream is a terminal. A pipe gets escape codes only if they were asked for,
    and is never animated; neither is a dumb terminal.
    """
    known = os.environ if environ is None else environ
    return _console(color, stdout or sys.stdout, known), _console(color, stderr or sys.stderr, known)


def _console(color: Color, stream: IO[str], environ: Mapping[str, str]) -> Console:
    if color == "auto" and environ.get("NO_COLOR"):
        color = "never"
    elif color == "auto" and environ.get("FORCE_COLOR"):
        color = "always"
    terminal = _is_terminal(stream)
    dumb = environ.get("TERM", "").lower() in ("dumb", "unknown")
    coloured = color == "always" or (color == "auto" and terminal and not dumb)
    never_fail_to_encode(stream)
    # Rich judges the same variables by its own rules; it is told the outcome and shown only what sets sizes and depth.
    shown = {name: environ[name] for name in ("TERM", "COLORTERM", "COLUMNS", "LINES") if name in environ}
    if dumb and color == "always":
        shown["TERM"] = "xterm-256color"
    if dumb and terminal:  # Rich takes 80 columns for a dumb terminal, however wide it is
        shown = {**_size(stream), **shown}
    return _Console(
        file=stream,
        force_terminal=terminal or coloured,
        force_interactive=terminal and not dumb,
        color_system="auto" if coloured else None,
        no_color=not coloured,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
        _environ=shown,
    )


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the process with status 1; what a closed pipe means is decided where all errors are."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class _Nowhere(io.StringIO):
    """Keeps nothing: a long batch must not be remembered here."""

    def write(self, text: str) -> int:
        return len(text)


def discard() -> Console:
    """A console that shows nothing: for a run whose results are written as records."""
    return Console(file=_Nowhere(), quiet=True, color_system=None, markup=False, highlight=False, emoji=False)


def _size(stream: IO[str]) -> dict[str, str]:
    """COLUMNS and LINES of a terminal; {} where it does not say."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return {}
    return {"COLUMNS": str(size.columns), "LINES": str(size.lines)} if size.columns and size.lines else {}


def _is_terminal(stream: IO[str]) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # the stream is closed
        return False
