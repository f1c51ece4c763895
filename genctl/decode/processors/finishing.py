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
_PROBABLE, _SEARCHED = 256, 16  # the most probable ids: before that they are checked; after these a way is searched
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

    lengths: NDArray[np.int32]  # [V], tokens of the way out after each id
    rests: list[Tokens]  # ways out after one more id
    searched: set[int]


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
            shorter, certain = _shortest(language.start, room)
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
        if ((known.lengths[ids] > most) | (known.lengths[ids] == _UNCHECKED)).any():
            probable = scores[torch.from_numpy(ids).to(scores.device)].topk(min(_PROBABLE, len(ids))).indices
            likely = ids[probable.cpu().numpy()]
            self._check(known, position, ids if near else likely)
            searches = _SEARCHES if near or len(ids) <= _SEARCHED else 1
            self._search(known, position, likely[:_SEARCHED], most, searches)
        lengths = known.lengths[ids]
        barred = ids[(lengths > most) & (near | (lengths < _UNKNOWN))]
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
            rests = dict.fromkeys((way[1:], way, *(way[start:] for start in range(len(way), 1, -1))))
            self._classes[key] = _Class(lengths, list(rests), set())
            while len(self._classes) > _CLASSES:
                self._classes.popitem(last=False)
        self._classes.move_to_end(key)
        return self._classes[key]

    def _check(self, known: _Class, position: GrammarPosition, ids: NDArray[np.intp]) -> None:
        """Find the way out after each of these ids among those that are known."""
        ids = ids[known.lengths[ids] == _UNCHECKED]
        known.lengths[ids] = _UNKNOWN
        for rest in known.rests:
            known.lengths[position.ended_by(ids.tolist(), rest)] = len(rest)
            ids = ids[known.lengths[ids] == _UNKNOWN]

    def _search(
        self, known: _Class, position: GrammarPosition, ids: NDArray[np.intp], most: int, searches: int
    ) -> None:
        """Search a way out after each of these ids that has none of at most `most` tokens, if it was not searched."""
        wanted = [token for token in ids.tolist() if known.lengths[token] > most and token not in known.searched]
        for token in wanted[:searches]:
            known.searched.add(token)
            after = position.after(token)
            way = None if after is None or known.lengths[token] <= most else self.ways.find(after, most - _NEAR)
            if way is not None:
                known.rests.append(way)
                longer = np.flatnonzero(known.lengths > len(way))
                known.lengths[position.ended_by(longer.tolist(), way)] = len(way)


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
