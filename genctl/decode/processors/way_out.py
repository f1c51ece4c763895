"""Short ways out of a grammar's text: tokens after which the text is whole.

llguidance names no states, so positions with the same following bytes count as alike. A search in breadth over bytes
gives a text, which is written in the fewest tokens. What is found depends on the grammar, the vocabulary and the text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from genctl.decode.processors.language import Language, Position, unpacked
from genctl.decode.processors.token_bytes import Spelling, llguidance_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Tokens = tuple[int, ...]

_LONGEST = 4096  # bytes of a way out, and tokens that one token can require
_TRIES = 6_000  # positions of a search over bytes
_KINDS, _ALIKE = 8, 2  # kinds of positions of a level, and positions of a kind
_ALPHABET = 1024  # pieces of a vocabulary that are searched at most
_FIRST = b'"}])>,:;=0123456789'  # bytes that are tried first
_SORTS = (rb"[a-z]+", rb" [a-z]+", rb"[A-Z][a-z]*", rb"[A-Z]+", rb"[0-9]+")
_LAST = b"[{(< \t\n\r\\" + bytes(range(0x80, 0x100))  # and last: they open something, or are no plain text
_FEW = 300  # positions of a search that has found something
_REPEATED = 128
_SQUEEZED = 20_000
_EXACT = 500  # positions that are tried to shorten a way out
_CERTAIN = 4_000  # positions that are tried before it is certain that none is short enough


_Kind = tuple[bytes, bytes, int]  # the masks before and after the last piece, and how many are odd


class _Node(NamedTuple):
    matcher: LLMatcher
    text: bytes  # since the beginning of the search
    odd: int  # pieces of it that open something, or are no plain text


class WaysOut:
    """Ways out of the texts of a language."""

    def __init__(self, language: Language) -> None:
        from llguidance import LLMatcher

        self.language = language
        self._pieces, self._orders = _alphabet(language.words, language.source.lark)
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
        words, eos = self.language.words, self.language.eos
        spelled = partial(words.fewest, barred=eos, first=not position.started)
        best = sorted(filter(None, map(spelled, set(self._rests(position.text)))), key=lambda way: (len(way), way))[:3]
        squeezed = (self._squeezed(position.text, self._text(position, way)) for way in best)
        ways = [way for rest in squeezed if (way := spelled(rest)) is not None and position.ends_with(way)]
        way = min(ways, key=lambda way: (len(way), way), default=None)
        if way is not None and len(way) > most:
            way = self._shortened(position, way)
        if way is None or len(way) > most:
            return self.shortest(position, most, _EXACT)[0] or way
        return way

    def shortest(self, position: Position, most: int, tries: int = _CERTAIN) -> tuple[Tokens | None, bool]:
        """A shortest way out of at most `most` tokens, by trying all, and whether all were tried."""
        level: dict[bytes, tuple[Position, Tokens]] = {position.text: (position, ())}
        for left in range(most, 0, -1):
            longer: dict[bytes, tuple[Position, Tokens]] = {}
            for here, way in level.values():
                following = here.continuing.tolist()
                if ends := here.ended_by(following[: 16 * tries], ()):
                    return (*way, ends[0]), True
                tries -= len(following) if left > 1 else len(following) // 16
                if tries < 0:
                    return None, False
                for token in following if left > 1 else ():
                    after = here.after(token)
                    if after is not None:
                        longer.setdefault(after.text, (after, (*way, token)))
            level = longer
        return None, True

    def _text(self, position: Position, way: Tokens) -> bytes:
        words = self.language.words
        pieces = [
            words.pieces[token] if place or position.started else words.at_first(token)
            for place, token in enumerate(way)
        ]
        return b"".join(pieces)

    def _shortened(self, position: Position, way: Tokens) -> Tokens:
        """The way with one token in place of several, wherever that can be."""
        here, tries = position, 40 * _EXACT
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

    def _rests(self, text: bytes) -> list[bytes]:
        """Short texts that make a text whole: greedy ones, and those of a search in breadth over bytes."""
        start = self._start.deep_copy()
        if not start.consume_tokens([self._read + byte for byte in text]):
            return []
        level, seen = [_Node(start, b"", 0)], Counter[_Kind]()
        found = [rest for order in self._orders if (rest := self._greedy(level[0], order)) is not None]
        leading: dict[bytes, list[int]] = {}  # mask -> the pieces that lead on from it, two to each mask
        tries, ways = _FEW if found else _TRIES, _KINDS
        while level:
            kinds: dict[_Kind, list[_Node]] = {}
            for node in level:
                mask = node.matcher.compute_bitmask()
                leads: dict[bytes, list[int]] = {}
                for place in leading.get(mask) or self._following(mask):
                    matcher, piece, tries = node.matcher.deep_copy(), self._pieces[place], tries - 1
                    if tries < 0:
                        return found
                    if not matcher.consume_token(place):
                        continue
                    if matcher.is_accepting():
                        return [*found, node.text + piece]
                    after, odd = matcher.compute_bitmask(), node.odd + (piece[0] in _LAST)
                    leads.setdefault(after, []).append(place)
                    kinds.setdefault((mask, after, odd), []).append(_Node(matcher, node.text + piece, odd))
                leading.setdefault(mask, [place for places in leads.values() for place in {places[0], places[-1]}])
            ordered = sorted(kinds, key=lambda kind: (kind[2], seen[kind]))[:_KINDS]
            for kind in ordered:
                if not seen[kind] and ways > 0:
                    rest = self._greedy(kinds[kind][0], self._orders[0])
                    found, ways = [*found, *filter(None, [rest])], ways - 1
            seen.update(ordered)
            level = [node for kind in ordered for node in kinds[kind][:_ALIKE]]
        return found

    def _greedy(self, node: _Node, order: list[int]) -> bytes | None:
        """The text to the end by the first piece of `order` at each place; None where that repeats itself for long."""
        matcher, text, seen = node.matcher.deep_copy(), node.text, Counter[bytes]()
        ordered = np.array(order)
        while not matcher.is_accepting():
            mask = matcher.compute_bitmask()
            seen[mask] += 1
            allowed = unpacked(mask)[ordered]
            place = int(ordered[allowed.argmax()])
            if seen[mask] > _REPEATED or not matcher.consume_token(place):
                return None
            text += self._pieces[place]
        return text

    def _squeezed(self, text: bytes, rest: bytes) -> bytes:
        """The rest without the parts that it can do without."""
        here = self._start.deep_copy()
        here.consume_tokens([self._read + byte for byte in text])
        codes, start, tries = [*(self._read + byte for byte in rest), self._read + 256], 0, _SQUEEZED
        zero = [self._read + ord("0")]
        while start < len(codes) - 1:
            for end in range(min(len(codes) - 1, start + 64), start, -1) if tries > 0 else ():
                for fill in ([], zero) if end > start + 1 else ([],):
                    shorter = [*fill, *codes[end:]]
                    right = here.validate_tokens(shorter)
                    tries -= 1 + right
                    if right == len(shorter):
                        break
                else:
                    continue
                codes[start:end] = fill
                break
            else:
                here.consume_token(codes[start])
                start += 1
        return bytes(code - self._read for code in codes[:-1])

    def _following(self, mask: bytes) -> list[int]:
        return np.flatnonzero(unpacked(mask)[: self._read]).tolist()


def _alphabet(words: Spelling, lark: str) -> tuple[list[bytes], list[list[int]]]:
    """The pieces that are not made of shorter ones and a long one of each sort, and orders in which they are tried."""
    pieces = sorted({piece for piece in (*words.pieces, *words.first.values()) if piece}, key=lambda p: (len(p), p))
    single = {piece[0] for piece in pieces if len(piece) == 1}
    chosen = [piece for piece in pieces if len(piece) == 1 or not single.issuperset(piece)][:_ALPHABET]
    chosen.sort(key=lambda p: (_LAST.find(p[:1]), _FIRST.find(p[:1]) % (len(_FIRST) + 1), p))
    sorts = [re.compile(sort) for sort in _SORTS]
    long = [max((p for p in pieces if len(p) <= 16 and sort.fullmatch(p)), key=len, default=b"") for sort in sorts]
    required = [name for names in re.findall(r'"required": (\[[^\]]*\])', lark) for name in json.loads(names)]
    keys = [f"{json.dumps(name, ensure_ascii=False)}:".encode() for name in required]
    chosen = list(dict.fromkeys([*keys, *chosen, *filter(None, long)]))
    orders = [list(range(len(chosen)))]
    for sort in sorts:
        fill = [place for place, piece in enumerate(chosen) if sort.fullmatch(piece)]
        fill.sort(key=lambda place: -len(chosen[place]))
        quote = [place for place, piece in enumerate(chosen) if piece[:1] == b'"']
        orders.append(list(dict.fromkeys([*quote, *fill, *orders[0]])))
    return chosen, orders
