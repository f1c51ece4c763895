"""Cut and wrap text to a number of terminal cells, between whole characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from rich.cells import cell_len, chop_cells
from rich.style import Style
from rich.text import Text

from genctl.terminal import theme, widgets

_WORD = re.compile(r"\S+\s*|\s+")


def wrap(text: str, width: int) -> list[str]:
    """Break a text into lines, between words where possible. No character is lost.

    Appending text changes only the last line and what follows; trailing spaces may reach beyond `width`.
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


def unbroken(words: str, width: int, whole: Sequence[str] = ()) -> list[str]:
    """Lines of at most `width` cells, broken between words alone, and not inside of the texts in `whole`.

    A longer word has a line of its own, and is left to the terminal, which copies several rows of it as one.
    """
    for text in whole:
        words = words.replace(text, text.replace(" ", "\0"))
    lines: list[str] = []
    for part in words.split("\n"):
        line = ""
        for word in part.split(" "):
            if line and cell_len(line) + 1 + cell_len(word) > width:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}" if line else word
        lines.append(line)
    return [line.replace("\0", " ") for line in lines]


def hanging(first: str, words: str, width: int | None, style: Style = theme.PLAIN) -> list[Text]:
    """A dimmed label and words in lines of at most `width` cells, broken between words and indented alike."""
    indent = cell_len(first)
    parts = [words] if width is None else wrap(words, max(width - indent, 8))
    lines = []
    for place, part in enumerate(parts):
        line = Text(first if place == 0 else " " * indent, style=theme.DIM, no_wrap=True)
        lines.append(line.append(part.rstrip(), style=Style(dim=False) + style))
    return lines


def one_line(text: str) -> str:
    """The text with controls, newlines and tabs shown as signs."""
    return widgets.visible(text.replace("\n", "↵").replace("\t", "⇥"))


def last_cells(text: str, width: int) -> str:
    """The end of a text on one line of at most `width` cells, with … if the beginning is cut."""
    flat = one_line(text[-4 * max(width, 1) :])
    if cell_len(flat) <= width and len(text) <= 4 * max(width, 1):
        return flat
    characters: list[str] = []
    room = width - 1
    for character in reversed(flat):
        room -= cell_len(character)
        if room < 0:
            break
        characters.append(character)
    while characters and unicodedata.combining(characters[-1]):  # its base letter is cut off
        characters.pop()
    return "…" + "".join(reversed(characters)) if width > 0 else ""


def middle_cells(text: str, width: int) -> str:
    """The text on one line of at most `width` cells, with … in the middle if it is cut."""
    flat = one_line(text[: 4 * max(width, 1)])
    if cell_len(flat) <= width and len(text) <= 4 * max(width, 1):
        return flat
    beginning = first_cells(text, (width + 1) // 2)
    return beginning + last_cells(text, width - cell_len(beginning) + 1)[1:]


def first_cells(text: str, width: int) -> str:
    """The beginning of a text on one line of at most `width` cells, with … if it is cut."""
    flat = one_line(text[: 4 * max(width, 1)])
    return flat if cell_len(flat) <= width and len(text) <= 4 * max(width, 1) else widgets.cells(flat + "…", width)
