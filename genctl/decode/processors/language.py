"""A grammar compiled for a vocabulary, and the positions that its texts can reach, one token at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from genctl.decode.processors.grammar_source import GrammarSource
from genctl.decode.processors.token_bytes import Spelling, llguidance_tokenizer
from genctl.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher

_COMPILED = 8  # compiled grammars in the cache of one tokenizer


class Language:
    """The texts of a grammar, in tokens. `start` is the position before the first token.

    llguidance's ids: the V of the vocabulary, then the tokens with other bytes at the beginning of a text, then an end.
    """

    def __init__(self, source: GrammarSource, words: Spelling, eos: Sequence[int]) -> None:
        self.source, self.words, self.eos = source, words, tuple(eos)
        self.at_first = {token: len(words.pieces) + n for n, token in enumerate(words.first)}
        self.memo: dict[str, Any] = {}  # cached values that live as long as the language
        self.end = len(words.pieces) + len(words.first)
        if "llguidance" not in words.memo:
            words.memo["llguidance"] = llguidance_tokenizer([*words.pieces, *words.first.values()])
        self.start = GrammarPosition(self, source.matcher(words.memo["llguidance"]), b"", started=False)
        if not len(self.start.following):
            reason = "it has no text that this tokenizer can write"
            if self.start.may_end:
                reason = "its only text is the empty one, and there is no EOS id"
            raise UsageError(f"{source.knob}: {reason}")


def language(source: GrammarSource, words: Spelling, eos: Sequence[int]) -> Language:
    """The language of a grammar; compiled once for all prompts. Raises UsageError if the tokenizer cannot write it."""
    known: dict[tuple[str, tuple[int, ...]], Language] = words.memo.setdefault("languages", {})
    key = source.lark, tuple(eos)
    if key not in known:
        if len(known) == _COMPILED:
            del known[next(iter(known))]
        known[key] = Language(source, words, eos)
    return known[key]


class GrammarPosition:
    """A position in the texts of a language. It is immutable: a longer text has another position.

    `text` holds the bytes before it; `started` is whether any token is before it.
    """

    def __init__(self, language: Language, matcher: LLMatcher, text: bytes, *, started: bool = True) -> None:
        self.language, self.matcher, self.text, self.started = language, matcher, text, started

    @cached_property
    def may_end(self) -> bool:
        """Whether the text is complete."""
        return self.matcher.is_accepting()

    @cached_property
    def bits(self) -> bytes:
        """The ids that may follow, one bit each. EOS ids are allowed where the text may end, or may end with them.

        Raises UsageError if llguidance gives up. An empty mask is no error here: the decode loop reports it.
        """
        language, words = self.language, self.language.words
        bits = bytearray(self.matcher.compute_bitmask())
        if self.matcher.is_error():
            why = (self.matcher.get_error().strip().splitlines() or [self.matcher.stop_reason()])[0]
            if why not in ("NoExtension", "NoExtensionBias"):
                raise UsageError(f"{language.source.knob}: the grammar is too complex: {why}")
        if not self.started:
            any_text = bool(unpacked(bits)[: len(words.pieces)].any())
            for token, id in language.at_first.items():
                # a blank that is stripped at the beginning does not advance the grammar
                _put(bits, token, _bit(bits, id) if words.first[token] else any_text)
        for token in language.eos:
            if token < len(words.pieces):
                if not self._piece(token):
                    _put(bits, token, self.may_end)
                elif _bit(bits, token):
                    _put(bits, token, self._moved(token).may_end)
        return bytes(bits)

    @property
    def following(self) -> NDArray[np.intp]:
        """The ids that may follow, ascending."""
        return np.flatnonzero(unpacked(self.bits)[: len(self.language.words.pieces)])

    @property
    def continuing(self) -> NDArray[np.intp]:
        """The ids that may follow, without EOS ids."""
        ids = self.following
        return ids[~np.isin(ids, self.language.eos)]

    def after(self, token: int) -> GrammarPosition | None:
        """The position after one more token; None if it is an EOS id or not allowed here."""
        if token in self.language.eos or not 0 <= token < len(self.language.words.pieces) or not _bit(self.bits, token):
            return None
        return self._moved(token)

    def _moved(self, token: int) -> GrammarPosition:
        matcher, piece = self.matcher.deep_copy(), self._piece(token)
        if piece:
            matcher.consume_token(self._known(token))
        return GrammarPosition(self.language, matcher, self.text + piece)

    def ended_by(self, tokens: Iterable[int], rest: Sequence[int]) -> list[int]:
        """The ones of `tokens` after which `rest` completes the text."""
        tail, validate = [*rest, self.language.end], self.matcher.validate_tokens
        if self.started:
            whole = len(tail) + 1
            return [token for token in tokens if validate([token, *tail]) == whole]
        ways = ((token, [self._known(token), *tail] if self._piece(token) else tail) for token in tokens)
        return [token for token, way in ways if validate(way) == len(way)]

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether the text is complete after these tokens."""
        return bool(self.ended_by(tokens[:1], tokens[1:])) if tokens else self.may_end

    def _piece(self, token: int) -> bytes:
        return self.language.words.pieces[token] if self.started else self.language.words.at_first(token)

    def _known(self, token: int) -> int:
        return token if self.started else self.language.at_first.get(token, token)


def unpacked(bits: bytes | bytearray) -> NDArray[np.bool_]:
    """One bool for each bit."""
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little").view(bool)


def _bit(bits: bytes | bytearray, place: int) -> bool:
    return bool(bits[place // 8] >> place % 8 & 1)


def _put(bits: bytearray, place: int, on: bool) -> None:
    mask = 1 << place % 8
    bits[place // 8] = bits[place // 8] | mask if on else bits[place // 8] & ~mask
