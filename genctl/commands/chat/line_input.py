"""Where a person types, as plain lines of the terminal. `line_editor` is the editor of terminals that can redraw."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from genctl.terminal.widgets import visible

SIGN, MORE = "> ", ". "


class LineCleared(KeyboardInterrupt):
    """Ctrl-C, where something is typed already."""


class PlainLines:
    """Lines as the terminal gives them. One that ends with a backslash continues in the next.

    `read` raises EOFError after Ctrl-D and KeyboardInterrupt after Ctrl-C. Of a line that Ctrl-C clears only the
    terminal knows.
    """

    def read(self, text: str = "") -> str:
        """A turn or a command; `text` is there already, to be changed."""
        if text:
            sys.stdout.write("".join(f"{MORE}{line}\n" for line in visible(text).split("\n")))
        lines = [self._line(SIGN)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(MORE))
        return "\n".join(lines)

    def waiting(self) -> AbstractContextManager[Callable[[], object]]:
        """While an answer is written. Gives what restores the terminal at once; called twice, it does no harm."""
        return nullcontext(lambda: None)  # the echo is all that is seen of such a line

    def _line(self, sign: str) -> str:
        sys.stdout.write(sign)
        sys.stdout.flush()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            line = sys.stdin.readline()
        finally:
            signal.signal(signal.SIGINT, before)
        if not line:
            raise EOFError
        return line.rstrip("\r\n")
