"""A grammar as a logits processor: tokens that violate it get a score of minus infinity.

A row's tokens decide its position in the grammar, so rows may be reordered, forked and rolled back: positions are
stored by the row's tokens, and a longer row has a copy of its parent's matcher, moved one token further. Where a
position was dropped, the row is read again from the nearest one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from genctl.decode.processors.finishing import Finishing, KnownWay
from genctl.decode.processors.grammar_source import GrammarSource
from genctl.decode.processors.language import GrammarPosition, language
from genctl.decode.processors.token_bytes import Spelling

_ID = 8  # bytes of a token in a key
_KEPT = 64  # positions that are stored at least; one takes memory in proportion to its text
_Key = tuple["int | None", bytes]  # the budget of a row, and its tokens


class _Row(NamedTuple):
    """A row's position, None if it has left the grammar (a draft), and a way to the end of its text."""

    position: GrammarPosition | None
    way: KnownWay


class Grammar:
    """history int64 [R, T], scores f32 [R, V] -> scores with everything outside the grammar at -inf.

    The text of all new tokens must be a text of the grammar: special tokens are barred, and an EOS id is allowed where
    the text may end. An EOS id that has text of its own is allowed where the text may end with it. The scores of a row
    that has left the grammar (a draft) are not changed.

    With `room`, the most new tokens, a text is finished within it (see `finishing`), once the row has the `ahead` bytes
    of a required prefix.

    Raises UsageError if the tokenizer cannot write any text of the grammar, or none within `room`, or the grammar is
    too complex.
    """

    def __init__(
        self,
        source: GrammarSource,
        words: Spelling,
        prompt_len: int,
        eos: Sequence[int],
        room: int | None = None,
        ahead: int = 0,
        written: Sequence[int] = (),
    ) -> None:
        self.source, self.words, self.prompt_len, self.eos = source, words, prompt_len, tuple(eos)
        self.language = language(source, words, eos)
        self._room, self._ahead = room, ahead
        self._written = tuple(written)  # tokens of the prompt behind `prompt_len`
        self._rows: OrderedDict[_Key, _Row] = OrderedDict()
        # without an EOS id that has no text of its own nothing is known of how a text ends
        self._ends = any(token < len(words.pieces) and not words.at_first(token) for token in eos)
        self._finishing: Finishing | None = None
        if room is not None:
            self._first(room)

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        if history.shape[1] < self.prompt_len:  # tokens that were forced before any text
            return scores
        rows = history[:, self.prompt_len :].to("cpu", torch.int64).contiguous()
        return self.constrained([row.numpy().tobytes() for row in rows], scores, self._room)

    def constrained(self, rows: Sequence[bytes], scores: Tensor, room: int | None) -> Tensor:
        """The scores f32 [R, V] of rows, each the int64 ids of its new tokens, `room` of them at most."""
        packed = b"".join([self._allowed(row, scores, n, room) for n, row in enumerate(rows)])
        bits = ~np.frombuffer(packed, dtype=np.uint8).reshape(len(rows), -1)  # torch has no unpackbits
        barred = torch.from_numpy(np.unpackbits(bits, axis=1, bitorder="little").view(bool))[:, : scores.shape[1]]
        if barred.shape[1] < scores.shape[1]:
            barred = torch.nn.functional.pad(barred, (0, scores.shape[1] - barred.shape[1]), value=True)
        while len(self._rows) > max(_KEPT, 4 * len(rows)):
            self._rows.popitem(last=False)
        return scores.masked_fill(barred.to(scores.device), -torch.inf)

    def _allowed(self, tokens: bytes, scores: Tensor, place: int, room: int | None) -> bytes:
        """The ids that may follow, one bit each."""
        position, way = self._row(tokens, room)
        if position is None:
            return b"\xff" * len(self.language.start.bits)
        left = 0 if room is None else room - len(tokens) // _ID
        if self._finishing is None or way.tokens is None or left < 1 or len(position.text) < self._ahead:
            return position.bits
        return self._finishing.in_time(position, way, left, scores[place])

    def _row(self, tokens: bytes, room: int | None) -> _Row:
        known = len(tokens)
        while known and (room, tokens[:known]) not in self._rows:
            known -= _ID
        row = self._rows[room, tokens[:known]] if known else self._first(room)
        for end in range(known + _ID, len(tokens) + 1, _ID):
            if row.position is None:
                break
            position = row.position.after(int.from_bytes(tokens[end - _ID : end], "little", signed=True))
            way = row.way
            if position is not None and self._finishing is not None and room is not None:
                way = self._finishing.follow(way, position, room - end // _ID)
            row = _Row(position, way)
        self._rows[room, tokens] = row
        self._rows.move_to_end((room, tokens))
        return row

    def _first(self, room: int | None) -> _Row:
        if room is None or not self._ends:
            return _Row(self.language.start, KnownWay())
        if self._finishing is None:
            self._finishing = Finishing(self.language, self._room)
        return _Row(self.language.start, self._finishing.begin(room))

    @property
    def least(self) -> int:
        """The tokens of a shortest text, as far as one is known."""
        return len(self._first(1).way.tokens or ()) if self._ends else 0

    def cut(self, tokens: Sequence[int], before: int) -> bool:
        """Whether a row's new tokens are only the beginning of a text. `before`: tokens of the prompt."""
        new = tokens[max(self.prompt_len - before, 0) :]
        return not self.accepts([token for token in (*self._written, *new) if token not in self.eos])

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Whether the text of these new tokens (EOS not among them) is a text of the grammar."""
        position = self._position(tokens)
        return position is not None and position.may_end

    def begins_with(self, tokens: Sequence[int]) -> bool:
        """Whether a text of the grammar may begin with these tokens."""
        return self._position(tokens) is not None

    def _position(self, tokens: Sequence[int]) -> GrammarPosition | None:
        return self._row(np.array(tokens, dtype=np.int64).tobytes(), None).position
