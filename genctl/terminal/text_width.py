"""Cut and wrap text to a number of terminal cells, between whole characters; also text that comes piece by piece."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.style import Style
from rich.text import Text

from genctl.terminal import theme, widgets
from genctl.terminal.rewrapping import wraps
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
_CLOSING = ("Pe", "Pf", "Po", "Sk", "Mn", "Me", "Mc", "Cf")  # categories that stay with the character before them
_OPENING = ("Ps", "Pi")


class WordWrap:
    """Writes text at once, and moves a word to the next line when it grows beyond the right edge.

    A line break replaces the white space at which it is made, and white space at the end of a line is not written, so
    that copied lines have no padding. Lines also break before and after wide characters. A word longer than a line is
    left to the terminal, which breaks it anywhere. `write` sends a string to the terminal; `width` gives its columns,
    and is read again for every piece.

    Without `erases` (a terminal that knows no control sequences) a word is held back until it is complete.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        width: Callable[[], int],
        *,
        erases: bool = True,
        dim: tuple[str, str] = ("", ""),
    ) -> None:
        self._send = write
        self._width = width
        self._erases = erases
        self._dim = dim  # what turns the style of prompts on and off
        self._used = 0  # cells of the last row before the gap
        self._gap = ""  # white space that is written only if something follows it on its line
        self._word: list[tuple[str, bool]] = []  # the pieces of the last word, and which of them are dim
        self._columns = 0  # of the window at the last write

    def write(self, text: str, *, dim: bool = False) -> None:
        """Write the next piece of text, without control characters. Sends everything in one string."""
        sent: list[str] = []
        self._resize()
        for part in _PART.findall(text):
            if part == "\n":
                self._finish(sent)
                sent.append("\n")
                self._used, self._gap = 0, ""
            elif part.isspace():
                self._finish(sent)
                self._gap += part
            else:
                for place, unit in enumerate(self._units(part)):
                    if place:
                        self._finish(sent)
                    self._grow(sent, unit, dim)
        if sent:
            self._send("".join(sent))

    def flush(self) -> None:
        """Write a word that is held back."""
        sent: list[str] = []
        self._finish(sent)
        if sent:
            self._send("".join(sent))

    def _units(self, part: str) -> Iterator[str]:
        """The pieces of a part that must not be broken. The first continues the last word, if that is allowed."""
        before = self._word[-1][0][-1] if self._word else ""
        unit = ""
        for character in part:
            if before and _may_break(before, character):
                yield unit
                unit = ""
            unit += character
            before = character
        yield unit

    def _grow(self, sent: list[str], piece: str, dim: bool) -> None:
        """Add a piece to the last word, which moves to the next line if it no longer fits."""
        if not piece:
            return
        old = cell_len(self._letters())
        self._word.append((piece, dim))
        if not self._erases:
            return
        if self._used and self._start() + cell_len(self._letters()) > self._columns:
            sent.append(f"\x1b[{self._used + 1}G\x1b[K\n" if old else "\n")
            self._used, self._gap = 0, ""
            self._send_word(sent)
        else:
            sent.append(("" if old else self._gap) + self._styled(piece, dim))

    def _finish(self, sent: list[str]) -> None:
        """The last word is complete."""
        if not self._word:
            return
        cells = cell_len(self._letters())
        if not self._erases:
            if self._used and self._start() + cells > self._columns:
                sent.append("\n")
                self._used, self._gap = 0, ""
            sent.append(self._gap)
            self._send_word(sent)
        self._used = self._last_row(self._start() + cells)
        self._word, self._gap = [], ""

    def _resize(self) -> None:
        columns, before = max(self._width(), 2), self._columns
        self._columns = columns
        if not before or columns >= before:
            return
        used = self._start() + cell_len(self._letters()) if self._word and self._erases else self._used
        if used <= columns:
            return
        if self._word and self._erases:  # the window has cut it or wrapped it: it stays where it is
            self._word, self._gap = [], ""
        self._used = self._last_row(used) if wraps() else columns

    def _last_row(self, cells: int) -> int:
        return (cells - 1) % self._columns + 1 if cells else 0

    def _letters(self) -> str:
        return "".join(text for text, _ in self._word)

    def _send_word(self, sent: list[str]) -> None:
        sent += (self._styled(text, dim) for text, dim in self._word)

    def _start(self) -> int:
        """The cell at which the last word begins."""
        start = self._used
        for character in self._gap:
            start += TAB - start % TAB if character == "\t" else cell_len(character)
        return start

    def _styled(self, text: str, dim: bool) -> str:
        return f"{self._dim[0]}{text}{self._dim[1]}" if dim else text


def terminal_wrap(console: Console) -> WordWrap | None:
    """Word wrap for the terminal of a console; None for a pipe or a file, also where colours are forced."""
    if not (console.is_interactive or is_terminal(console.file)):
        return None
    with console.capture() as capture:
        console.print(Text("x", style=theme.PROMPT), end="")
    on, _, off = capture.get().partition("x")
    return WordWrap(console.file.write, lambda: console.width, erases=console.is_interactive, dim=(on, off))


def _may_break(before: str, after: str) -> bool:
    """Whether a line may end between two characters that are not white space: beside wide ones, as in Japanese."""
    if cell_len(before) < 2 and cell_len(after) < 2:
        return False
    if before == "\u200d" or unicodedata.category(after) in _CLOSING:  # the joiner of emoji; 。 and 」
        return False
    return unicodedata.category(before) not in _OPENING
