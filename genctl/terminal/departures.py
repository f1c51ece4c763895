"""What several texts share, and where they differ.

The common prefix of the paths of a search; the texts of an n-best list, each shown from where it leaves the one that it
is nearest to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

from rich.cells import cell_len
from rich.text import Text

from genctl.events import shared_length
from genctl.events.history import ROOT, Endings, LaneHistory, Path
from genctl.terminal import theme
from genctl.terminal.text_width import first_cells, last_cells, one_line

# -- the common prefix of several paths, and the part of a text that a search can no longer change ---------------------


# Searches whose first result is the finished sequence with the highest score.
RANKED = frozenset({"beam", "beam-sample", "diverse-beam"})
DRAWN = frozenset({"greedy", "sample"})  # rows that do not compete: the first slot is returned first


def meet(paths: Iterable[Path]) -> Path:
    """The newest step that all paths share; the root if there are none."""
    first, *others = [*paths] or [ROOT]
    return reduce(Path.meet, others, first)


class Certain:
    """The certain beginning of the first returned sequence of a lane, which only grows.

    It is common to all live rows and to every finished sequence that could still be returned first. A call costs the
    live rows, and the rows that ended since the call before: what the others share is known.
    """

    def __init__(self) -> None:
        self._forget("")

    def _forget(self, lane: str) -> None:
        self._lane = lane
        self._seen: Endings | None = None  # all up to here are in the fields below
        self._ended: Path | None = None  # what the rows share that ended
        self._best = -math.inf  # the highest score among them
        self._winner: Path | None = None  # what those with this score share, or with none that compares
        self._first: int | None = None  # the lowest slot among them
        self._of_first: Path | None = None  # what those of this slot share
        self._slots = True  # whether each has a slot

    def __call__(self, lane: LaneHistory) -> Path:
        """The end of the certain part."""
        self._read(lane)
        kind = lane.began.strategy if lane.began else ""
        if kind in RANKED:
            return _meet(self._winner, lane.rows)
        slots = [row.slot for row in lane.rows]
        known = [slot for slot in (*slots, self._first) if slot is not None]
        if kind not in DRAWN or not self._slots or None in slots or not known:
            return _meet(self._ended, lane.rows)
        first = min(known)
        rows = [row for row, slot in zip(lane.rows, slots, strict=True) if slot == first]
        return _meet(self._of_first if first == self._first else None, rows)

    def _read(self, lane: LaneHistory) -> None:
        """Take in the rows that ended since the last call."""
        new: list[Path] = []
        node = lane.endings
        while node is not None and node is not self._seen:
            new.append(node.path)
            node = node.before
        if lane.lane != self._lane or node is not self._seen:  # another lane, or the same begins again
            self._forget(lane.lane)
            new = [*(lane.endings or ())]
        for path in reversed(new):
            self._take(path)
        self._seen = lane.endings

    def _take(self, path: Path) -> None:
        self._ended = _meet(self._ended, [path])
        score, slot = path.hypothesis.score, path.slot
        if score > self._best:
            self._best, self._winner = score, path
        elif not score < self._best:  # equals may both win; so may NaN
            self._winner = _meet(self._winner, [path])
        if slot is None:
            self._slots = False
        elif self._first is None or slot < self._first:
            self._first, self._of_first = slot, path
        elif slot == self._first:
            self._of_first = _meet(self._of_first, [path])


def _meet(one: Path | None, others: Iterable[Path]) -> Path:
    return meet([*([] if one is None else [one]), *others])


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
