"""A line on standard error while a checkpoint is loaded, drawn before anything slow is imported. Results erase it.

It shows the current activity and counts seconds, so that something moves while torch is imported or a prompt is read.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False  # importing `typing` takes as long as this whole module
if TYPE_CHECKING:
    from collections.abc import Sequence
    from threading import RLock

LOADERS = ("run", "beam", "compare", "score", "inspect-cache", "chat")
SILENT = {"-h", "--help", "--help-all", "-q", "--quiet", "--dry", "--plan", "--version", "-V"}
TICK_S = 0.25
ERASE = "\r\x1b[K"


class _Line:
    """The line. `lock` is set once a thread redraws it."""

    def __init__(self, words: str, *, plain: bool) -> None:
        self.words, self.plain = words, plain
        self.terminal = os.dup(2)  # descriptor 2 itself is redirected while libraries would print there
        self.began = time.monotonic()
        self.drawn = ""  # what stands there; "" while it is hidden
        self.visible = True
        self.lock: RLock | None = None

    def text(self) -> str:
        """What is shown now, in a line that does not wrap."""
        width = max((os.get_terminal_size(self.terminal).columns or 80) - 2, 7)
        seconds = int(time.monotonic() - self.began)
        words = f"{self.words[: width - (4 if seconds else 0)]}…" + (f" {seconds} s" if seconds else "")
        return words[:width]

    def draw(self) -> None:
        """Draw what has changed."""
        line = self.text()
        if line != self.drawn:
            os.write(self.terminal, (ERASE + (line if self.plain else f"\x1b[2m{line}\x1b[0m")).encode())
            self.drawn = line

    def hide(self) -> None:
        """Erase the line."""
        self.visible = False
        drawn, self.drawn = self.drawn, ""
        if drawn:
            os.write(self.terminal, ERASE.encode())


_line: _Line | None = None


def show(arguments: Sequence[str]) -> None:
    """Begin the line for a command that loads a checkpoint, if standard error is a terminal that can erase it."""
    global _line
    command = next((word for word in arguments if not word.startswith("-")), "")
    dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    if command not in LOADERS or SILENT.intersection(arguments) or dumb:
        return
    plain = os.environ.get("NO_COLOR") or "never" in arguments or "--color=never" in arguments
    try:
        if not os.isatty(2):
            return
        line = _Line(f"loading {_model(arguments)}".rstrip(), plain=bool(plain))
        line.draw()
    except (OSError, ValueError):
        return
    import threading  # after the first frame

    line.lock, _line = threading.RLock(), line
    threading.Thread(target=_count_seconds, args=(line,), name="loading-line", daemon=True).start()


def status(words: str, *, restart: bool = True) -> bool:
    """Show the current activity, with its seconds from zero if `restart`. Returns whether the line exists."""
    if _line is None:
        return False
    _line.words, _line.visible = words, True
    if restart:
        _line.began = time.monotonic()
    _update(_line)
    return _line is not None


def exists() -> bool:
    """Whether the line exists, even if it is hidden. After `end` it does not."""
    return _line is not None


def clear() -> None:
    """Erase the line, if there is one. `status` draws it again."""
    if _line is not None and _line.visible:
        _update(_line, hide=True)


def end() -> None:
    """Erase the line for good: results begin."""
    global _line
    clear()
    _line = None


def _update(line: _Line, *, hide: bool = False) -> None:
    """Draw or hide the line while the thread does not. If the terminal has gone, drop the line."""
    global _line
    assert line.lock is not None
    with line.lock:
        try:
            if hide:
                line.hide()
            else:
                line.draw()
        except (OSError, ValueError):
            _line = None


def _count_seconds(line: _Line) -> None:
    """In a thread: redraw the line until `end`."""
    assert line.lock is not None
    while _line is line:
        time.sleep(TICK_S)
        with line.lock:
            if _line is line and line.visible:
                _update(line)


def _model(arguments: Sequence[str]) -> str:
    """The checkpoint that the command line names; "" if it names none (a preset may), or one that cannot be printed."""
    name = ""
    for place, word in enumerate(arguments):
        if word in ("-m", "--model") and place + 1 < len(arguments):
            name = arguments[place + 1]
        elif word.startswith("--model="):
            name = word.partition("=")[2]
    return name if name.isascii() and name.isprintable() else ""
