"""Where the texts of a list differ: each from where it diverges, or with the words at which it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len
from rich.text import Text

from genctl.events import shared_length
from genctl.terminal import theme
from genctl.terminal.text_width import first_cells, last_cells, one_line

LONGEST_WORD = 24  # characters that a divergence moves back at most, to the beginning of a word
BRIEF = 32  # shared characters up to which short texts are shown in full
LEAST = 8  # cells of the last part of a text
ENDS = "(ends here)"
SAME = "(the same text)"


@dataclass(frozen=True)
class BranchPoint:
    """Where a text diverges from the one with which it shares most."""

    character: int  # of the text; a word that both have begun is not shared
    shared: int  # token ids that both begin with, or characters where ids are unknown
    same: bool = False  # the nearest text is equal


def divergences(texts: Sequence[str], ids: Sequence[Sequence[int]]) -> list[BranchPoint]:
    """Where each text diverges from the nearest one above it, and the first from the nearest of all.

    `ids` are the token ids of each (empty where they are unknown).
    """
    found = []
    for place, text in enumerate(texts):
        others = range(place) if place else range(1, len(texts))
        nearest = max(others, key=lambda other: (shared_length(text, texts[other]), -other), default=None)
        if nearest is None:
            found.append(BranchPoint(0, 0))
            continue
        characters = word_boundary(text, texts[nearest])
        shared = shared_length(ids[place], ids[nearest]) if all(ids) else characters
        found.append(BranchPoint(characters, shared, text == texts[nearest]))
    return found


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


def column(found: Sequence[BranchPoint]) -> list[str]:
    """The column `+31 │` before the texts, empty for the first; [] where no text shares anything with one above it."""
    if not any(each.shared for each in found[1:]):
        return []
    cells = ["", *(f"+{each.shared}" if each.shared else "" for each in found[1:])]
    size = max(map(len, cells))
    return [f"{cell:>{size}} │ " for cell in cells]


def legend(ids: Sequence[Sequence[int]]) -> str:
    """What the numbers of the column count."""
    return f"+n {'tokens' if all(ids) else 'characters'} shared with the nearest text above"


def parts(texts: Sequence[str], found: Sequence[BranchPoint], width: int) -> list[Text]:
    """The texts in `width` cells each, from where each diverges from its nearest.

    Where all are short and fit, they are shown in full, and what is shared is dimmed.
    """
    brief = max((each.character for each in found), default=0) <= BRIEF
    if brief and all(cell_len(one_line(text)) <= width for text in texts):
        return [
            Text.assemble((one_line(text[: each.character]), theme.DIM), one_line(text[each.character :]))
            for text, each in zip(texts, found, strict=True)
        ]
    shown = []
    for text, each in zip(texts, found, strict=True):
        rest = text[each.character :]
        if not each.character:
            shown.append(first_cells(text, width))
        elif each.same or not rest.strip():
            shown.append(first_cells(SAME if each.same else ENDS, width))
        else:
            shown.append("…" + first_cells(rest, max(width - 1, 1)))
    return list(map(Text, shown))


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
