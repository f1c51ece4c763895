"""The two consoles of a run, and whether each is a terminal, coloured, interactive."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Literal, TypeAlias

from rich.console import Console

from genctl.terminal.standard_streams import is_coloured, is_dumb, is_terminal, never_fail_to_encode

Color: TypeAlias = Literal["auto", "always", "never"]


def make_consoles(
    color: Color,
    *,
    stdout: IO[str] | None = None,
    stderr: IO[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[Console, Console]:
    """The console for results and the one for everything else, each set up for its own stream.

    `is_coloured` decides on colours. Pipes and dumb terminals are never animated.
    """
    variables = os.environ if environ is None else environ
    return _console(color, stdout or sys.stdout, variables), _console(color, stderr or sys.stderr, variables)


def _console(color: Color, stream: IO[str], environ: Mapping[str, str]) -> Console:
    terminal, dumb, coloured = is_terminal(stream), is_dumb(environ), is_coloured(color, stream, environ)
    never_fail_to_encode(stream)
    # Rich interprets the same variables differently, so it receives the decision and only the variables for sizes.
    variables = {name: environ[name] for name in ("TERM", "COLORTERM", "COLUMNS", "LINES") if name in environ}
    if dumb and coloured:
        variables["TERM"] = "xterm-256color"
    if dumb and terminal:  # Rich assumes that a dumb terminal has 80 columns
        with suppress(OSError, ValueError):
            columns, lines = os.get_terminal_size(stream.fileno())
            variables = {"COLUMNS": str(columns or 80), "LINES": str(lines or 25), **variables}
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
        _environ=variables,
    )


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise; Rich would end the process with status 1, but the command line decides on the exit status."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class _Nowhere(io.StringIO):
    """A stream that discards everything."""

    def write(self, text: str) -> int:
        return len(text)


def discard() -> Console:
    """A console that shows nothing, for runs whose results are written as records."""
    return Console(file=_Nowhere(), quiet=True, color_system=None, markup=False, highlight=False, emoji=False)
