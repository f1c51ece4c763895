"""Short ways out of a grammar's text: tokens after which the text is whole.

llguidance names no states, so positions with the same following bytes count as alike. A search in breadth over bytes
gives a text, which is written in the fewest tokens. What is found depends on the grammar, the vocabulary and the text.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from genctl.decode.processors.language import Language, Position, unpacked
from genctl.decode.processors.token_bytes import Spelling, llguidance_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Tokens = tuple[int, ...]

_LONGEST = 4096  # bytes of a way out, and tokens that one token can require
_TRIES = 12_000  # positions of a search over bytes
_KINDS, _ALIKE = 8, 2  # kinds of positions of a level, and positions of a kind
_ALPHABET = 1024  # pieces of a vocabulary that are searched at most
_FIRST = b'"}])>0123456789'  # bytes that are tried first
_ODD = frozenset(b"[{(<\\ \t\n\r") | frozenset(range(0x80, 0x100))  # taken where nothing else leads on
_EXACT = 4_000  # texts that are tried to shorten a way out
_CERTAIN = 20_000  # texts that are tried before it is certain that none is short enough


class _Node(NamedTuple):
    matcher: LLMatcher
    text: bytes  # since the beginning of the search
    odd: int  # pieces of it that open something, or are no plain text


class WaysOut:
    """Ways out of the texts of a language."""

    def __init__(self, language: Language) -> None:
        from llguidance import LLMatcher

        self.language = language
        self._pieces = _alphabet(language.words)
        self._read = len(self._pieces)  # the place of byte 0: behind the alphabet all bytes can be read
        tokenizer = llguidance_tokenizer([*self._pieces, *(bytes([byte]) for byte in range(256))])
        lark = language.source.lark
        self._start = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
        body = lark.partition("\n")[2]
        counts = re.findall(r'\{(\d{1,4})[,}]|"min(?:Length|Items|Properties)": (\d{1,4})', body)
        repeated = sum(int(one or other) for one, other in counts)
        spelled = len(language.words.memo["llguidance"].greedy_tokenize(body))
        self.reach = min(spelled + 4 * repeated, _LONGEST)  # tokens that one token can require, about

    @cached_property
    def first(self) -> Tokens | None:
        """A way out from the beginning: a short text."""
        return self.find(self.language.start, _LONGEST)

    def find(self, position: Position, most: int) -> Tokens | None:
        """A way out, the shortest that was found; None if none was. More is tried if it has more than `most` tokens."""
        if position.may_end:
            return ()
        way = None
        rest = self._rest(position.text)
        if rest is not None:
            way = self.language.words.fewest(rest, self.language.eos, first=not position.started)
        if way is not None and not position.ends_with(way):
            way = None
        if way is None or len(way) > most:
            return self._shortened(position, way, most) or self.shortest(position, most, _EXACT)[0] or way
        return way

    def shortest(self, position: Position, most: int, tries: int = _CERTAIN) -> tuple[Tokens | None, bool]:
        """A shortest way out of at most `most` tokens, by trying all, and whether all were tried."""
        level: dict[bytes, tuple[Position, Tokens]] = {position.text: (position, ())}
        for left in range(most, 0, -1):
            longer: dict[bytes, tuple[Position, Tokens]] = {}
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

    def _shortened(self, position: Position, way: Tokens | None, most: int) -> Tokens | None:
        """The way with one token in place of several, if that makes it short enough."""
        here, tries = position, _EXACT
        for start in range(len(way or ())):
            assert way is not None
            following = here.continuing.tolist()
            for end in range(len(way), len(way) - most + start, -1):
                tries -= len(following)
                if tries < 0:
                    break
                if found := here.ended_by(following, way[end:]):
                    return (*way[:start], found[0], *way[end:])
            after = here.after(way[start])
            assert after is not None
            here = after
        return None

    def _rest(self, text: bytes) -> bytes | None:
        """The fewest bytes, as far as a search finds, that make a text whole."""
        start = self._start.deep_copy()
        if not start.consume_tokens([self._read + byte for byte in text]):
            return None
        level, seen, tries = [_Node(start, b"", 0)], Counter[bytes](), _TRIES
        leading: dict[bytes, list[int]] = {}  # mask -> the pieces that lead on from it, one to each kind of position
        while level:
            kinds: dict[bytes, list[_Node]] = {}
            for node in level:
                mask = node.matcher.compute_bitmask()
                kind: dict[bytes, int] = {}
                for place in leading.get(mask) or self._following(mask):
                    matcher = node.matcher.deep_copy()
                    matcher.consume_token(place)
                    piece, tries = self._pieces[place], tries - 1
                    if matcher.is_accepting():
                        return node.text + piece
                    if tries < 0:
                        return None
                    after = matcher.compute_bitmask()
                    kind.setdefault(after, place)
                    kinds.setdefault(after, []).append(_Node(matcher, node.text + piece, node.odd + (piece[0] in _ODD)))
                leading.setdefault(mask, list(kind.values()))
            for nodes in kinds.values():
                nodes.sort(key=lambda node: node.odd)
            ordered = sorted(kinds, key=lambda mask: (kinds[mask][0].odd, seen[mask]))[:_KINDS]
            seen.update(ordered)
            level = [node for mask in ordered for node in kinds[mask][:_ALIKE]]
        return None

    def _following(self, mask: bytes) -> list[int]:
        return np.flatnonzero(unpacked(mask)[: self._read]).tolist()


def _alphabet(words: Spelling) -> list[bytes]:
    """The pieces that are not made of shorter ones, those that are tried first at the beginning."""
    pieces = {piece for piece in (*words.pieces, *words.first.values()) if piece}
    single = {piece[0] for piece in pieces if len(piece) == 1}
    needed = [piece for piece in pieces if len(piece) == 1 or not single.issuperset(piece)]
    needed = sorted(needed, key=lambda piece: (len(piece), piece))[:_ALPHABET]
    return sorted(needed, key=lambda piece: (piece[0] in _ODD, _FIRST.find(piece[:1]) % (len(_FIRST) + 1), piece))
