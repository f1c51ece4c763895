"""Texts of a list cut so that different ones look different: each with the words at which it diverges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.cells import cell_len

from genctl.events import shared_length
from genctl.terminal.text_width import first_cells, last_cells, one_line

LONGEST_WORD = 24  # characters that a divergence moves back at most, to the beginning of a word
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

    Where they fit they are whole. Else each has the word at every place where it diverges from another one, `…` for
    what they share between, and its own last part. Of texts that are `growing` the end of the last part is shown, too.
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
    """The first word, of at most `longest` cells, of each part of a text but the last."""
    begun = "…" if places[0] else ""
    for start, end in pairwise(places):
        part = one_line(text[start:end].strip())
        if cell_len(part) <= longest:
            begun += part + (" " if text[end - 1].isspace() else "")
        else:
            begun += first_cells(part.split(" ", 1)[0].rstrip(",.;:"), longest).removesuffix("…") + "…"
    return begun
