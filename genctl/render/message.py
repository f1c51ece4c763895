"""Messages on standard error, one per line; on a terminal a long one is broken between words."""

from __future__ import annotations

import os
import sys

from genctl.render.widgets import visible


def print_message(line: str) -> None:
    """Print one line, control characters made visible. Words and numbers stay whole."""
    shown, columns = visible(line), _columns()
    if not columns or len(shown) * 2 <= columns:
        print(shown, file=sys.stderr, flush=True)
        return
    from genctl.render.word_wrap import WordWrap

    wrap = WordWrap(sys.stderr.write, lambda: columns, erases=False)
    wrap.write(f"{shown}\n")
    sys.stderr.flush()


def _columns() -> int:
    """The columns of the terminal; 0 if standard error is none."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0
