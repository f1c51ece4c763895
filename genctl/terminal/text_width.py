"""Cut and wrap text to a number of terminal cells, between whole characters; also text that comes piece by piece."""

from __future__ import annotations

import re
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Sequence

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.style import Style
from rich.text import Text

from genctl.terminal import theme, widgets
from genctl.terminal.standard_streams import is_terminal

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
    """Lines of at most `width` characters, broken between words alone, and not within the texts in `whole`.

    A longer word has a line of its own, and is left to the terminal, which copies several rows of it as one.
    """
    for text in whole:
        words = words.replace(text, text.replace(" ", "\0"))
    parts = (textwrap.wrap(part, width, break_long_words=False, break_on_hyphens=False) for part in words.split("\n"))
    return [line.replace("\0", " ") for lines in parts for line in lines or [""]]


def hanging(first: str, words: str, width: int | None, style: Style = theme.PLAIN) -> list[Text]:
    """A dimmed label and words in lines of at most `width` cells, broken between words and indented alike."""
    indent = cell_len(first)
    parts = [words] if width is None else wrap(words, max(width - indent, 8))
    lines = []
    for place, part in enumerate(parts):
        line = Text(first if place == 0 else " " * indent, style=theme.DIM, no_wrap=True)
        lines.append(line.append(part.rstrip(), style=Style(dim=False) + style))
    return lines


def labelled(label: str, style: Style, words: str, width: int | None) -> list[Text]:
    """The same behind a label that has a style of its own."""
    found = hanging(label, words, width)
    found[0].stylize(Style(dim=False) + style, 0, len(label))
    return found


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


# -- text that is written piece by piece -------------------------------------------------------------------------------


TAB = 8  # cells between tab stops
_PART = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """Writes text at once, and moves a word to the next line when it grows beyond the right edge.

    A line break replaces the white space at which it is made, and white space at the end of a line is not written, so
    that copied lines have no padding. Words that are longer than a line or have wide characters, as in Japanese, are
    left to the terminal, which breaks them anywhere. `send` writes to the terminal; `width` gives its columns, and is
    read for every piece; `dim` are the codes that turn the style of prompts on and off.
    """

    def __init__(
        self, send: Callable[[str], object], width: Callable[[], int], *, dim: tuple[str, str] = ("", "")
    ) -> None:
        self._send, self._width, self._dim = send, width, dim
        self._used = 0  # cells of the row before the gap
        self._gap = ""  # white space that is written only if something follows it on its line
        self._word = ""  # the last word
        self._styled = ""  # the same as it was written

    def write(self, text: str, *, dim: bool = False) -> None:
        """Write the next piece of text, without control characters. Sends everything in one string."""
        columns = max(self._width(), 2)
        sent: list[str] = []
        for part in _PART.findall(text):
            if part.isspace():
                if self._word:
                    self._used, self._gap = _last_row(self._start() + cell_len(self._word), columns), ""
                    self._word = self._styled = ""
                self._gap += part
                if part == "\n":
                    sent.append("\n")
                    self._used, self._gap = 0, ""
                continue
            begun, piece = self._word, part.join(self._dim) if dim else part
            self._word, self._styled = begun + part, self._styled + piece
            self._used = _last_row(self._used, columns)  # the window may have become narrower
            cells = cell_len(self._word)
            if self._used and self._start() + cells > columns and cells <= len(self._word):
                sent += [f"\x1b[{self._used + 1}G\x1b[K\n" if begun else "\n", self._styled]
                self._used, self._gap = 0, ""
            else:
                sent += [piece] if begun else [self._gap, piece]
        if sent:
            self._send("".join(sent))

    def _start(self) -> int:
        """The cell at which the last word begins."""
        start = self._used
        for character in self._gap:
            start += TAB - start % TAB if character == "\t" else cell_len(character)
        return start


def _last_row(cells: int, columns: int) -> int:
    """Cells of the last row of a line that a terminal of so many columns wraps."""
    return (cells - 1) % columns + 1 if cells else 0


def terminal_wrap(console: Console) -> WordWrap | None:
    """Word wrap for the terminal of a console; None for a pipe or a file, also where colours are forced.

    A terminal that knows no control sequences breaks its lines itself.
    """
    if not (console.is_interactive or is_terminal(console.file)):
        return None
    columns = (lambda: console.width) if console.is_interactive else (lambda: sys.maxsize)
    return WordWrap(console.file.write, columns, dim=dim_codes(console))


def dim_codes(console: Console) -> tuple[str, str]:
    """What turns the style of prompts on and off on a console."""
    with console.capture() as capture:
        console.print(Text("x", style=theme.PROMPT), end="")
    on, _, off = capture.get().partition("x")
    return on, off
