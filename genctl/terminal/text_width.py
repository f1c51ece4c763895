"""Cut, wrap and mark text by terminal cells, between whole characters; also text that arrives piece by piece.

`disambiguate` cuts the texts of a list so that different ones look different; `marked` writes a mark below each piece.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.style import Style
from rich.text import Text

from genctl.events import shared_length
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
    """Like `hanging`, with a style of its own for the label."""
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


def first_cells(text: str, width: int) -> str:
    """The beginning of a text on one line of at most `width` cells, with … if it is cut."""
    flat = one_line(text[: 4 * max(width, 1)])
    return flat if cell_len(flat) <= width and len(text) <= 4 * max(width, 1) else widgets.cells(flat + "…", width)


# -- text that is written piece by piece -------------------------------------------------------------------------------


TAB = 8  # cells between tab stops
_PART = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """Writes text at once, and moves a word to the next line when it grows beyond the right edge.

    A line break replaces the white space where it falls, and white space at the end of a line is not written, so
    copied lines have no padding. Words that are longer than a line or have wide characters, as in Japanese, are left to
    the terminal, which breaks them anywhere. `send` writes to the terminal; `width` returns its columns, and is called
    for every piece; `dim` holds the codes that turn the style of prompts on and off.
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
    """Cells used in the last row when a terminal of `columns` columns wraps a line of `cells` cells."""
    return (cells - 1) % columns + 1 if cells else 0


def terminal_wrap(console: Console) -> WordWrap | None:
    """Word wrap for the terminal of a console; None for a pipe or a file, even if colours are forced.

    A terminal that knows no control sequences breaks its lines itself.
    """
    if not (console.is_interactive or is_terminal(console.file)):
        return None
    columns = (lambda: console.width) if console.is_interactive else (lambda: sys.maxsize)
    return WordWrap(console.file.write, columns, dim=dim_codes(console))


def dim_codes(console: Console) -> tuple[str, str]:
    """The codes that turn the style of prompts on and off on a console."""
    with console.capture() as capture:
        console.print(Text("x", style=theme.PROMPT), end="")
    on, _, off = capture.get().partition("x")
    return on, off


LONGEST_WORD = 24  # characters that a divergence may move back to the beginning of a word
LEAST = 8  # cells of the last part of a text


def word_boundary(text: str, other: str) -> int:
    """The character at which two texts diverge, moved back to the beginning of the word."""
    at = shared_length(text, other)
    if not text[:at].strip():
        return 0
    if at == len(text) or at == len(other):
        longer = text if len(text) > at else other
        if at == len(longer) or not (longer[at].isalnum() and longer[at - 1 : at].isalnum()):
            return at
    back = at
    while back and not text[back - 1].isspace():
        back -= 1
    return back if at - back <= LONGEST_WORD else at


def disambiguate(texts: Sequence[str], width: int, *, growing: bool = False) -> list[str]:
    """The texts in `width` cells each, so that different ones look different: `Rowan…flute…"Why do you play`.

    If all fit, they stay whole. Else each shows the word at every place where it diverges from another one, `…` for the
    text in between, and its own last part. For `growing` texts, the end of the last part is shown, too.
    """
    if all(cell_len(one_line(text)) <= width for text in texts):
        return [one_line(text) for text in texts]
    places = [sorted({word_boundary(text, other) for other in texts if other != text} or {0}) for text in texts]
    for longest in (14, 10, 7, 5, 3):
        begun = [_begun(text, found, longest) for text, found in zip(texts, places, strict=True)]
        if max(map(cell_len, begun)) + LEAST <= width:
            break
    shown = []
    for text, found, before in zip(texts, places, begun, strict=True):
        last, room = one_line(text[found[-1] :].lstrip(" ")), max(width - cell_len(before), 1)
        if growing and cell_len(last) > room:
            word = first_cells(last.split(" ", 1)[0], max(room // 2, 1))
            last = word + last_cells(last[len(word) :], max(room - cell_len(word), 1))
        shown.append(first_cells(before + last, width))
    return shown


def _begun(text: str, places: Sequence[int], longest: int) -> str:
    """Each part of a text but the last: whole if it has at most `longest` cells, else its first word."""
    begun = "…" if places[0] else ""
    for start, end in pairwise(places):
        part = one_line(text[start:end].strip())
        if cell_len(part) <= longest:
            begun += part + (" " if text[end - 1].isspace() else "")
        else:
            begun += first_cells(part.split(" ", 1)[0].rstrip(",.;:"), longest).removesuffix("…") + "…"
    return begun


@dataclass(frozen=True)
class MarkedPiece:
    """The text of one or more tokens that became whole characters together, and its style."""

    text: str
    style: Style
    mark: str  # one cell


def marked(width: int, before: str, pieces: Iterable[MarkedPiece], *, lines: int = 1) -> list[Text]:
    """Pieces in lines of at most `width` cells, each mark under the first letter of its piece.

    A word is broken only if it is longer than a line. The end of the text `before` the pieces comes first, dimmed, on
    at most `lines` lines.
    """
    text = Text(no_wrap=True).append(last_cells(before, lines * width) if before else "", style=theme.PROMPT)
    marks: dict[int, MarkedPiece] = {}  # by the character under which each stands
    for piece in pieces:
        shown = "↵\n".join(map(one_line, piece.text.split("\n")))
        indent = len(shown) - len(shown.lstrip())
        if piece.mark != " ":
            marks[len(text) + (indent if indent < len(shown) else 0)] = piece
        text.append(shown, style=piece.style)
    plain = text.plain
    ends: list[int] = []  # where lines end, each with its line break
    for part in wrap(plain, width):
        end = (ends[-1] if ends else 0) + len(part)
        ends.append(end + (plain[end : end + 1] == "\n"))
    found: list[Text] = []
    for start, line in zip([0, *ends], text.divide(ends), strict=False):
        under = Text(no_wrap=True)
        cells = accumulate(map(cell_len, line.plain), initial=0)
        for place, cell in enumerate(cells, start):
            if place in marks and place < start + len(line) and cell < width:
                under.append(" " * (cell - under.cell_len)).append(marks[place].mark, style=marks[place].style)
        line.rstrip()
        found += [line, under] if under else [line] if line else []
    return found
