"""A grammar as a logits processor: tokens that violate it get a score of minus infinity.

A row's tokens decide its state, so rows may be reordered, forked and rolled back. States are kept by the row's tokens:
a row that continues moves its parent's matcher one token further, one that forks copies it, one that was rolled back
rewinds it. If a state was dropped, the row is read again from its beginning.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from genctl.decode.processors import Processor
from genctl.decode.processors.build import ProcessorContext
from genctl.decode.processors.closing_search import ClosingSearch, Tokens
from genctl.decode.processors.closing_witness import reach
from genctl.decode.processors.grammar_completion import Closing
from genctl.decode.processors.grammar_source import GrammarSource, read
from genctl.decode.processors.token_bytes import Spelling, llguidance_tokenizer, spelling
from genctl.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_WIDTH = 8  # bytes of a token in a key
_KEPT = 128  # states kept at least
_COMPILED = 8  # grammars kept compiled for one tokenizer


@dataclass
class _State:
    """The state of a row in the grammar. `allowed`, one bit for each id, is computed on demand."""

    matcher: LLMatcher
    started: bool = True  # whether text was written
    allowed: bytes | None = None


class Grammar:
    """history int64 [R, T], scores f32 [R, V] -> scores with everything outside the grammar at -inf.

    The text of all new tokens must be a text of the grammar: special tokens are barred, and an EOS id is allowed where
    the text may end. An EOS id that has text of its own is allowed where the text may end with it. The scores of a row
    that has left the grammar (a draft) are not changed.

    With `room`, the most new tokens, a text that fits is never cut: near the end of the budget tokens after which the
    text could not be closed in time are barred too (see `grammar_completion`), once the row has the `ahead` bytes of
    a required prefix.

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
        self._written = tuple(written)  # tokens of the prompt behind `prompt_len`
        self._extra = {token: len(words.pieces) + n for n, token in enumerate(words.first)}
        self._root = _State(_compiled(words, source).deep_copy(), started=False)
        self._live: OrderedDict[bytes, _State | None] = OrderedDict()  # by new tokens; None has left the grammar
        self._moved: OrderedDict[bytes, bytes] = OrderedDict()  # a row whose matcher was moved -> the row that has it
        roots: OrderedDict[Any, bytes] = words.memo.setdefault("roots", OrderedDict())  # the same for every prompt
        bits = roots.get((source.lark, self.eos)) or self._allowed(self._root)
        self._root.allowed = roots[source.lark, self.eos] = bits
        while len(roots) > _COMPILED:
            roots.popitem(last=False)
        if not any(_bit(bits, token) for token in range(len(words.pieces))):
            reason = "it has no text that this tokenizer can write"
            if self._root.matcher.is_accepting():
                reason = "its only text is the empty one, and there is no EOS id"
            raise UsageError(f"{source.knob}: {reason}")
        self._room, self._ahead = room, ahead
        self._closing: Closing | None = None
        self._closings: OrderedDict[bytes, Tokens | None] = OrderedDict()  # by new tokens
        if room is not None and any(self._silent(token) for token in self.eos):
            self._closing = Closing(words, self._extra, self.eos, _search(words, source, self.eos))
            self._reach = reach(source.lark)
            self._first = self._first_closing(self._closing, room)
            # reserve room for an EOS id, if there is any
            self._end = int(self._first is not None and len(self._first) < room)

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        if history.shape[1] < self.prompt_len:  # tokens that were forced before any text
            return scores
        rows = history[:, self.prompt_len :].to("cpu", torch.int64).contiguous()
        keys = [row.numpy().tobytes() for row in rows]
        forks = Counter(key[:-_WIDTH] for key in set(keys) if key and key not in self._live)
        states = ((key, self._state(key, forks)) for key in keys)
        packed = [self._in_time(key, state, self._bits(state)) for key, state in states]
        barred = self._barred(packed, scores)
        if self._closing is not None:
            self._relax(keys, packed, barred, scores)
        self._forget(4 * len(keys))
        return scores.masked_fill(barred.to(scores.device), -torch.inf)

    def _barred(self, packed: list[bytes], scores: Tensor) -> Tensor:
        """bool [R, V] from rows of bits of allowed tokens."""
        # torch has no unpackbits, and shifts are slow
        bits = numpy.frombuffer(b"".join(packed), dtype=numpy.uint8).reshape(len(packed), -1)
        barred = torch.from_numpy(numpy.unpackbits(bits, axis=1, bitorder="little") == 0)[:, : scores.shape[1]]
        if barred.shape[1] < scores.shape[1]:
            barred = torch.nn.functional.pad(barred, (0, scores.shape[1] - barred.shape[1]), value=True)
        return barred

    def cut(self, tokens: Sequence[int], before: int) -> bool:
        """Whether a row's new tokens are only the beginning of a text. `before`: tokens of the prompt."""
        new = tokens[max(self.prompt_len - before, 0) :]
        return not self.accepts([token for token in (*self._written, *new) if token not in self.eos])

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Whether the text of these new tokens (EOS not among them) is a text of the grammar."""
        state = self._state_of(tokens)
        return state is not None and state.matcher.is_accepting()

    def begins_with(self, tokens: Sequence[int]) -> bool:
        """Whether a text of the grammar may begin with these tokens."""
        return self._state_of(tokens) is not None

    @property
    def first(self) -> Tokens | None:
        """A shortest text, as far as one is known."""
        return self._first if self._closing is not None else None

    # -- states --------------------------------------------------------------------------------------------------------

    def _state_of(self, tokens: Sequence[int]) -> _State | None:
        key = torch.tensor(list(tokens), dtype=torch.int64).numpy().tobytes()
        return self._state(key, Counter([key[:-_WIDTH]] * 2))

    def _state(self, key: bytes, forks: Counter[bytes]) -> _State | None:
        if not key:
            return self._root
        if key in self._live:
            self._live.move_to_end(key)
            return self._live[key]
        state = self._rolled_back(key)
        if state is None:
            state = self._after(key, forks)
        self._live[key] = state
        return state

    def _after(self, key: bytes, forks: Counter[bytes]) -> _State | None:
        """The state of a row from its parent's. `forks` counts the rows that still need the parent."""
        parent, token = key[:-_WIDTH], int.from_bytes(key[-_WIDTH:], "little", signed=True)
        forks[parent] -= 1
        is_live = parent in self._live
        above = self._live[parent] if is_live else self._rolled_back(parent) or self._replayed(parent)
        if above is None or token in self.eos or not _bit(self._bits(above), token):
            return None
        matcher = above.matcher
        if above is self._root or (is_live and forks[parent] > 0):
            matcher = matcher.deep_copy()
        elif is_live:
            del self._live[parent]
            self._moved[parent] = key
        elif forks[parent] > 0:  # keep the new state: its other children need it
            self._live[parent] = above
            matcher = matcher.deep_copy()
        else:
            self._moved[parent] = key
        return self._advanced(matcher, token, above.started)

    def _advanced(self, matcher: LLMatcher, token: int, started: bool) -> _State:
        known = token if started else self._extra.get(token, token)
        if started or self.words.at_first(token):
            matcher.consume_token(known)
        self._check(matcher)
        return _State(matcher)

    def _rolled_back(self, key: bytes) -> _State | None:
        """The state of a row, by rolling back a continuation of it that is no longer needed."""
        at, steps = key, 0
        while at in self._moved:
            at, steps = self._moved[at], steps + 1
            later = self._live.get(at)
            if later is not None:
                del self._live[at]
                return _State(later.matcher) if later.matcher.rollback(steps) else None
        return None

    def _replayed(self, key: bytes) -> _State | None:
        """The state of a row from its first token on."""
        state = self._root
        for at in range(0, len(key), _WIDTH):
            token = int.from_bytes(key[at : at + _WIDTH], "little", signed=True)
            if token in self.eos or not _bit(self._bits(state), token):
                return None
            matcher = state.matcher.deep_copy() if state is self._root else state.matcher
            state = self._advanced(matcher, token, state.started)
        return state

    def _forget(self, needed: int) -> None:
        for states in (self._live, self._moved, self._closings):
            while len(states) > max(_KEPT, needed):
                states.popitem(last=False)

    # -- the budget ----------------------------------------------------------------------------------------------------

    def _silent(self, token: int) -> bool:
        """Whether an EOS id has no text of its own."""
        words = self.words
        return token < len(words.pieces) and not words.pieces[token] and not words.at_first(token)

    def _first_closing(self, closing: Closing, room: int) -> Tokens | None:
        """The shortest text found. Raises UsageError if it is certain that none fits."""
        known: OrderedDict[Any, Tokens | None] = self.words.memo.setdefault("closings", OrderedDict())
        matcher, key = self._root.matcher, (self.source.lark, self.eos)
        if key not in known:
            known[key] = closing.find(b"", False)
            while len(known) > _COMPILED:
                known.popitem(last=False)
        shortest = known[key]
        if shortest is None or len(shortest) > room:
            shortest = known[key] = closing.improve(b"", False, shortest, room) or shortest
        if shortest is not None and len(shortest) <= room:
            return shortest
        allowed = [token for token in range(len(self.words.pieces)) if _bit(self._root.allowed or b"", token)]
        short, certain = closing.shortest(matcher, False, allowed, room)
        if short is None and certain:
            known_one = "" if shortest is None else f" (the shortest that was found takes {len(shortest)})"
            count = f"{room} token{'s' * (room > 1)}"
            raise UsageError(
                f"{self.source.knob}: no text of it fits in {count}, which is all that may be written{known_one}"
            )
        return short or shortest

    def _in_time(self, key: bytes, state: _State | None, bits: bytes) -> bytes:
        """The allowed tokens after which the text can still be closed within the budget."""
        if self._closing is None or self._room is None or state is None:
            return bits
        left = self._room - len(key) // _WIDTH
        if left < 1 or (self._ahead and len(self._read(key)) < self._ahead):
            return bits
        closing = self._closing_of(key, state)
        if closing is None or len(closing) > left:
            return bits  # no closing is known that fits: bar nothing
        end = min(self._end, left - len(closing))
        slack = left - end - len(closing)
        if slack > self._reach:
            return bits
        in_time = self._closing.leaves_room(
            state.matcher, self._read(key) if key else None, bits, closing, left - 1 - end, slack
        )
        if in_time.sum() == sum(byte.bit_count() for byte in bits):
            return bits
        packed = numpy.packbits(in_time, bitorder="little").tobytes()
        return packed.ljust(len(bits), b"\0")

    def _relax(self, keys: list[bytes], packed: list[bytes], barred: Tensor, scores: Tensor) -> None:
        """If other processors barred all tokens that would close a text in time, ignore the budget."""
        for row, key in enumerate(keys):
            bits = self._bits(self._root if not key else self._live.get(key))
            if packed[row] is not bits and not bool((scores[row] > -torch.inf)[~barred[row]].any()):
                barred[row] = self._barred([bits], scores[row : row + 1])[0]

    def _closing_of(self, key: bytes, state: _State) -> Tokens | None:
        if not key:
            return self._first
        if key not in self._closings:
            assert self._closing is not None
            parent = key[:-_WIDTH]
            if parent and parent not in self._closings:
                self._retrace(parent)
            before = self._closings[parent] if parent else self._first
            self._closings[key] = self._closing.after(state.matcher, before, partial(self._read, key))
        self._closings.move_to_end(key)
        return self._closings[key]

    def _retrace(self, key: bytes) -> None:
        """The closing of a forgotten row, which depends on all its tokens."""
        assert self._closing is not None
        matcher, closing, started = self._root.matcher.deep_copy(), self._first, False
        for place, token in enumerate(_tokens(key), 1):
            self._advanced(matcher, token, started)
            read = partial(self._read, key[: place * _WIDTH])
            closing = self._closing.after(matcher, closing, read)
            started = True
        self._closings[key] = closing

    def _read(self, key: bytes) -> bytes:
        """The text of a row."""
        pieces, tokens = self.words.pieces, _tokens(key)
        if not tokens:
            return b""
        return self.words.at_first(tokens[0]) + b"".join(pieces[token] for token in tokens[1:])

    # -- what may follow -----------------------------------------------------------------------------------------------

    def _bits(self, state: _State | None) -> bytes:
        if state is None:
            return b"\xff" * (4 * _words(self._size))
        if state.allowed is None:
            state.allowed = self._allowed(state)
        return state.allowed

    @property
    def _size(self) -> int:
        return len(self.words.pieces) + len(self.words.first) + 1

    def _allowed(self, state: _State) -> bytes:
        matcher = state.matcher
        bits = bytearray(matcher.compute_bitmask())
        self._check(matcher)
        if not state.started:
            text = any(_bit(bits, token) for token in range(len(self.words.pieces)))
            for token, extra in self._extra.items():
                # a blank that is stripped at the beginning does not advance the grammar
                _put(bits, token, _bit(bits, extra) if self.words.first[token] else text)
        over = matcher.is_accepting()
        for token in self.eos:
            if token >= len(self.words.pieces):
                continue
            if not self.words.at_first(token) and not self.words.pieces[token]:
                _put(bits, token, over)
            elif _bit(bits, token):
                _put(bits, token, self._advanced(matcher.deep_copy(), token, state.started).matcher.is_accepting())
        return bytes(bits)

    def _check(self, matcher: LLMatcher) -> None:
        # a row that can neither continue nor end has no token left: the loop reports it, or the beam drops it
        if matcher.is_error() and _why(matcher) not in ("NoExtension", "NoExtensionBias"):
            raise UsageError(f"{self.source.knob}: the grammar is too complex: {_why(matcher)}")


