"""Finish a grammar's text within the budget.

A way out is a list of tokens after which the text is whole. Each row carries one. Nothing is barred while more tokens
are left than one token can require. Then those tokens are barred after which the text cannot be finished in the tokens
that are left, as long as the row has a way out that fits. So a text that would end in time by itself is not changed,
and where no way out is found the mask of the grammar alone applies.

What is barred depends on the row's tokens, its scores and the budget alone, not on time or on other prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genctl.decode.processors.language import Language, Position, unpacked
from genctl.decode.processors.way_out import Tokens, WaysOut
from genctl.errors import UsageError

_GROWTH = 8  # tokens by which a way out is taken to grow with each token while the end is far
_NEAR = 8  # tokens to spare below which a token is barred unless a way out after it is known
_MANY = 2048  # ids that may follow of which, while there are tokens to spare, only the most probable are checked
_PROBABLE, _LIKELY = 256, 16  # those are checked; after these a way out is searched
_SEARCHES = 8  # of a step
_CLASSES = 64  # classes of positions that are remembered
_UNKNOWN = 1 << 30  # tokens of a way out that is not known


class Way(NamedTuple):
    """A way out of a row, None if none was found. It is looked for again after `wait` more tokens."""

    tokens: Tokens | None = None
    wait: int = 0


@dataclass
class _Class:
    """What is known of positions with the same following ids and the same way out."""

    lengths: NDArray[np.int32]  # [V], tokens of the way out after each id
    checked: NDArray[np.bool_]  # [V]
    rests: list[Tokens]  # ways out after one more id
    failed: dict[int, int] = field(default_factory=dict)  # id -> the most tokens for which a search found none


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
            shorter, certain = self.ways.shortest(room)
            if shorter is None and certain:
                known = "" if self.first is None else f" (the shortest that was found takes {len(self.first)})"
                count = f"{room} token{'s' * (room > 1)}"
                raise UsageError(
                    f"{language.source.knob}: no text of it fits in {count}, which is all that may be written{known}"
                )
            self.first = shorter or self.first

    def begin(self, room: int) -> Way:
        """The way out of a row without tokens."""
        return self._waiting(self.first, room)

    def follow(self, before: Way, position: Position, left: int) -> Way:
        """The way out of a row that came to `position` with one more token, with `left` tokens to write."""
        if before.wait:
            return Way(before.tokens, before.wait - 1)
        known = before.tokens or ()
        rests = (known[start:] for start in range(len(known), -1, -1))
        way = next((rest for rest in rests if position.ends_with(rest)), None)
        if way is None or len(way) >= left:
            way = min(filter(None, [way, self.ways.find(position, left - 1)]), key=len, default=way)
        return self._waiting(way, left)

    def _waiting(self, way: Tokens | None, left: int) -> Way:
        spare = left if way is None else left - 1 - len(way) - self.ways.reach
        return Way(way, max(spare, 0) // _GROWTH)

    def in_time(self, position: Position, way: Way, left: int, scores: Tensor) -> bytes:
        """The ids, one bit each, after which the text can be finished within `left` tokens."""
        tokens = way.tokens
        if way.wait or tokens is None or len(tokens) > left:
            return position.bits
        end = min(1, left - len(tokens))  # an EOS id, if there is room for it
        spare = left - end - len(tokens)
        if spare > self.ways.reach:
            return position.bits
        near, most = spare <= _NEAR, left - 1 - end
        ids = position.continuing
        known = self._class(position, tokens)
        if not known.checked[ids].all() or (known.lengths[ids] > most).any():
            # f32 [V] -> the most probable ids
            ranked = scores[torch.from_numpy(ids).to(scores.device)].topk(min(_PROBABLE, len(ids))).indices.cpu()
            likely = ids[ranked.numpy()]
            self._check(known, position, ids if near or len(ids) <= _MANY else likely)
            self._search(known, position, likely[:_LIKELY], most)
        lengths = known.lengths[ids]
        barred = ids[(lengths > most) & (near | (lengths < _UNKNOWN))]
        if not len(barred):
            return position.bits
        allowed = unpacked(position.bits).copy()
        allowed[barred] = False
        left_over = torch.from_numpy(np.flatnonzero(allowed[: len(scores)])).to(scores.device)
        if not bool((scores[left_over] > -torch.inf).any()):  # other processors barred all that would end in time
            return position.bits
        return np.packbits(allowed, bitorder="little").tobytes()

    def _class(self, position: Position, way: Tokens) -> _Class:
        key = position.bits, position.started, way
        if key not in self._classes:
            size = len(self.language.words.pieces)
            rests = dict.fromkeys((way[1:], way, *(way[start:] for start in range(len(way), 1, -1))))
            lengths = np.full(size, _UNKNOWN, dtype=np.int32)
            self._classes[key] = _Class(lengths, np.zeros(size, dtype=bool), list(rests))
            while len(self._classes) > _CLASSES:
                self._classes.popitem(last=False)
        self._classes.move_to_end(key)
        return self._classes[key]

    def _check(self, known: _Class, position: Position, ids: NDArray[np.intp]) -> None:
        """Find the way out after each of these ids among those that are known."""
        ids = ids[~known.checked[ids]]
        known.checked[ids] = True
        for rest in known.rests:
            found = position.ended_by(ids.tolist(), rest)
            known.lengths[found] = len(rest)
            ids = ids[known.lengths[ids] == _UNKNOWN]

    def _search(self, known: _Class, position: Position, ids: NDArray[np.intp], most: int) -> None:
        """Search a way out of at most `most` tokens after each of these ids that has none yet."""
        searches = _SEARCHES
        for token in ids.tolist():
            if known.lengths[token] <= most or known.failed.get(token, -1) >= most or not searches:
                continue
            searches -= 1
            after = position.after(token)
            way = None if after is None else self.ways.find(after, most)
            if way is None or len(way) > most:
                known.failed[token] = most
            if way is None:
                continue
            known.rests.append(way)
            unknown = np.flatnonzero(known.checked & (known.lengths > len(way)))
            known.lengths[position.ended_by(unknown.tolist(), way)] = len(way)
