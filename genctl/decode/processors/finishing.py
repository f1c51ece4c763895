"""Finish a grammar's text within the budget.

A way out is a list of tokens after which the text is whole. Each row carries one. Nothing is barred while more tokens
are left than one token can require. Then those tokens are barred after which the text cannot be finished in the tokens
that are left, as long as the row has a way out that fits. So a text that would end in time by itself is not changed,
and where no way out is found the mask of the grammar alone applies.

What is barred depends on the row's tokens, its scores and the budget alone, not on time or on other prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genctl.decode.processors.language import GrammarPosition, Language, unpacked
from genctl.decode.processors.way_out import Tokens, WaysOut
from genctl.errors import UsageError

_GROWTH = 8  # tokens by which a way out is taken to grow with each token while the end is far
_NEAR = 8  # tokens to spare from which on a token is barred unless a way out after it is known
_PROBABLE = 256  # ids that are examined before that, the most probable ones
_SEARCHES = 8  # searches of a step near the end, or among few ids; else there is one
_CLASSES = 64  # classes of positions that are remembered
_CERTAIN = 4_000  # positions after which it stays uncertain whether a text fits
_UNCHECKED, _UNKNOWN = -1, 1 << 30  # in place of the length of a way out


class KnownWay(NamedTuple):
    """A way out of a row, None if none was found. It is looked for again after `wait` more tokens."""

    tokens: Tokens | None = None
    wait: int = 0


class _Class(NamedTuple):
    """What is known of positions with the same following ids and the same way out."""

    lengths: NDArray[np.int32]  # [V], tokens that are left of that way after each id
    ways: dict[tuple[int, int], Tokens | None]  # an id, and the length that is short enough -> a way out after it
    after: dict[Tokens, list[int]]  # such a way -> all ids after which it leads out


class Finishing:
    """Bars what would keep the rows of one prompt from ending in time.

    Raises UsageError if it is certain that no text fits in `room` tokens.
    """

    def __init__(self, language: Language, room: int | None) -> None:
        self.language = language
        self.ways: WaysOut = language.memo.get("ways") or WaysOut(language)
        language.memo["ways"] = self.ways
        self._classes: OrderedDict[tuple[bytes, bool, Tokens], _Class] = OrderedDict()
        self.first = self.ways.first  # a way out of a row without tokens
        if room is not None and (self.first is None or len(self.first) >= room):
            try:
                shorter, certain = _shortest(language.start, room)
            except UsageError:  # llguidance gave up at a position that no text need come to
                shorter, certain = None, False
            if shorter is None and certain:
                known = "" if self.first is None else f" (the shortest that was found takes {len(self.first)})"
                count = f"{room} token{'s' * (room > 1)}, which is all that may be written"
                raise UsageError(f"{language.source.knob}: no text of it fits in {count}{known}")
            self.first = shorter or self.first

    def begin(self, room: int) -> KnownWay:
        """The way out of a row without tokens."""
        return self._waiting(self.first, room)

    def follow(self, before: KnownWay, position: GrammarPosition, left: int) -> KnownWay:
        """The way out of a row that came to `position` with one more token, with `left` tokens to write."""
        if before.wait:
            return KnownWay(before.tokens, before.wait - 1)
        known = before.tokens or ()
        rests = (known[start:] for start in range(len(known), -1, -1))
        way = next((rest for rest in rests if position.ends_with(rest)), None)
        if way is None or len(way) >= left:
            found = self.ways.find(position, left - _NEAR)
            way = found if way is None or (found is not None and len(found) < len(way)) else way
        return self._waiting(way, left)

    def _waiting(self, way: Tokens | None, left: int) -> KnownWay:
        spare = left if way is None else left - 1 - len(way) - self.ways.reach
        return KnownWay(way, max(spare, 0) // _GROWTH)

    def in_time(self, position: GrammarPosition, way: KnownWay, left: int, scores: Tensor) -> bytes:
        """The ids, one bit each, after which the text can be finished within `left` tokens."""
        tokens = way.tokens
        if way.wait or tokens is None or len(tokens) > left:
            return position.bits
        end = min(1, left - len(tokens))  # an EOS id, if there is room for it
        spare = left - end - len(tokens)
        if spare > self.ways.reach:
            return position.bits
        near, most, ids = spare <= _NEAR, left - 1 - end, position.continuing
        known = self._class(position, tokens)
        if ((known.lengths[ids] >= 0) & (known.lengths[ids] <= most)).all():
            return position.bits
        probable = scores[torch.from_numpy(ids).to(scores.device)].topk(min(_PROBABLE, len(ids))).indices
        likely = ids[probable.cpu().numpy()]
        examined = ids if near else likely
        lengths = self._lengths(known, position, tokens, examined)
        searches = _SEARCHES if near or len(ids) <= _SEARCHES else 1
        for token in likely[known.lengths[likely] > most][:searches].tolist():
            way_after = self._search(known, position, token, most)
            if way_after is not None:
                same = self._after(known, position, way_after) if near else token
                lengths[np.isin(examined, same) & (lengths > len(way_after))] = len(way_after)
        barred = examined[(lengths > most) & (near | (lengths < _UNKNOWN))]
        if not len(barred):
            return position.bits
        allowed = unpacked(position.bits).copy()
        allowed[barred] = False
        kept = torch.from_numpy(np.flatnonzero(allowed[: len(scores)])).to(scores.device)
        if not bool((scores[kept] > -torch.inf).any()):  # other processors barred all that would end in time
            return position.bits
        return np.packbits(allowed, bitorder="little").tobytes()

    def _class(self, position: GrammarPosition, way: Tokens) -> _Class:
        key = position.bits, position.started, way
        if key not in self._classes:
            lengths = np.full(len(self.language.words.pieces), _UNCHECKED, dtype=np.int32)
            self._classes[key] = _Class(lengths, {}, {})
            while len(self._classes) > _CLASSES:
                self._classes.popitem(last=False)
        self._classes.move_to_end(key)
        return self._classes[key]

    def _lengths(
        self, known: _Class, position: GrammarPosition, way: Tokens, ids: NDArray[np.intp]
    ) -> NDArray[np.int32]:
        """int32 [ids], the tokens that are left of the way after each id."""
        left = ids[known.lengths[ids] == _UNCHECKED]
        known.lengths[left] = _UNKNOWN
        for rest in dict.fromkeys((way[1:], way, *(way[start:] for start in range(len(way), 1, -1)))):
            known.lengths[position.ended_by(left.tolist(), rest)] = len(rest)
            left = left[known.lengths[left] == _UNKNOWN]
        return known.lengths[ids]

    def _search(self, known: _Class, position: GrammarPosition, token: int, most: int) -> Tokens | None:
        """A way out after a token; a shorter one is tried if it would hardly fit."""
        way, after = None, position.after(token)
        for enough in (_UNKNOWN, 0):
            if (token, enough) not in known.ways:
                known.ways[token, enough] = None if after is None else self.ways.find(after, enough)
            way = known.ways[token, enough]
            if way is None or len(way) <= most - _NEAR:
                break
        return way

    def _after(self, known: _Class, position: GrammarPosition, way: Tokens) -> list[int]:
        """The ids after which `way` leads out and is shorter than what is left of the position's own."""
        if way not in known.after:
            known.after[way] = position.ended_by(np.flatnonzero(known.lengths > len(way)).tolist(), way)
        return known.after[way]


def _shortest(start: GrammarPosition, most: int) -> tuple[Tokens | None, bool]:
    """A shortest text of at most `most` tokens, by trying all, and whether all were tried."""
    tries, level = _CERTAIN, {b"": (start, Tokens())}
    for left in range(most, 0, -1):
        longer: dict[bytes, tuple[GrammarPosition, Tokens]] = {}
        for here, way in level.values():
            following = here.continuing.tolist()
            tries -= len(following)
            if tries < 0:
                return None, False
            if ends := here.ended_by(following, ()):
                return (*way, ends[0]), True
            for token in following if left > 1 else ():
                after = here.after(token)
                if after is not None:
                    longer.setdefault(after.text, (after, (*way, token)))
        level = longer
    return None, True
