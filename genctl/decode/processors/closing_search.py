"""The shortest way to the end of a grammar's text, by a search in breadth over tokens.

llguidance does not name the states of a grammar, so two states count as equal if the same tokens may follow and if
they accept the same beginnings of known closings. Of equal states a level of the search keeps two, and those that have
been met least often come first: so the search finds its way out of text that can go on for ever, such as the local part
of a mail address, and through text of a required length.

The search reads a vocabulary of its own, a few hundred of the tokens: all of a small vocabulary, of a large one those
that can make a difference. What it finds depends on the grammar, the vocabulary and the text alone.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from genctl.decode.processors.closing_witness import literals, witnesses
from genctl.decode.processors.token_bytes import Spelling, llguidance_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Tokens: TypeAlias = tuple[int, ...]
_Path: TypeAlias = "tuple[_Path, int] | None"
_Probe: TypeAlias = tuple[int, ...]

_LONGEST = 2048  # tokens of a closing
_WHOLE = 512  # ids of a vocabulary that is searched as a whole
_SHARE = 128  # ids of each kind that are taken from a larger one
_PROBES = 32  # ends of texts that tell states apart
_PROBED = 64  # bytes of one
_TELLING = 24  # tokens; if no more may follow, these tell states apart
_NARROW, _WIDE = 4, 64  # states of a level
TRIES = 6_000  # states of a search
_SQUEEZED = 12  # tokens that are left out at once
_FIRST = b"}])>\"0123456789ntf',:;-"  # bytes that are tried first: they end something or are a whole value
_KINDS = b"0123456789abcdefABCDEFzZ"  # letters and digits between which patterns distinguish
_PLAIN = frozenset((string.ascii_letters + string.digits + " ").encode())


class ClosingSearch:
    """Searches over one vocabulary, for one grammar."""

    def __init__(self, words: Spelling, lark: str, eos: Sequence[int]) -> None:
        from llguidance import LLMatcher

        ids = _chosen(words, lark, frozenset(eos))
        # an entry of the search's vocabulary: an id, its text, and whether it begins a text and goes on with one
        entries = [(token, words.pieces[token], token not in words.first, True) for token in ids]
        entries += [(token, words.first[token], True, False) for token in ids if words.first.get(token)]
        entries.sort(key=lambda entry: _promise(entry[1]))
        self._words, self._lark = words, lark
        self._silent = next(
            (token for token in ids if words.first.get(token) == b""), None
        )  # no text, at the beginning
        self._tokens = [token for token, _, _, _ in entries]
        self._sizes = [*(len(piece) for _, piece, _, _ in entries), 0]
        self._odd = [*(_is_odd(piece) for _, piece, _, _ in entries), 1]
        usable = np.array([(begins, goes_on) for _, _, begins, goes_on in entries]).reshape(-1, 2)
        likely = np.array(_likely([piece for _, piece, _, _ in entries], literals(lark)), dtype=bool)
        # [started][quick] -> bool [entries]: the entries that a search may take
        self._usable = [[usable[:, started], usable[:, started] & likely] for started in (0, 1)]
        self._byte = len(entries)  # the place of byte 0; bytes are only read
        tokenizer = llguidance_tokenizer([*(piece for _, piece, _, _ in entries), *(bytes([n]) for n in range(256))])
        self._root = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
        self._end = self._byte + 256

    def find(self, text: bytes, started: bool, most: int = _LONGEST, tries: int = TRIES) -> Tokens | None:
        """A short closing after `text`, of at most `most` tokens; None if none is found in `tries` states."""
        start = self._at(text)
        if start is None:
            return None
        if start.is_accepting():
            return ()
        most = min(most, _LONGEST)
        for least, guides in ((tries // 4, ()), (tries, self._guides), (tries, ())):
            found = self._search(start, started, most, _NARROW, least, guides, quick=True)
            if found is not None:
                return self._squeezed(start, started, found)
        return None

    def closes(self, text: bytes, started: bool, closing: Tokens) -> bool:
        """Whether the text may end after these tokens."""
        start = self._at(text)
        rest = self._probe(b"".join(self._text(token, started or place > 0) for place, token in enumerate(closing)))
        return start is not None and start.validate_tokens([*rest]) == len(rest)

    def improve(self, text: bytes, started: bool, closing: Tokens | None, most: int) -> Tokens | None:
        """A shorter closing than `closing`, of at most `most` tokens; None if none is found.

        Closings that are found tell more states apart, so that further searches see more of them.
        """
        start = self._at(text)
        if start is None:
            return None
        better, probes = None, [*self._probes(closing, started), *self._guides]
        while most > 0:
            found = self._search(start, started, most, _WIDE, TRIES, tuple(dict.fromkeys(probes))[:_PROBES])
            if found is None:
                break
            better, most = found, len(found) - 1
            probes = [*self._probes(found, started), *probes]
        return better

    def _squeezed(self, start: LLMatcher, started: bool, closing: Tokens) -> Tokens:
        """A closing without the tokens that it can do without."""
        texts = [self._text(token, started or place > 0) for place, token in enumerate(closing)]
        kept = list(zip(closing, texts, strict=True))
        place, here = 0 if started else 1, start.deep_copy()
        here.consume_tokens(self._bytes(b"".join(texts[:place])))
        while place < len(kept):
            for until in range(min(place + _SQUEEZED, len(kept)), place, -1):
                rest = self._probe(b"".join(text for _, text in kept[until:]))
                if here.validate_tokens([*rest]) == len(rest):
                    del kept[place:until]
                    break
            else:
                here.consume_tokens(self._bytes(kept[place][1]))
                place += 1
        return tuple(token for token, _ in kept)

    def _text(self, token: int, started: bool) -> bytes:
        return self._words.pieces[token] if started else self._words.at_first(token)

    def _bytes(self, text: bytes) -> list[int]:
        return [self._byte + byte for byte in text]

    def _at(self, text: bytes) -> LLMatcher | None:
        matcher = self._root.deep_copy()
        return matcher if matcher.consume_tokens(self._bytes(text)) else None

    @cached_property
    def _guides(self) -> tuple[_Probe, ...]:
        """The ends of the shortest texts of patterns: how far a text has come in a pattern."""
        return tuple(self._spread(text[place:] for text in witnesses(self._lark) for place in range(len(text))))

    def _probes(self, closing: Tokens | None, started: bool) -> list[_Probe]:
        texts = [self._text(token, started or place > 0) for place, token in enumerate(closing or ())]
        return self._spread(b"".join(texts[place:]) for place in range(len(texts)))

    def _spread(self, rests: Iterable[bytes]) -> list[_Probe]:
        short = [rest for rest in dict.fromkeys(rests) if len(rest) <= _PROBED]
        return [self._probe(rest) for rest in short[:: max(1, -(-len(short) // _PROBES))]]

    def _probe(self, rest: bytes) -> _Probe:
        return (*self._bytes(rest), self._end)

    def _search(
        self,
        start: LLMatcher,
        started: bool,
        most: int,
        width: int,
        tries: int,
        probes: tuple[_Probe, ...],
        quick: bool = False,
    ) -> Tokens | None:
        """`width` states are followed at each level, `tries` in all. `quick`: from equal states the same tokens."""
        level = [_Node(start, started, None)]
        met: Counter[Any] = Counter()
        tried: dict[Any, list[int]] = {}  # look -> places of the tokens that led to different states
        for _ in range(most):
            groups: dict[Any, list[_Node]] = {}
            for node in level:
                places = tried.get(node.look) if quick else None
                if places is None:
                    places = self._following(node.matcher, node.started, quick)
                telling: dict[Any, list[int]] = {}
                for place in places:
                    tries -= 1
                    if tries < 0:
                        return None
                    matcher = node.matcher.deep_copy()
                    if place >= 0 and not matcher.consume_token(place):
                        continue
                    if matcher.is_accepting():
                        return self._tokens_of((node.path, place))
                    look = self._look(matcher, probes, quick)
                    size, odd = node.size + self._sizes[place], node.odd + self._odd[place]
                    alike = telling.setdefault(look, [])
                    if not alike or self._sizes[place] > self._sizes[alike[-1]]:
                        alike.append(place)
                    group = groups.setdefault(look, [])
                    if not group or (size > group[-1].size and odd <= group[0].odd):
                        group[1:] = [_Node(matcher, True, look, (node.path, place), size, odd)]
                if quick and node.look not in tried:
                    tried[node.look] = [place for alike in telling.values() for place in alike]
            ordered = sorted(groups, key=lambda look: (min(node.odd for node in groups[look]), met[look]))[:width]
            met.update(ordered)
            level = [node for look in ordered for node in groups[look]]
            if not level:
                return None
        return None

    def _following(self, matcher: LLMatcher, started: bool, quick: bool) -> list[int]:
        """The places of the tokens that may follow, the most promising first; -1 for one without text."""
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed, usable = bits[: self._byte].astype(bool), self._usable[started]
        places = np.flatnonzero(allowed & usable[quick])
        if not len(places):
            places = np.flatnonzero(allowed & usable[0])
        return places.tolist() if started or self._silent is None else [*places.tolist(), -1]

    def _look(self, matcher: LLMatcher, probes: tuple[_Probe, ...], quick: bool) -> tuple[Any, ...]:
        mask = matcher.compute_bitmask()
        if probes and not (quick and int.from_bytes(mask, "little").bit_count() <= _TELLING):
            return mask, *(matcher.validate_tokens([*probe]) for probe in probes)
        return (mask,)

    def _tokens_of(self, path: _Path) -> Tokens:
        places = list[int]()
        while path is not None:
            path, place = path
            places.append(place)
        return tuple(self._tokens[place] if place >= 0 else self._silent or 0 for place in reversed(places))


@dataclass(frozen=True, slots=True)
class _Node:
    """A state that a search has reached."""

    matcher: LLMatcher
    started: bool  # whether text was written
    look: Any
    path: _Path = None  # the places of its tokens
    size: int = 0  # bytes written
    odd: int = 0  # tokens on the path that seldom lead to an end


def _chosen(words: Spelling, lark: str, eos: frozenset[int]) -> list[int]:
    """The ids that a search tries, one for each text."""
    texts: dict[tuple[bytes, bytes], int] = {}
    for token, piece in enumerate(words.pieces):
        if piece and token not in eos:
            texts.setdefault((piece, words.at_first(token)), token)
    if len(texts) <= _WHOLE:
        return list(texts.values())
    source, chosen = lark.encode(), list[int]()
    heads, kinds = set[int](), Counter[Any]()
    for (piece, _), token in sorted(texts.items(), key=lambda item: len(item[0][0])):
        plain = _PLAIN.issuperset(piece)
        kind: Any = "source" if piece in source else ("plain", len(piece), piece.isdigit()) if plain else "marks"
        if len(piece) == 1 or piece[0] not in heads or kinds[kind] < (1 if isinstance(kind, tuple) else _SHARE):
            chosen.append(token)
            heads.add(piece[0])
            kinds[kind] += len(piece) > 1
    return chosen


def _likely(pieces: Sequence[bytes], source: str) -> list[bool]:
    """Whether a token makes a difference: marks, what the grammar names, and one of each kind of plain text."""
    named = source.encode() + _KINDS
    kinds, likely = set[Any](), list[bool]()
    for piece in pieces:
        plain = _PLAIN.issuperset(piece)
        kind = len(piece), piece.isdigit(), piece[:1] == b" "
        likely.append(not _is_odd(piece) and (not plain or piece in named or kind not in kinds))
        kinds.add(kind)
    return likely


def _promise(piece: bytes) -> tuple[int, int]:
    place = _FIRST.find(piece[:1])
    return (place if place >= 0 else len(_FIRST), -len(piece))


def _is_odd(piece: bytes) -> int:
    """Whether a token is blank, an escape or no ASCII: it is taken where it must be."""
    return int(piece.isspace() or piece[0] >= 0x80 or piece[:1] == b"\\")
