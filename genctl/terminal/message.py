"""Messages on standard error, one per line; on a terminal a long one is broken between words."""

from __future__ import annotations

import os
import sys

from genctl.errors import without_secrets
from genctl.terminal.widgets import visible

_ERROR = ("\x1b[1;31m", "\x1b[0m")


def print_message(line: str, *, color: str = "auto", whole: str = "") -> None:
    """Print one line without secrets, control characters made visible.

    Words and numbers stay whole, and so does the text `whole` in it; `error:` has its colour.
    """
    shown, columns = visible(without_secrets(line)), _columns()
    first, rest = ("error:", shown[6:]) if shown.startswith("error:") and _coloured(color, columns) else ("", shown)
    if not columns or len(shown) * 2 <= columns:
        print(f"{first and first.join(_ERROR)}{rest}", file=sys.stderr, flush=True)
        return
    from genctl.terminal.text_width import WordWrap

    def send(text: str) -> None:
        sys.stderr.write(text.replace("\0", " "))  # no other NUL is left in what is visible

    wrap = WordWrap(send, lambda: columns, erases=False, dim=_ERROR)
    wrap.write(first, dim=True)
    kept = visible(without_secrets(whole))
    wrap.write(f"{rest.replace(kept, kept.replace(' ', chr(0))) if kept else rest}\n")
    sys.stderr.flush()


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
