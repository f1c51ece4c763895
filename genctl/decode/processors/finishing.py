"""Finish a grammar's text within the budget.

A way out is a list of tokens that completes the text. Each row carries one. Nothing is barred while the budget is
large. Near its end, tokens after which no known way out fits are barred, as long as the row's own way fits. So a text
that ends in time by itself is not changed, and if no way out is found only the grammar's mask applies.

Which tokens are barred depends only on the row's tokens, its scores and the budget, not on time or on other prompts.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genctl.decode.processors.language import GrammarPosition, Language, unpacked
from genctl.decode.processors.token_bytes import llguidance_tokenizer
from genctl.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher

Tokens = tuple[int, ...]

_GROWTH = 8  # assumed growth of a way out per written token, in tokens, while the end is far
_NEAR = 8  # with at most so many tokens to spare, a token is barred unless a way out after it is known
_EXAMINED = 1024  # near the end only so many of the most probable ids are examined, and all others are barred
_LIKELY = 32  # the same further from the end, where the other ids stay allowed
_SEARCHES = 8  # how many of these ids get a search for a way out, the most probable first
_STORED = 4_000  # ways out in the cache
_ENUMERATED = 4_000  # tokens that are tried to prove that no text fits
_TRIES = 6_000  # most pieces that a search tries
_KINDS = 8  # most positions on a level of a search (its beam width), each of a different kind
_FILL = re.compile(rb"[a-z]{2,}|[0-9]{2,}")
_FREE = 64  # if more pieces than this may follow, the position is free text
_FIRST = b'"}])>,:;=0123456789'  # bytes that are tried first
_LAST = b"[{(< \t\n\r\\" + bytes(range(0x80, 0x100))  # and last: they open something, or are no plain text


class KnownWay(NamedTuple):
    """A row's way out, None if none was found. It is checked again after `wait` more tokens."""

    tokens: Tokens | None = None
    wait: int = 0