def grammar_of(processors: Sequence[Any]) -> Any:
    """The `Grammar` or `GrammarAfter` among a lane's processors; None if there is none."""
    functions = (getattr(processor, "function", None) for processor in processors)
    return next((function for function in functions if hasattr(function, "begins_with")), None)


def json_schema(context: ProcessorContext, value: object) -> Processor | None:
    return constraint(context, "json_schema")


def regex(context: ProcessorContext, value: object) -> Processor | None:
    return constraint(context, "regex")


def lark(context: ProcessorContext, value: object) -> Processor | None:
    return constraint(context, "grammar")


def constraint(context: ProcessorContext, knob: str) -> Processor | None:
    """The processor of `json_schema`, `regex` or `grammar`; None if the knob is not set."""
    source = read(context.generation, knob)
    if source is None:
        return None
    words = spelling(context.tokenizer, context.vocab_size, knob, begun=context.begun)
    generation, start = context.generation, begins(context)
    # required words may keep a search from ending
    free = not (generation.force_words or generation.force_words_ids)
    ahead = len((generation.prefix or "").encode())
    room = context.max_length - start if free else None
    if generation.grammar_after is None:
        return Grammar(source, words, start, context.eos, room, ahead, context.written)
    from genctl.decode.processors.grammar_after import after_mark

    behind = words.behind if words.first else words

    def make(after: int, left: int | None) -> Grammar:
        """The grammar after some new tokens: its text is behind other text."""
        return Grammar(source, behind, start + after, context.eos, left)

    return after_mark(context, words, start, room, make)


