"""Where the texts of an n-best list differ: each is shown from where it leaves the one that it is nearest to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from genctl.sequences import shared_length
from genctl.terminal import theme
from genctl.terminal.text_width import first_cells, one_line

LONGEST_WORD = 24  # characters that a departure moves back at most, to the beginning of a word
BRIEF = 32  # characters that are shared, up to which short texts are shown in full
ENDS = "(ends here)"
SAME = "(the same text)"


@dataclass(frozen=True)
class Departure:
    """Where a text leaves another one, with which it shares most."""

    character: int  # of the text; a word that both have begun is not shared
    shared: int  # token ids that both begin with, or characters where ids are unknown
    same: bool = False  # the nearest text is equal


def departures(texts: Sequence[str], ids: Sequence[Sequence[int]]) -> list[Departure]:
    """The departure of each text from the nearest one above it, and of the first from the nearest of all.

    `ids` are the token ids of each (empty where they are unknown).
    """
    departures = []
    for place, text in enumerate(texts):
        others = range(place) if place else range(1, len(texts))
        nearest = max(others, key=lambda other: (shared_length(text, texts[other]), -other), default=None)
        if nearest is None:
            departures.append(Departure(0, 0))
            continue
        characters = leaves(text, texts[nearest])
        shared = shared_length(ids[place], ids[nearest]) if all(ids) else characters
        departures.append(Departure(characters, shared, text == texts[nearest]))
    return departures


def leaves(text: str, other: str) -> int:
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


def column(departures: Sequence[Departure]) -> list[str]:
    """The column `+31 │` before the texts; [] where no text shares anything with another."""
    if not any(each.shared for each in departures):
        return []
    cells = [f"+{each.shared}" if each.shared else "" for each in departures]
    size = max(map(len, cells))
    return [f"{cell:>{size}} │ " for cell in cells]


def legend(ids: Sequence[Sequence[int]]) -> str:
    """What the numbers of the column count."""
    return f"+n {'tokens' if all(ids) else 'characters'} shared with the nearest text above"


def parts(texts: Sequence[str], departures: Sequence[Departure], width: int) -> list[Text]:
    """The texts in `width` cells each, from where each leaves its nearest.

    Where all are short and fit, they are shown in full, and what is shared is dimmed.
    """
    brief = max((each.character for each in departures), default=0) <= BRIEF
    if brief and all(cell_len(one_line(text)) <= width for text in texts):
        return [_whole(text, each.character) for text, each in zip(texts, departures, strict=True)]
    return [Text(_rest(text, each, width)) for text, each in zip(texts, departures, strict=True)]


def _whole(text: str, shared: int) -> Text:
    return Text().append(one_line(text[:shared]), style=theme.DIM).append(one_line(text[shared:]))


def _rest(text: str, departure: Departure, width: int) -> str:
    if not departure.character:
        return first_cells(text, width)
    if departure.same:
        return first_cells(SAME, width)
    left = text[departure.character :]
    return "…" + first_cells(left, max(width - 1, 1)) if left.strip() else first_cells(ENDS, width)
