"""Where the texts of an n-best list differ: each is shown from where it leaves the one that it is nearest to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len
from rich.text import Text

from genctl.events import shared_length
from genctl.terminal import theme
from genctl.terminal.text_width import first_cells, last_cells, one_line

LONGEST_WORD = 24  # characters that a departure moves back at most, to the beginning of a word
BRIEF = 32  # characters that are shared, up to which short texts are shown in full
LEAST = 8  # cells of the last part of a text
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


# -- what tells texts apart --------------------------------------------------------------------------------------------


def told_apart(texts: Sequence[str], width: int, *, growing: bool = False) -> list[str]:
    """The texts in `width` cells each, so that different ones look different: `Rowan…flute …"Why do you play`.

    Where they fit they are whole. Else each has the word at every place where it leaves another one, `…` for what they
    share between, and its own last part; the same places stand below one another. Of texts that are `growing` the
    end of the last part is shown, too.
    """
    if all(cell_len(one_line(text)) <= width for text in texts):
        return [one_line(text) for text in texts]
    places = _places(texts)
    for longest in (14, 10, 7, 5, 3):
        begun = _begun(texts, places, longest)
        if max(map(cell_len, begun)) + LEAST <= width:
            break
    rows = []
    for text, found, before in zip(texts, places, begun, strict=True):
        last = text[found[-1] :].lstrip(" ")
        room = max(width - cell_len(before), 1)
        rows.append(first_cells(before + (_both_ends(last, room) if growing else first_cells(last, room)), width))
    return rows


def _places(texts: Sequence[str]) -> list[list[int]]:
    """For each text the characters at which it leaves another one, in their order; at least one."""
    order = sorted(range(len(texts)), key=texts.__getitem__)
    shared = [shared_length(texts[one], texts[other]) for one, other in pairwise(order)]
    places = [{0} for _ in texts] if not shared else [set[int]() for _ in texts]
    for at, number in enumerate(order):
        # sorted texts share less the further apart they are: a new least is where another branch leaves
        for walk in (range(at, len(shared)), range(at - 1, -1, -1)):
            least = len(texts[number]) + 1
            for step in walk:
                other = texts[order[step + 1 if step >= at else step]]
                if shared[step] < least and other != texts[number]:
                    least = shared[step]
                    places[number].add(leaves(texts[number], other))
    return [sorted(found or {0}) for found in places]


def _begun(texts: Sequence[str], places: Sequence[Sequence[int]], longest: int) -> list[str]:
    """What stands before the last part of each text, its columns aligned; words have `longest` cells at most."""
    heads = [
        [_head(text[start:end], longest) for start, end in pairwise(found)]
        for text, found in zip(texts, places, strict=True)
    ]
    begun = ["…" if found[0] else "" for found in places]
    for level in range(max(map(len, heads))):
        size = max(cell_len(row[level][0]) for row in heads if len(row) > level)
        for number, row in enumerate(heads):
            if len(row) > level:
                word, after = row[level]
                begun[number] += word + " " * (size - cell_len(word)) + after
    return begun


def _head(part: str, longest: int) -> tuple[str, str]:
    """The first word of a part, or all of a short one, and what stands after it."""
    whole = one_line(part.strip())
    if cell_len(whole) <= longest:
        return whole, " " if part[-1:].isspace() else ""
    word, cut = whole.split(" ", 1)[0], first_cells(whole, longest + 1).removesuffix("…")
    return (word.rstrip(",.;:") or word if cell_len(word) <= longest else cut), "…"


def _both_ends(text: str, width: int) -> str:
    """The first word of a text and its end, in `width` cells."""
    flat = one_line(text)
    if cell_len(flat) <= width:
        return flat
    word = first_cells(flat.split(" ", 1)[0], max(width // 2, 1))
    return word + last_cells(flat[len(word) :], max(width - cell_len(word), 1))