def begins(context: ProcessorContext) -> int:
    """Where the text begins: after the prompt, unless its last tokens are of the text, and after a forced first token
    (a language, for example).
    """
    forced = context.prompt_len == 1 and context.generation.forced_bos_token_id is not None
    return context.prompt_len + forced - len(context.written)


def _compiled(words: Spelling, source: GrammarSource) -> LLMatcher:
    from llguidance import LLMatcher

    grammars: OrderedDict[str, LLMatcher] = words.memo.setdefault("grammars", OrderedDict())
    if source.lark not in grammars:
        matcher = LLMatcher(_tokenizer(words), LLMatcher.grammar_from_lark(source.lark), log_level=0)
        if matcher.is_error():
            raise UsageError(f"{source.knob}: {_why(matcher)}")
        grammars[source.lark] = matcher
        while len(grammars) > _COMPILED:
            grammars.popitem(last=False)
    grammars.move_to_end(source.lark)
    return grammars[source.lark]


def _search(words: Spelling, source: GrammarSource, eos: Sequence[int]) -> ClosingSearch:
    searches: OrderedDict[Any, ClosingSearch] = words.memo.setdefault("searches", OrderedDict())
    key = source.lark, tuple(eos)
    if key not in searches:
        searches[key] = ClosingSearch(words, source.lark, eos)
        while len(searches) > _COMPILED:
            searches.popitem(last=False)
    searches.move_to_end(key)
    return searches[key]


def _tokenizer(words: Spelling) -> LLTokenizer:
    """V ids, then those that read differently at the beginning, then an end."""
    if "llguidance" not in words.memo:
        words.memo["llguidance"] = llguidance_tokenizer([*words.pieces, *words.first.values()])
    tokenizer: LLTokenizer = words.memo["llguidance"]
    return tokenizer


def _tokens(key: bytes) -> list[int]:
    return [int.from_bytes(key[at : at + _WIDTH], "little", signed=True) for at in range(0, len(key), _WIDTH)]


def _bit(bits: bytes | bytearray, place: int) -> bool:
    return 0 <= place < 8 * len(bits) and bool(bits[place // 8] >> (place % 8) & 1)


def _put(bits: bytearray, place: int, on: bool) -> None:
    if on:
        bits[place // 8] |= 1 << (place % 8)
    else:
        bits[place // 8] &= ~(1 << (place % 8))


def _words(size: int) -> int:
    return (size + 31) // 32


def _why(matcher: LLMatcher) -> str:
    return (matcher.get_error().strip().splitlines() or [matcher.stop_reason()])[0]