class Finishing:
    """Ways out of the texts of a language."""

    def __init__(self, language: Language) -> None:
        self.language = language
        words = language.words
        single = {piece[0] for piece in words.pieces if len(piece) == 1}
        # all bytes, to spell any text, and a piece of each length, to fill up to a minimum length
        fills = {(len(piece), piece[:1].isdigit()): piece for piece in words.pieces if _FILL.fullmatch(piece)}
        self._pieces = [*(bytes([byte]) for byte in range(256)), *sorted(fills.values(), key=len)]
        order = sorted(single, key=lambda b: (_LAST.find(b), _FIRST.find(b) % (len(_FIRST) + 1), b))
        self._order = np.array([*order, *range(256, len(self._pieces))], dtype=np.intp)
        self._letters = np.array([len(piece) == 1 and (piece.isalpha() or piece > b"\x7f") for piece in self._pieces])
        self._start = language.source.matcher(llguidance_tokenizer(self._pieces))
        body = language.source.lark.partition("\n")[2]
        counts = re.findall(r'\{(\d{1,4})[,}]|"min(?:Length|Items|Properties)": (\d{1,4})', body)
        spelled = len(language.words.memo["llguidance"].greedy_tokenize(body))
        # about how many further tokens one token can require: the grammar's literal text and its repetitions
        self.reach = spelled + 4 * sum(int(one or other) for one, other in counts)
        self._found: dict[tuple[bytes, bool, int], Tokens | None] = {}  # ways out after a token
        self._first = self.find(language.start)

    def shortest(self, room: int) -> Tokens | None:
        """The way out of a row without tokens. Raises UsageError if it is certain that no text fits `room` tokens."""
        way = self._first
        if way is not None and len(way) < room:
            return way
        try:
            shorter, certain = _enumerated(self.language.start, room)
        except UsageError:  # llguidance gives up at a position that a text need not reach
            shorter, certain = None, False
        if shorter is None and certain:
            known = "" if way is None else f" (the shortest that was found takes {len(way)})"
            count = f"{room} token{'s' * (room > 1)}, which is all that may be written"
            raise UsageError(f"{self.language.source.knob}: no text of it fits in {count}{known}")
        return shorter or way

    def follow(self, before: KnownWay, position: GrammarPosition, left: int) -> KnownWay:
        """The way out of a row that reached `position` with one more token and may write `left` more."""
        if before.wait:
            return KnownWay(before.tokens, before.wait - 1)
        known = before.tokens or ()
        rests = (known[start:] for start in range(len(known), -1, -1))
        way = next((rest for rest in rests if position.ends_with(rest)), None)
        if way is None or len(way) >= left:
            found = self.find(position)
            way = found if way is None or (found is not None and len(found) < len(way)) else way
        return self.waiting(way, left)

    def waiting(self, way: Tokens | None, left: int) -> KnownWay:
        """A way out if `left` tokens may be written, and for how many tokens it need not be checked."""
        spare = left if way is None else left - 1 - len(way) - self.reach
        return KnownWay(way, max(spare, 0) // _GROWTH)

    def in_time(self, position: GrammarPosition, way: KnownWay, left: int, scores: Tensor) -> bytes:
        """The ids, one bit each, after which the text can be finished within `left` tokens; scores f32 [V]."""
        if way.wait or way.tokens is None or len(way.tokens) > left:
            return position.bits
        end = min(1, left - len(way.tokens))  # an EOS id, if there is room for it
        spare, most = left - end - len(way.tokens), left - 1 - end
        if spare > self.reach:
            return position.bits
        near, ids = spare <= _NEAR, position.continuing
        count = min(_EXAMINED if near else _LIKELY, len(ids))
        probable = scores[torch.from_numpy(ids).to(scores.device)].topk(count).indices
        likely = np.append(ids[probable.cpu().numpy()], np.array(way.tokens[:1], dtype=np.intp))
        lengths = self._lengths(position, way.tokens, likely, most, _SEARCHES if near or count <= _SEARCHES else 1)
        allowed = unpacked(position.bits).copy()
        if near:
            allowed[ids] = False
        allowed[likely] = lengths <= most if near else (lengths <= most) | np.isinf(lengths)
        kept = torch.from_numpy(np.flatnonzero(allowed[: len(scores)])).to(scores.device)
        if not bool((scores[kept] > -torch.inf).any()):  # other processors barred every token that ends in time
            return position.bits
        return np.packbits(allowed, bitorder="little").tobytes()

    def _lengths(
        self, position: GrammarPosition, way: Tokens, ids: NDArray[np.intp], most: int, searches: int
    ) -> NDArray[np.float64]:
        """f64 [ids]: the length in tokens of a known way out after each id; infinite where none is known.

        Known are the ends of `way`, and ways found by a search after the first `searches` ids where those are too long.
        """
        lengths = np.full(len(ids), np.inf)

        def note(rest: Tokens, places: NDArray[np.intp]) -> None:
            ended = position.ended_by(ids[places].tolist(), rest)
            lengths[places[np.isin(ids[places], ended)]] = len(rest)

        for rest in dict.fromkeys((way[1:], way, *(way[start:] for start in range(len(way), 1, -1)))):
            note(rest, np.flatnonzero(np.isinf(lengths)))
        for place in np.flatnonzero(lengths > most)[:searches]:
            key = position.text, position.started, int(ids[place])
            if key not in self._found:
                if len(self._found) == _STORED:
                    self._found.clear()
                after = position.after(key[2])
                self._found[key] = None if after is None else self.find(after)
            found = self._found[key]
            if found is not None:
                note(found, np.flatnonzero(lengths > max(len(found), most)))
        return lengths

    def find(self, position: GrammarPosition) -> Tokens | None:
        """A short way out, None if none was found."""
        if position.may_end:
            return ()
        matcher = self._start.deep_copy()
        matcher.consume_tokens(list(position.text))
        rest, words = self._rest(matcher), self.language.words
        way = None if rest is None else words.fewest(rest, self.language.eos, first=not position.started)
        return way if way is not None and position.ends_with(way) else None

    def _rest(self, start: LLMatcher) -> bytes | None:
        """The bytes that complete a text: the fewest that a beam search finds.

        llguidance does not expose states: positions count as equal if the same bytes may follow them and their parents.
        """
        level, seen, tries = [_Node(start, b"", 0)], Counter[tuple[bytes, bytes, int]](), _TRIES
        known: dict[bytes, list[int]] = {}  # mask -> pieces that may follow, two for each mask that they lead to
        while level:
            kinds: dict[tuple[bytes, bytes, int], _Node] = {}
            for node in level:
                mask = node.matcher.compute_bitmask()
                leading: dict[bytes, list[int]] = {}
                for place in known.get(mask) or self._following(mask):
                    piece, matcher, tries = self._pieces[place], node.matcher.deep_copy(), tries - 1
                    text = node.text + piece
                    if tries < 0:
                        return None
                    if not matcher.consume_token(place):
                        continue
                    if matcher.is_accepting():
                        return text
                    after, last = matcher.compute_bitmask(), node.last + (piece[0] in _LAST)
                    leading.setdefault(after, []).append(place)
                    kinds.setdefault((mask, after, last), _Node(matcher, text, last))
                known.setdefault(mask, [place for places in leading.values() for place in {places[0], places[-1]}])
            ordered = sorted(kinds, key=lambda kind: (kind[2], seen[kind]))[:_KINDS]
            seen.update(ordered)
            level = [kinds[kind] for kind in ordered]
        return None

    def _following(self, mask: bytes) -> list[int]:
        """The pieces that may follow; in free text without single letters, which the longer pieces stand for."""
        places = self._order[unpacked(mask)[self._order]]
        if len(places) > _FREE:
            places = places[~self._letters[places]]
        return list(map(int, places))


def finishing(language: Language) -> Finishing:
    """The ways out of a language, shared by all prompts."""
    if "finishing" not in language.memo:
        language.memo["finishing"] = Finishing(language)
    made: Finishing = language.memo["finishing"]
    return made


class _Node(NamedTuple):
    matcher: LLMatcher
    text: bytes  # since the beginning of the search
    last: int  # how many of its pieces begin with a byte of `_LAST`


def _enumerated(start: GrammarPosition, most: int) -> tuple[Tokens | None, bool]:
    """A shortest text of at most `most` tokens, by trying all, and whether all were tried."""
    tries, level = _ENUMERATED, {b"": (start, Tokens())}
    for left in range(most, 0, -1):
        longer: dict[bytes, tuple[GrammarPosition, Tokens]] = {}
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
