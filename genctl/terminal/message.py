"""Messages on standard error, one per line; on a terminal a long one is broken between words."""

from __future__ import annotations

import os
import sys

from genctl.errors import without_secrets
from genctl.terminal.widgets import visible


def print_message(line: str, *, color: str = "auto", whole: str = "") -> None:
    """Print one line without secrets, control characters made visible.

    Words and numbers stay whole, and so does the text `whole` in it; `error:` has its colour.
    """
    shown, columns = visible(without_secrets(line)), _columns()
    coloured = shown.startswith("error:") and _coloured(color, columns)
    if columns and len(shown) * 2 > columns:  # a character takes at most two cells
        from genctl.terminal.text_width import unbroken

        kept = visible(without_secrets(whole))
        shown = "\n".join(unbroken(shown, columns, [kept] if kept else []))
    print(f"\x1b[1;31merror:\x1b[0m{shown[6:]}" if coloured else shown, file=sys.stderr, flush=True)


def _coloured(color: str, columns: int) -> bool:
    """Whether a terminal of this many columns (0: none) gets colours; the rules are those of `make_consoles`."""
    if color == "auto" and not os.environ.get("NO_COLOR"):
        dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
        return bool(os.environ.get("FORCE_COLOR")) or (columns > 0 and not dumb)
    return color == "always"


def _columns() -> int:
    """The columns of the terminal; 0 if standard error is none."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0
