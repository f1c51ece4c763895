"""End a grammar's text within the budget: a closing that fits is known at every step.

A closing is a list of tokens after which the text may end. Each row has one, found by a search at the beginning and
carried along; a token after which no closing is found that fits the rest of the budget is barred. So a text that fits
at the beginning is never cut. A closing counts only once the grammar itself has accepted its tokens; what is not found
within the bounds of the search is treated as missing.

While the budget is further away than one token can require, nothing is barred and only the row's own closing is
updated. What is barred depends on the row's tokens and the budget alone, not on time or on other rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from genctl.decode.processors.closing_search import TRIES, ClosingSearch, Tokens
from genctl.decode.processors.token_bytes import Spelling

if TYPE_CHECKING:
    from llguidance import LLMatcher

_SEARCHES = 12  # searches among the tokens that may follow one state
_CLASSES = 128  # states whose following tokens are remembered
_CERTAIN = 20_000  # texts tried before it is certain that none is short enough
_NEAR = 8  # tokens of slack below which remembered closings are checked again
_MANY = 1024  # allowed tokens of which, while there is slack, those without punctuation are judged by a sample
_SAMPLE = 128


@dataclass
class _Class:
    """The tokens that may follow a state: for each id the place of a closing in `closings`, -1 if none was found."""

    closings: list[Tokens]
    place: NDArray[np.int32]  # [V]
    lengths: NDArray[np.int32] = field(init=False)  # [V]

    def __post_init__(self) -> None:
        sizes = np.array([*map(len, self.closings), np.iinfo(np.int32).max], dtype=np.int32)
        self.lengths = sizes[self.place]


class Closing:
    """Closings over one vocabulary, for one grammar. `extra` are llguidance's ids of tokens that begin a text."""

    def __init__(self, words: Spelling, extra: dict[int, int], eos: Sequence[int], search: ClosingSearch) -> None:
        self.words, self.extra, self.eos, self.search = words, extra, frozenset(eos), search
        self.end = len(words.pieces) + len(words.first)
        self.classes: OrderedDict[Any, _Class] = OrderedDict()
        size = len(words.pieces)
        heads = np.array([piece[0] if piece else -1 for piece in words.pieces], dtype=np.int32)
        heads[[token for token in eos if 0 <= token < size]] = -1  # it ends a row
        self._usable = heads >= 0
        self._plain = np.array([_plain(piece) for piece in words.pieces], dtype=bool)

    # -- is it one -----------------------------------------------------------------------------------------------------

    def closes(self, matcher: LLMatcher, started: bool, tokens: Sequence[int]) -> bool:
        """Whether the text may end after these tokens."""
        known = self._known(tokens, started)
        return bool(matcher.validate_tokens([*known, self.end]) == len(known) + 1)

    def _known(self, tokens: Sequence[int], started: bool) -> list[int]:
        """The tokens in llguidance's ids: a first token may read differently, or not at all."""
        if started or not tokens:
            return list(tokens)
        first = [self.extra.get(tokens[0], tokens[0])] if self.words.at_first(tokens[0]) else []
        return [*first, *tokens[1:]]

    # -- finding one ---------------------------------------------------------------------------------------------------

    def find(self, text: bytes, started: bool, tries: int = TRIES) -> Tokens | None:
        """A short closing after `text`; None if none is found in `tries` states."""
        found = self.search.find(text, started, tries=tries)
        return None if found is None else self._short(text, started, found)

    def improve(self, text: bytes, started: bool, closing: Tokens | None, most: int) -> Tokens | None:
        """A shorter closing than `closing`, of at most `most` tokens; None if none is found."""
        found = self.search.improve(text, started, closing, most)
        return None if found is None else self._short(text, started, found)

    def _short(self, text: bytes, started: bool, closing: Tokens) -> Tokens:
        packed = self._packed(closing, started)
        return packed if len(packed) < len(closing) and self.search.closes(text, started, packed) else closing

    def _allowed(self, matcher: LLMatcher) -> NDArray[np.bool_]:
        """bool [V]: the tokens that may follow, without EOS."""
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        return bits[: len(self.words.pieces)].astype(bool) & self._usable

    def _packed(self, tokens: Sequence[int], started: bool) -> Tokens:
        """The same text in the fewest tokens."""
        if not tokens or not (started or not self.words.first):
            return tuple(tokens)
        text = b"".join(self.words.pieces[token] for token in tokens)
        longest = min(self.words.longest, 64)
        best: list[tuple[int, int]] = [(0, -1)] * (len(text) + 1)  # fewest tokens to the end, and the first of them
        for start in range(len(text) - 1, -1, -1):
            best[start] = (len(text) + 1, -1)
            for size in range(1, min(longest, len(text) - start) + 1):
                count = best[start + size][0] + 1
                if count < best[start][0]:
                    ids = [
                        one_token
                        for one_token in self.words.spelled(text[start : start + size])
                        if one_token not in self.eos
                    ]
                    if ids:
                        best[start] = (count, ids[0])
        packed, start = [], 0
        while start < len(text):
            token = best[start][1]
            if token < 0:
                return tuple(tokens)
            packed.append(token)
            start += len(self.words.pieces[token])
        return tuple(packed)

    def shortest(
        self, matcher: LLMatcher, started: bool, allowed: Sequence[int], most: int
    ) -> tuple[Tokens | None, bool]:
        """A closing of at most `most` tokens, by exhaustive search, and whether the search was complete."""
        left = _CERTAIN
        seen: dict[bytes, int] = {}  # texts that have been followed, and how far

        def follow(here: LLMatcher, text: bytes, ids: Sequence[int], begun: bool, depth: int) -> Tokens | None:
            nonlocal left
            if seen.get(text, 0) >= depth:
                return None
            seen[text] = depth
            for token in ids:
                if token in self.eos:
                    continue
                left -= 1
                if left < 0:
                    return None
                if self.closes(here, begun, [token]):
                    return (token,)
            if depth == 1:
                return None
            for token in ids:
                if token in self.eos or left < 0:
                    continue
                after = here.deep_copy()
                after.consume_tokens(self._known([token], begun))
                longer = text + (self.words.pieces[token] if begun else self.words.at_first(token))
                rest = follow(after, longer, np.flatnonzero(self._allowed(after)).tolist(), True, depth - 1)
                if rest is not None:
                    return (token, *rest)
            return None

        if self.closes(matcher, started, ()):
            return (), True
        closing = follow(matcher, b"", allowed, started, most) if most > 0 else None
        return closing, left >= 0

    # -- carrying it along ---------------------------------------------------------------------------------------------

    def after(self, matcher: LLMatcher, before: Tokens | None, text: Callable[[], bytes]) -> Tokens | None:
        """The closing of a row that wrote one more token, which `matcher` has read; `before` is its old closing."""
        if matcher.is_accepting():
            return ()
        likely = () if before is None else _rests(before)
        return next((rest for rest in likely if self.closes(matcher, True, rest)), None) or self.find(text(), True)

    # -- what may follow -----------------------------------------------------------------------------------------------

    def leaves_room(
        self, matcher: LLMatcher, text: bytes | None, bits: bytes, closing: Tokens, most: int, slack: int
    ) -> NDArray[np.bool_]:
        """bool [V]: the tokens after which a closing of at most `most` tokens is known. EOS ids are always included.

        `text` was written; None before the first token.
        """
        size = len(self.words.pieces)
        allowed = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")[:size].astype(bool)
        started = text is not None
        key = bits, closing, started
        known = self.classes.get(key)
        sure = known is None and int(allowed.sum()) <= _MANY  # each token has been judged in this very state
        if known is None:
            known = self.classes[key] = self._class(matcher, text, allowed & self._usable, closing)
            while len(self.classes) > _CLASSES:
                self.classes.popitem(last=False)
        else:
            self.classes.move_to_end(key)
        fitting = allowed & (known.lengths <= most)
        if slack <= _NEAR:
            self._again(matcher, started, allowed, closing, most, known, fitting, sure)
        fitting[[token for token in self.eos if 0 <= token < size and allowed[token]]] = True
        return fitting

    def _class(self, matcher: LLMatcher, text: bytes | None, allowed: NDArray[np.bool_], closing: Tokens) -> _Class:
        closings: list[Tokens] = list(dict.fromkeys(_rests(closing)))
        place = np.full(len(allowed), -1, dtype=np.int32)
        searches = _SEARCHES
        plain = allowed & self._plain
        ids = np.flatnonzero(allowed)
        group: NDArray[Any] = np.flatnonzero(plain)
        if len(ids) > _MANY and len(group) > 2 * _SAMPLE:
            sample = group[:: len(group) // _SAMPLE]
            ids = np.concatenate([np.flatnonzero(allowed & ~plain), sample])
        else:
            sample = group[:0]
        likely = 0
        for token in ids.tolist():
            likely = max(likely, 0)
            place[token], searches = self._placed(matcher, text, token, closings, likely, searches)
            likely = place[token]
        if len(sample):
            first = place[sample[0]]
            if (place[sample] == first).all():
                place[group] = first
            else:
                for token in group.tolist():
                    place[token], searches = self._placed(matcher, text, token, closings, 0, searches)
        return _Class(closings, place)

    def _placed(
        self, matcher: LLMatcher, text: bytes | None, token: int, closings: list[Tokens], likely: int, searches: int
    ) -> tuple[int, int]:
        """The closing that may follow a token, that of the previous token tried first; a search adds one."""
        for place in (likely, *range(len(closings))):
            if self.closes(matcher, text is not None, (token, *closings[place])):
                return place, searches
        if searches <= 0:
            return -1, 0
        longer = self.words.at_first(token) if text is None else text + self.words.pieces[token]
        closing = self.find(longer, True, TRIES // 8)
        if closing is None:
            return -1, searches - 1
        closings.append(closing)
        return len(closings) - 1, searches - 1

    def _again(
        self,
        matcher: LLMatcher,
        started: bool,
        allowed: NDArray[np.bool_],
        closing: Tokens,
        most: int,
        known: _Class,
        fitting: NDArray[np.bool_],
        sure: bool,
    ) -> None:
        """Check another state's closings in this state, and look for shorter ones where they count."""
        ids = np.flatnonzero(allowed & self._usable)
        shorter = list(
            dict.fromkeys(candidate for candidate in (*_rests(closing), *known.closings) if len(candidate) <= most)
        )
        many = len(ids) > _MANY
        for token in ids.tolist():
            if fitting[token] and not sure:
                fitting[token] = self.closes(matcher, started, (token, *known.closings[known.place[token]]))
            if not fitting[token] and not (many and self._plain[token]):
                fitting[token] = any(self.closes(matcher, started, (token, *rest)) for rest in shorter)


def _rests(closing: Tokens) -> Iterator[Tokens]:
    """The likely closings after another token, which may replace the first token, none, or several."""
    yield closing[1:]
    yield closing
    for start in range(2, len(closing) + 1):
        yield closing[start:]


def _plain(piece: bytes) -> bool:
    """Letters, digits, blanks and non-ASCII bytes."""
    return bool(piece) and all(byte >= 0x80 or byte == 0x20 or chr(byte).isalnum() for byte in piece)
