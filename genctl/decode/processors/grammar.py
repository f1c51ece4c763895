"""The processors of `json_schema`, `regex` and `grammar`: tokens that violate a grammar get minus infinity.

A row's tokens determine its position in the grammar, so rows can be reordered, forked and rolled back: positions are
keyed by the row's tokens, and a longer row gets a copy of its parent's matcher, advanced by one token. If a position
was evicted, the row is read again from the nearest stored one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genctl.decode.processors import ByHistory, Processor
from genctl.decode.processors.build import ProcessorContext
from genctl.decode.processors.finishing import KnownWay, finishing
from genctl.decode.processors.grammar_source import GrammarSource, read
from genctl.decode.processors.language import GrammarPosition, language
from genctl.decode.processors.token_bytes import Spelling, spelling
from genctl.errors import UsageError, quote

_ID = 8  # bytes of a token in a key
_STORED = 4  # positions stored per row; the memory of one grows with its text


class _Row(NamedTuple):
    """A row's position, None if it has left the grammar (a draft), and a way to the end of its text."""

    position: GrammarPosition | None
    way: KnownWay = KnownWay()
    tail: bytes | None = None  # before the mark: the end of the text, in which a mark may have begun


@dataclass(eq=False)
class Grammar:
    """history int64 [R, T], scores f32 [R, V] -> scores with everything outside the grammar at -inf.

    The text of all new tokens must be a text of the grammar: special tokens are barred, and an EOS id is allowed where
    the text may end. An EOS id that has text of its own is allowed where the text may end with it. The scores of a row
    that has left the grammar (a draft) are not changed.

    With `mark`, the grammar begins after it. Before it everything is allowed except EOS ids.

    With `room`, the maximum number of new tokens, a text is finished within it (see `finishing`) once the row has the
    `ahead` bytes of a required prefix.

    Raises UsageError if the tokenizer cannot write any text of the grammar, or none within `room`, or if the grammar is
    too complex.
    """

    source: GrammarSource
    words: Spelling
    prompt_len: int
    eos: Sequence[int]
    room: int | None = None
    ahead: int = 0
    written: Sequence[int] = ()  # tokens of the prompt from `prompt_len` on
    mark: GrammarMark | None = None

    def __post_init__(self) -> None:
        words, room, mark = self.words, self.room, self.mark
        self.language = language(self.source, words, self.eos)
        self._rows: ByHistory[_Row] = ByHistory(_STORED)
        # a text can be finished only with an EOS id that has no text of its own
        ends = any(token < len(words.pieces) and not words.at_first(token) for token in self.eos)
        self._finishing, self._way = None, None
        if room is not None and ends:
            self._finishing = finishing(self.language)
            self._way = self._finishing.shortest(room if mark is None else max(room - len(mark.ids), 1))
        self._start = self._begin(0) if mark is None else _Row(None, tail=b"")

    @property
    def least(self) -> int:
        """The length of a shortest text in tokens; 0 if none is known."""
        return len(self._way or ())

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        if history.shape[1] < self.prompt_len:  # before a forced first token
            return scores
        rows = history[:, self.prompt_len :].to("cpu", torch.int64).contiguous().numpy()
        allowed = [self._allowed(row.tobytes(), own, len(rows)) for row, own in zip(rows, scores, strict=True)]
        bits = ~np.frombuffer(b"".join(allowed), dtype=np.uint8).reshape(len(rows), -1)  # torch has no unpackbits
        barred = torch.from_numpy(np.unpackbits(bits, axis=1, bitorder="little").view(bool))[:, : scores.shape[1]]
        if barred.shape[1] < scores.shape[1]:
            barred = torch.nn.functional.pad(barred, (0, scores.shape[1] - barred.shape[1]), value=True)
        return scores.masked_fill(barred.to(scores.device), -torch.inf)

    def _allowed(self, tokens: bytes, scores: Tensor, rows: int) -> bytes:
        """The ids that may follow, one bit each."""
        row = self._row(tokens, rows)
        left = None if self.room is None else self.room - len(tokens) // _ID
        size = len(self.language.start.bits)
        if row.tail is not None and self.mark is not None:
            allowed = self.mark.allowed(row.tail, None if left is None else left - 1 - self.least)
            return np.packbits(allowed, bitorder="little").tobytes().ljust(size, b"\xff")
        if row.position is None:
            return b"\xff" * size
        if self._finishing is None or left is None or left < 1 or len(row.position.text) < self.ahead:
            return row.position.bits
        return self._finishing.in_time(row.position, row.way, left, scores)

    def _row(self, tokens: bytes, rows: int = 1) -> _Row:
        """The row with these new tokens, int64 each; `rows` is the number of rows in the call."""
        known, row = len(tokens), self._rows.get(tokens)
        while row is None:
            known -= _ID
            row = self._rows.get(tokens[:known]) if known > 0 else self._start
        for end in range(max(known, 0) + _ID, len(tokens) + 1, _ID):
            row = self._after(row, int.from_bytes(tokens[end - _ID : end], "little", signed=True), end // _ID)
        self._rows.put(tokens, row, rows)
        return row

    def _after(self, row: _Row, token: int, written: int) -> _Row:
        """The row after one more token, its `written`-th new one."""
        if row.tail is not None and self.mark is not None:
            tail = self.mark.tail(row.tail, token)
            return self._begin(written) if tail is None else _Row(None, tail=tail)
        position = None if row.position is None else row.position.after(token)
        if position is None or self._finishing is None or self.room is None:
            return _Row(position)
        return _Row(position, self._finishing.follow(row.way, position, self.room - written))

    def _begin(self, written: int) -> _Row:
        """The row where the grammar begins, after `written` new tokens."""
        if self._finishing is None or self.room is None:
            return _Row(self.language.start)
        return _Row(self.language.start, self._finishing.waiting(self._way, self.room - written))

    def cut(self, tokens: Sequence[int], before: int) -> bool:
        """Whether a row's new tokens are not a complete text. `before` is the number of prompt tokens."""
        new = tokens[max(self.prompt_len - before, 0) :]
        return not self.accepts([token for token in (*self.written, *new) if token not in self.eos])

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Whether the text of these new tokens (EOS not among them) is a text of the grammar."""
        position = self._row(np.array(tokens, dtype=np.int64).tobytes()).position
        return position is not None and position.may_end

    def begins_with(self, tokens: Sequence[int]) -> bool:
        """Whether a text of the grammar may begin with these tokens."""
        row = self._row(np.array(tokens, dtype=np.int64).tobytes())
        return row.position is not None or row.tail is not None


class GrammarMark:
    """A text after which a grammar begins: `ids` are one special token, which has no text, or tokens that spell it.

    Tokens that extend past the mark are barred, so the grammar's text begins at a token boundary. When the budget runs
    low, the mark is forced in time for a text that fits.
    """

    def __init__(self, text: str, ids: Sequence[int], words: Spelling, eos: Sequence[int]) -> None:
        self.text, self.ids, self.words, self.eos = text.encode(), tuple(ids), words, eos
        self._special = len(ids) == 1 and not words.pieces[ids[0]]

    def tail(self, before: bytes, token: int) -> bytes | None:
        """The end of the text after one more token; None if it ends with the mark."""
        if self._special:
            return None if token == self.ids[0] else b""
        text = before + (self.words.pieces[token] if 0 <= token < len(self.words.pieces) else b"")
        return None if text.endswith(self.text) else text[-len(self.text) :]

    def allowed(self, tail: bytes, left: int | None) -> NDArray[np.bool_]:
        """bool [V], the ids that may follow `tail`; `left` is how many tokens may be spent on the mark."""
        pieces = self.words.pieces
        # how much of the mark is written, in bytes: several answers if a part of it repeats
        begun = [size for size in range(len(self.text) - 1, 0, -1) if tail.endswith(self.text[:size])]
        rest = self.ids
        if begun and not self._special:
            rest = self.words.fewest(self.text[begun[0] :], self.eos) or rest
        if left is not None and len(rest) <= left <= len(self.ids):
            allowed = np.zeros(len(pieces), dtype=bool)
            allowed[rest[0]] = True
            return allowed
        allowed = np.ones(len(pieces), dtype=bool)
        allowed[[token for token in self.eos if token < len(pieces)]] = False
        if not self._special:
            allowed[self._beyond] = False
            for size in begun:
                more = self.text[size:]
                allowed[[token for token in self.words.beginning(more) if len(pieces[token]) > len(more)]] = False
        return allowed

    @cached_property
    def _beyond(self) -> list[int]:
        """The tokens that contain the mark and more text after it."""
        pieces = enumerate(self.words.pieces)
        return [token for token, piece in pieces if self.text in piece and not piece.endswith(self.text)]


def _mark(context: ProcessorContext, words: Spelling) -> GrammarMark | None:
    """The mark of `grammar_after`; None without one, or if the prompt ends with it.

    Raises UsageError for a mark that the tokenizer cannot write.
    """
    text = context.generation.grammar_after
    if text is None:
        return None
    backend = context.tokenizer.backend_tokenizer
    token = backend.token_to_id(text)
    known = token is not None and token < len(words.pieces)
    ids = (token,) if known else words.fewest(text.encode(), context.eos)
    if not ids or set(ids) & set(context.eos):
        raise UsageError(f"grammar_after: this tokenizer cannot write {quote(text)}")
    prompt = [] if context.encoder_ids is None or context.is_encoder_decoder else context.encoder_ids[0].tolist()
    if backend.decode(prompt[-16:], skip_special_tokens=False).rstrip().endswith(text):
        return None
    return GrammarMark(text, ids, words, context.eos)


def constraint(context: ProcessorContext, value: object, knob: str) -> Processor | None:
    """The processor of `json_schema`, `regex` or `grammar`; None if the knob is not set.

    Raises UsageError as `Grammar` does, and for a mark that the tokenizer cannot write.
    """
    generation, start = context.generation, begins(context)
    source = read(generation, knob)
    if source is None:
        return None
    words = spelling(context.tokenizer, context.vocab_size, knob, begun=context.begun)
    mark, ahead = None, len((generation.prefix or "").encode())
    if generation.grammar_after is not None:
        mark, words, ahead = _mark(context, words), words.behind, 0
    # required words can keep a search from ending
    free = not (generation.force_words or generation.force_words_ids)
    room = context.max_length - start if free else None
    return Grammar(source, words, start, context.eos, room, ahead, context.written, mark)


json_schema = partial(constraint, knob="json_schema")
regex = partial(constraint, knob="regex")
lark = partial(constraint, knob="grammar")


def begins(context: ProcessorContext) -> int:
    """Where the text begins: after the prompt (before its last tokens, if they are part of the text) and after a forced
    first token (a language, for example).
    """
    forced = context.prompt_len == 1 and context.generation.forced_bos_token_id is not None
    return context.prompt_len + forced - len(context.written)
