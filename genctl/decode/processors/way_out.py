"""Short ways out of a grammar's text: tokens after which the text is whole.

llguidance names no states, so positions with the same following bytes count as alike. Greedy ways and a search in
breadth, both over bytes, give texts, which are written in the fewest tokens. What is found depends on the grammar, the
vocabulary and the text alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genctl.decode.processors.language import Language, Position, unpacked
from genctl.decode.processors.token_bytes import Spelling, llguidance_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Tokens = tuple[int, ...]

_FARTHEST = 4096  # tokens that one token can require
_TRIES, _FEW = 6_000, 300  # positions of a search; of one after greedy ways were found
_KINDS, _ALIKE = 8, 2  # kinds of positions of a level, and positions of a kind
_REPEATED = 128  # positions with the same following bytes on a greedy way
_SQUEEZED = 20_000  # bytes that are read to leave out parts of a text
_REPLACED = 20_000  # tokens that are tried in place of several
_CERTAIN = 4_000  # positions after which it stays uncertain whether a text is short enough
_ALPHABET = 1024  # pieces of a vocabulary that are searched at most
_FIRST = b'"}])>,:;=0123456789'  # bytes that are tried first
_LAST = b"[{(< \t\n\r\\" + bytes(range(0x80, 0x100))  # and last: they open something, or are no plain text
_ESCAPES = frozenset(b"\\") | frozenset(range(0x80, 0x100))
_FILL = (rb"[a-z]+", rb"[A-Z][a-z]*", rb"[0-9]+")  # what a text of a least length is filled with

_Kind = tuple[bytes, bytes, int]  # the masks before and after the last piece, and how many pieces are of `_LAST`


class _Node(NamedTuple):
    matcher: LLMatcher
    text: bytes  # since the beginning of the search
    last: int  # pieces of it that are of `_LAST`


class WaysOut:
    """Ways out of the texts of a language."""

    def __init__(self, language: Language) -> None:
        from llguidance import LLMatcher

        self.language = language
        body = language.source.lark.partition("\n")[2]
        self._pieces, self._orders = _alphabet(language.words, body)
        self._bytes = len(self._pieces)  # the place of byte 0: behind the alphabet are all bytes, to read a text with
        tokenizer = llguidance_tokenizer([*self._pieces, *(bytes([byte]) for byte in range(256))])
        self._start = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(language.source.lark), log_level=0)
        counts = re.findall(r'\{(\d{1,4})[,}]|"min(?:Length|Items|Properties)": (\d{1,4})', body)
        repeated = sum(int(one or other) for one, other in counts)
        spelled = len(language.words.memo["llguidance"].greedy_tokenize(body))
        self.reach = min(spelled + 4 * repeated, _FARTHEST)  # tokens that one token can require, about

    @cached_property
    def first(self) -> Tokens | None:
        """A short text."""
        return self.find(self.language.start, _FARTHEST)

    def find(self, position: Position, most: int) -> Tokens | None:
        """A way out, the shortest that was found; None if none was. More is tried if it has more than `most` tokens."""
        if position.may_end:
            return ()
        words, eos, first = self.language.words, self.language.eos, not position.started
        start = self._start.deep_copy()
        if not start.consume_tokens([self._bytes + byte for byte in position.text]):
            return None
        rests = {self._squeezed(start, rest) for rest in sorted(set(self._rests(start)), key=len)[:_KINDS]}
        spelled = (words.fewest(rest, eos, first=first) for rest in rests)
        ways = [way for way in spelled if way is not None and position.ends_with(way)]
        way = min(ways, key=lambda way: (len(way), way), default=None)
        return way if way is None or len(way) <= most else self._shortened(position, way)

    def _shortened(self, position: Position, way: Tokens) -> Tokens:
        """The way with one token in place of several, wherever that can be."""
        tries, here = _REPLACED, position
        for start in range(len(way)):
            following = here.continuing.tolist()
            for end in range(len(way), start + 1, -1):
                tries -= len(following)
                found = here.ended_by(following, way[end:]) if tries >= 0 else ()
                if found:
                    way = (*way[:start], found[0], *way[end:])
                    break
            after = here.after(way[start]) if start + 1 < len(way) else None
            if after is None:
                break
            here = after
        return way

    def shortest(self, most: int) -> tuple[Tokens | None, bool]:
        """A shortest text of at most `most` tokens, by trying all, and whether all were tried."""
        tries, level = _CERTAIN, {b"": (self.language.start, Tokens())}
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

    # -- over bytes ----------------------------------------------------------------------------------------------------

    def _rests(self, start: LLMatcher) -> list[bytes]:
        """Short texts to the end, greedy ones and a shortest one, as far as they are found."""
        level, seen = [_Node(start, b"", 0)], Counter[_Kind]()
        self._leads: dict[bytes, int | None] = {}
        found = [rest for order in self._orders if (rest := self._greedy(level[0], order)) is not None]
        leading: dict[bytes, list[int]] = {}  # mask -> the pieces that lead on from it, two to each mask
        tries, greedy = _FEW if found else _TRIES, _KINDS
        while level:
            kinds: dict[_Kind, list[_Node]] = {}
            for node in level:
                mask = node.matcher.compute_bitmask()
                leads: dict[bytes, list[int]] = {}
                for place in leading.get(mask) or np.flatnonzero(unpacked(mask)[: self._bytes]).tolist():
                    matcher, piece, tries = node.matcher.deep_copy(), self._pieces[place], tries - 1
                    if tries < 0:
                        return found
                    if not matcher.consume_token(place):
                        continue
                    if matcher.is_accepting():
                        return [*found, node.text + piece]
                    after, last = matcher.compute_bitmask(), node.last + (piece[0] in _LAST)
                    leads.setdefault(after, []).append(place)
                    kinds.setdefault((mask, after, last), []).append(_Node(matcher, node.text + piece, last))
                leading.setdefault(mask, [place for places in leads.values() for place in {places[0], places[-1]}])
            ordered = sorted(kinds, key=lambda kind: (kind[2], seen[kind]))[:_KINDS]
            for kind in ordered:
                if not seen[kind] and greedy > 0:
                    rest, greedy = self._greedy(kinds[kind][0], self._orders[0]), greedy - 1
                    found += [] if rest is None else [rest]
            seen.update(ordered)
            level = [node for kind in ordered for node in kinds[kind][:_ALIKE]]
        return found

    def _greedy(self, node: _Node, fill: NDArray[np.intp]) -> bytes | None:
        """The text to the end with a piece that leads on at each place, else the first of `fill`; None where that
        repeats itself.
        """
        matcher, text, seen = node.matcher.deep_copy(), node.text, Counter[bytes]()
        while not matcher.is_accepting():
            mask = matcher.compute_bitmask()
            seen[mask] += 1
            allowed = unpacked(mask)
            if mask not in self._leads:
                places = np.flatnonzero(allowed[: self._bytes]).tolist()
                self._leads[mask] = next((place for place in places if self._leads_on(matcher, mask, place)), None)
            place = self._leads[mask]
            if place is None:
                place = int(fill[allowed[fill].argmax()])
            if seen[mask] > _REPEATED or not matcher.consume_token(place):
                return None
            text += self._pieces[place]
        return text

    def _leads_on(self, matcher: LLMatcher, mask: bytes, place: int) -> bool:
        after = matcher.deep_copy()
        after.consume_token(place)
        return self._pieces[place][0] not in _ESCAPES and (after.is_accepting() or after.compute_bitmask() != mask)

    def _squeezed(self, start: LLMatcher, rest: bytes) -> bytes:
        """The rest without the parts that it can do without."""
        here, tries, begin = start.deep_copy(), _SQUEEZED, 0
        codes = [*(self._bytes + byte for byte in rest), self._bytes + 256]
        while begin < len(codes) - 1:
            for end in range(min(len(codes) - 1, begin + 64), begin, -1) if tries > 0 else ():
                right = here.validate_tokens(codes[end:])
                tries -= 1 + right
                if right == len(codes) - end:
                    del codes[begin:end]
                    break
            else:
                here.consume_token(codes[begin])
                begin += 1
        return bytes(code - self._bytes for code in codes[:-1])


def _alphabet(words: Spelling, source: str) -> tuple[list[bytes], list[NDArray[np.intp]]]:
    """The pieces that are not made of shorter ones, required keys and a long piece of each fill; their orders."""
    pieces = sorted({piece for piece in (*words.pieces, *words.first.values()) if piece}, key=lambda p: (len(p), p))
    single = {piece[0] for piece in pieces if len(piece) == 1}
    chosen = [piece for piece in pieces if len(piece) == 1 or not single.issuperset(piece)][:_ALPHABET]
    chosen.sort(key=lambda p: (_LAST.find(p[:1]), _FIRST.find(p[:1]) % (len(_FIRST) + 1), p))
    required = [key for keys in re.findall(r'"required": (\[[^\]]*\])', source) for key in json.loads(keys)]
    keys = [f"{json.dumps(key, ensure_ascii=False)}:".encode() for key in required]
    fills = [[piece for piece in pieces if len(piece) <= 16 and re.fullmatch(fill, piece)] for fill in _FILL]
    chosen = list(dict.fromkeys([*keys, *chosen, *(fill[-1] for fill in fills if fill)]))
    places = {piece: place for place, piece in enumerate(chosen)}
    orders = [[places[piece] for piece in dict.fromkeys([*reversed(fill), *chosen]) if piece in places] for fill in fills]
    return chosen, [np.array(order) for order in orders]
