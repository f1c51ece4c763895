"""Text cut to the width of a terminal: whole characters only, and lines that stay as they are when text is added."""

from __future__ import annotations

import re
import unicodedata

from rich.cells import cell_len, chop_cells

from genctl.render import parts

_WORD = re.compile(r"\S+\s*|\s+")


def wrap(text: str, width: int) -> list[str]:
    """The lines of a text, broken between words where there is room. Joined, with newlines at hard breaks, it is whole.

    Adding text changes only the last line and what follows it; spaces at the end of a line may reach beyond `width`.
    """
    lines = []
    for part in text.split("\n"):
        line = ""
        for word in _WORD.findall(part):
            if line and cell_len(line) + cell_len(word.rstrip()) > width:
                lines.append(line)
                line = ""
            bare = word.rstrip()
            if cell_len(bare) > width:
                *full, last = chop_cells(bare, max(width, 2))
                lines += full
                word = last + word[len(bare) :]
            line += word
        lines.append(line)
    return lines


def one_line(text: str) -> str:
    """The text with controls, newlines and tabs shown as signs."""
    return parts.visible(text.replace("\n", "↵").replace("\t", "⇥"))


def last_cells(text: str, width: int) -> str:
    """The end of a text on one line in at most `width` cells, with … where its beginning is left out."""
    flat = one_line(text[-4 * max(width, 1) :])
    if cell_len(flat) <= width and len(text) <= 4 * max(width, 1):
        return flat
    kept: list[str] = []
    room = width - 1
    for character in reversed(flat):
        room -= cell_len(character)
        if room < 0:
            break
        kept.append(character)
    while kept and unicodedata.combining(kept[-1]):  # its letter is gone
        kept.pop()
    return "…" + "".join(reversed(kept)) if width > 0 else ""


def first_cells(text: str, width: int) -> str:
    """The beginning of a text on one line in at most `width` cells, with … where it goes on."""
    flat = one_line(text[: 4 * max(width, 1)])
    return flat if cell_len(flat) <= width and len(text) <= 4 * max(width, 1) else parts.cells(flat + "…", width)
