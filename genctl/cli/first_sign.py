"""A sign of life on a terminal, before anything slow is imported: a line on standard error that is taken away again."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # `typing` takes as long as all of this
if TYPE_CHECKING:
    from collections.abc import Sequence

LOADERS = ("run", "beam", "compare", "score", "inspect-cache")
SILENT = {"-h", "--help", "--help-all", "-q", "--quiet", "--dry", "--plan", "--version", "-V"}
_shown = False


def show(arguments: Sequence[str]) -> None:
    """Say that a command that loads a checkpoint has begun, if standard error is a terminal that can erase it."""
    global _shown
    command = next((word for word in arguments if not word.startswith("-")), "")
    if (
        command not in LOADERS
        or SILENT.intersection(arguments)
        or os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    ):
        return
    try:
        if not os.isatty(2):
            return
        width = os.get_terminal_size(2).columns or 80
        words = f"loading {_model(arguments)}".rstrip()[: max(width - 2, 7)] + "…"
        plain = os.environ.get("NO_COLOR") or "never" in arguments or "--color=never" in arguments
        os.write(2, (words if plain else f"\x1b[2m{words}\x1b[0m").encode())
    except (OSError, ValueError):
        return
    _shown = True


def clear() -> None:
    """Take the line away, if it is there."""
    global _shown
    if _shown:
        _shown = False
        try:
            os.write(2, b"\r\x1b[K")
        except OSError:
            return


def _model(arguments: Sequence[str]) -> str:
    """The checkpoint that the command line names; "" where a preset may name it, or where it cannot be printed."""
    name = ""
    for place, word in enumerate(arguments):
        if word in ("-m", "--model") and place + 1 < len(arguments):
            name = arguments[place + 1]
        elif word.startswith("--model="):
            name = word.partition("=")[2]
    return name if name.isascii() and name.isprintable() else ""
