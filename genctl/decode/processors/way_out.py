"""Short ways out of a grammar's text: tokens after which the text is whole.

llguidance names no states, so positions with the same following bytes count as alike. Greedy ways and a search in
breadth, both over bytes, give texts, which are written in few tokens. What is found depends on the grammar, the
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

from genctl.decode.processors.language import GrammarPosition, Language, unpacked
from genctl.decode.processors.token_bytes import Spelling, llguidance_tokenizer
from genctl.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher

Tokens = tuple[int, ...]

_TRIES, _FEW = 6_000, 300  # positions of a search; of one after greedy ways were found
_KINDS, _ALIKE = 8, 2  # kinds of positions of a level, and positions of a kind
_REPEATED = 128  # positions with the same following bytes on a greedy way
_REPLACED, _WINDOW = 8_000, 48  # tokens that are tried in place of several, and how many those are at most
_ALPHABET = 1024  # pieces of a vocabulary that are searched at most
_FIRST = b'"}])>,:;=0123456789'  # bytes that are tried first
_LAST = b"[{(< \t\n\r\\" + bytes(range(0x80, 0x100))  # and last: they open something, or are no plain text
_FILL = (rb"[a-z]+", rb"[A-Z][a-z]*", rb"[0-9]+")  # what a text of a least length is filled with


class _Node(NamedTuple):
    matcher: LLMatcher
    text: bytes  # since the beginning of the search
    last: int  # bytes of it that are tried last


class WaysOut:
    """Ways out of the texts of a language."""

    def __init__(self, language: Language) -> None:
        from llguidance import LLMatcher

        self.language = language
        body = language.source.lark.partition("\n")[2]
        self._pieces, self._fills = _alphabet(language.words, body)
        self._bytes = len(self._pieces)  # the place of byte 0: behind the alphabet are all bytes, to read a text with
        tokenizer = llguidance_tokenizer([*self._pieces, *(bytes([byte]) for byte in range(256))])
        self._start = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(language.source.lark), log_level=0)
        counts = re.findall(r'\{(\d{1,4})[,}]|"min(?:Length|Items|Properties)": (\d{1,4})', body)
        spelled = len(language.words.memo["llguidance"].greedy_tokenize(body))
        # about how many tokens one token can require: what the grammar spells out, and what it repeats
        self.reach = spelled + 4 * sum(int(one or other) for one, other in counts)

    @cached_property
    def first(self) -> Tokens | None:
        """A short text."""
        return self.find(self.language.start, 0)

    def find(self, position: GrammarPosition, enough: int) -> Tokens | None:
        """A short way out, None if none was found; of `enough` tokens it need not be the shortest."""
        if position.may_end:
            return ()
        words, eos = self.language.words, self.language.eos
        start = self._start.deep_copy()
        start.consume_tokens([self._bytes + byte for byte in position.text])
        ways = (words.fewest(rest, eos, first=not position.started) for rest in self._rests(start))
        whole = [way for way in ways if way is not None and position.ends_with(way)]
        way = min(whole, key=lambda way: (len(way), way), default=None)
        try:
            return way if way is None or len(way) <= enough else self._shortened(position, way)
        except UsageError:  # llguidance gave up at a position that the text need not come to
            return way

    def _shortened(self, position: GrammarPosition, way: Tokens) -> Tokens:
        """The way without the parts that it can do without, and with one token in place of several."""
        tries, here, start = _REPLACED, position, 0
        while start < len(way):
            following = here.continuing.tolist()
            for end in range(min(len(way), start + _WINDOW), start, -1):
                one: tuple[int, ...] | list[int] = ()
                whole = here.ends_with(way[end:])
                if not whole and end > start + 1 and (tries := tries - len(following)) > 0:
                    one = here.ended_by(following, way[end:])[:1]
                if whole or one:
                    way = (*way[:start], *one, *way[end:])
                    break
            after = here.after(way[start]) if start < len(way) else None
            if after is None:
                break
            here, start = after, start + 1
        return way

    # -- over bytes ----------------------------------------------------------------------------------------------------

    def _rests(self, start: LLMatcher) -> set[bytes]:
        """Short texts to the end: greedy ones, and the shortest that a search in breadth finds."""
        on: dict[bytes, int | None] = {}
        found = {rest for fill in self._fills if (rest := self._greedy(start, fill, on)) is not None}
        # kinds are the masks before and after a byte, and how many bytes are tried last
        level, seen = [_Node(start, b"", 0)], Counter[tuple[bytes, bytes, int]]()
        known: dict[bytes, list[int]] = {}  # mask -> pieces that may follow, two for each mask that they lead to
        tries = _FEW if found else _TRIES
        while level:
            kinds: dict[tuple[bytes, bytes, int], list[_Node]] = {}
            for node in level:
                mask = node.matcher.compute_bitmask()
                leading: dict[bytes, list[int]] = {}
                for place in known.get(mask) or self._following(mask):
                    matcher, text, tries = node.matcher.deep_copy(), node.text + self._pieces[place], tries - 1
                    if tries < 0:
                        return found
                    if not matcher.consume_token(place):
                        continue
                    if matcher.is_accepting():
                        return {*found, text}
                    after, last = matcher.compute_bitmask(), node.last + (self._pieces[place][0] in _LAST)
                    leading.setdefault(after, []).append(place)
                    kinds.setdefault((mask, after, last), []).append(_Node(matcher, text, last))
                known.setdefault(mask, [place for places in leading.values() for place in {places[0], places[-1]}])
            ordered = sorted(kinds, key=lambda kind: (kind[2], seen[kind]))[:_KINDS]
            seen.update(ordered)
            level = [node for kind in ordered for node in kinds[kind][:_ALIKE]]
        return found

    def _greedy(self, start: LLMatcher, fill: NDArray[np.intp], on: dict[bytes, int | None]) -> bytes | None:
        """The text to the end by the pieces that lead to another mask, where there is none by the first of `fill`; None
        where that repeats itself. `on`: mask -> the piece that leads on, as far as it is known.
        """
        matcher, text, seen = start.deep_copy(), b"", Counter[bytes]()
        while not matcher.is_accepting():
            mask = matcher.compute_bitmask()
            seen[mask] += 1
            if mask not in on:
                on[mask] = next((place for place in self._following(mask) if self._leads_on(matcher, place)), None)
            place = on[mask]
            if place is None:
                place = int(fill[unpacked(mask)[fill].argmax()])
            if seen[mask] > _REPEATED or not matcher.consume_token(place):
                return None
            text += self._pieces[place]
        return text

    def _leads_on(self, matcher: LLMatcher, place: int) -> bool:
        after = matcher.deep_copy()
        after.consume_token(place)
        plain = self._pieces[place][0] < 0x80 and self._pieces[place] != b"\\"
        return plain and (after.is_accepting() or after.compute_bitmask() != matcher.compute_bitmask())

    def _following(self, mask: bytes) -> list[int]:
        return np.flatnonzero(unpacked(mask)[: self._bytes]).tolist()


def _alphabet(words: Spelling, source: str) -> tuple[list[bytes], list[NDArray[np.intp]]]:
    """Required keys, the pieces that are not made of shorter ones and a long piece of each fill; the orders to fill."""
    if "alphabet" not in words.memo:
        pieces = sorted({piece for piece in (*words.pieces, *words.first.values()) if 0 < len(piece) <= 16})
        single = {piece[0] for piece in pieces if len(piece) == 1}
        basic = [piece for piece in pieces if len(piece) == 1 or not single.issuperset(piece)]
        basic = sorted(basic, key=len)[:_ALPHABET]
        basic.sort(key=lambda p: (_LAST.find(p[:1]), _FIRST.find(p[:1]) % (len(_FIRST) + 1), p))
        fills = [sorted(filter(re.compile(fill).fullmatch, pieces), key=len)[-1:] for fill in _FILL]
        words.memo["alphabet"] = basic, fills
    basic, fills = words.memo["alphabet"]
    required = [key for keys in re.findall(r'"required": (\[[^\]]*\])', source) for key in json.loads(keys)]
    keys = [f"{json.dumps(key, ensure_ascii=False)}:".encode() for key in required]
    chosen = list(dict.fromkeys([*keys, *basic, *(piece for fill in fills for piece in fill)]))
    places = {piece: place for place, piece in enumerate(chosen)}
    orders = [[place for piece, place in places.items() if re.fullmatch(fill, piece)] for fill in _FILL]
    return chosen, [np.array([*reversed(order), *range(len(chosen))]) for order in orders]
