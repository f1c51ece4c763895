"""Drafts without a model: what followed the last tokens where they occurred before, in the row or in other texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from genctl.decode.types import Context, Draft
from genctl.params import MOST_MATCHED
from genctl.strategies.assisted import SELDOM, Rate, seldom

if TYPE_CHECKING:
    from genctl.strategies.draft_models import DraftWriter, Draw

MOST_COMPARED = 64  # tokens; more hardly ever tell more, and each costs time and memory
MOST_KEPT = 2**17  # tokens of other texts; the older half goes when there are more
LEAST_LIKELY = 0.05  # a draft ends where it is right as a whole less often than that
SURE = 4  # tokens that must be known before anything is drafted, where steps are short
END = -1  # between two texts
OFTEN = 3  # counts of repeats and of changes are exact up to this
# streak << 2 | changes -> the same after the token came again, and after another one came
AGAIN = [min(state + 4, OFTEN << 2 | state & OFTEN) for state in range(16)]
CHANGED = [min((state & OFTEN) + 1, OFTEN) for state in range(16)]


class Index:
    """What came last after each 1, 2, 4, … `longest` tokens of a text, as branch predictors know their branches.

    A longer context is trusted before a shorter one (Seznec and Michaud 2006, "A case for (partially) tagged geometric
    history length branch prediction"). How often to trust it is learned for each kind of context (`Followed`).
    """

    def __init__(self, longest: int, tokens: Iterable[int] = ()) -> None:
        longest = min(longest, MOST_COMPARED)
        self.lengths = [length for length in (1, 2, 4, 8, 16, 32) if length < longest] + [longest]
        # for each length: hash of the tokens -> the token after them, how often in a row it was that, and its changes
        self.tables: list[dict[int, int]] = [{} for _ in self.lengths]
        self.taken = [0 for _ in self.lengths]  # tokens that are in the table
        self.tokens = list(tokens)

    def after(self, key: int, place: int) -> int | None:
        """What came last after the tokens with this hash, of the `place`-th length."""
        if self.taken[place] < len(self.tokens):
            self._take(place)
        return self.tables[place].get(key)

    def _take(self, place: int) -> None:
        tokens, length, table = self.tokens, self.lengths[place], self.tables[place]
        begin, end, get = max(self.taken[place], length), max(len(tokens), length), table.get
        before = [tokens[begin - length + skip : end - length + skip] for skip in range(length)]
        for key, token in zip(map(hash, zip(*before, strict=True)), tokens[begin:], strict=True):
            known = get(key)
            if known is None:
                table[key] = token << 4
            else:
                table[key] = token << 4 | (AGAIN if known >> 4 == token else CHANGED)[known & 15]
        self.taken[place] = len(tokens)


class Followed:
    """How often what came last after some tokens comes again: by their number, by streak and changes, and by text."""

    def __init__(self) -> None:
        self.rates: dict[int, Rate] = {}

    def rate(self, length: int, streak_and_changes: int, *, own: bool) -> Rate:
        """The rate, which is learned as drafts are checked."""
        key = length << 5 | streak_and_changes << 1 | own
        found = self.rates.get(key)
        if found is None:
            streak, changed = streak_and_changes >> 2, bool(streak_and_changes & OFTEN)
            guess = 0.35 + 0.06 * min(length, 8) + 0.1 * streak - 0.15 * changed
            found = self.rates[key] = Rate.guess(min(guess, 0.95))
        return found


@dataclass(frozen=True)
class PromptLookup:
    """Drafts from the row itself (github.com/apoorvumang/prompt-lookup-decoding).

    Up to `max_matching_ngram_size` of the last tokens are compared. An encoder-decoder's source is searched, too. No
    EOS is drafted, and no processor is applied.
    """

    max_matching_ngram_size: int = MOST_MATCHED

    kind: ClassVar[str] = "prompt-lookup"

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        return LookupDraftWriter(self.max_matching_ngram_size, _source(context), context.eos)


@dataclass(eq=False)
class SuffixDrafter:
    """Drafts from the row itself and from the texts of a run: those given before it, and rows that have ended."""

    texts: Index = field(default_factory=lambda: Index(MOST_MATCHED))
    followed: Followed = field(default_factory=Followed)
    waiting: deque[Sequence[int]] = field(default_factory=deque)  # texts that nobody has looked into yet,
    wait: int = 0  # and their tokens

    kind: ClassVar[str] = "suffix"

    def keep(self, tokens: Sequence[int]) -> None:
        """Draft from this text, too."""
        if not tokens:
            return
        self.waiting.append(tokens)
        self.wait += len(tokens)
        while self.wait > MOST_KEPT and len(self.waiting) > 1:
            self.wait -= len(self.waiting.popleft())

    def known(self) -> Index:
        """The texts that were kept."""
        while self.waiting:
            self.texts.tokens += [*self.waiting.popleft(), END]
        self.wait = 0
        if len(self.texts.tokens) > MOST_KEPT:
            self.texts = Index(MOST_MATCHED, self.texts.tokens[-MOST_KEPT // 2 :])
        return self.texts

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        agree = SURE if seldom(context.model.pass_price) == SELDOM else 0
        return LookupDraftWriter(MOST_MATCHED, _source(context), context.eos, self, agree)


def _source(context: Context) -> list[int]:
    source = context.prefix.source
    return [] if source is None else source.ids[0].tolist()


class LookupDraftWriter:
    """Token after token, what came last after the longest end of the text that the row or the texts of `others` know.

    With `others` a draft ends where it becomes improbable. None is made unless the last `agree` tokens are known.
    """

    def __init__(
        self,
        longest: int,
        before: Iterable[int],
        eos: Sequence[int],
        others: SuffixDrafter | None = None,
        agree: int = 0,
    ) -> None:
        self.eos, self.others, self.agree = frozenset(eos), others, agree
        self.followed = Followed() if others is None else others.followed
        self.own = Index(longest, before)
        self.taken = 0  # tokens of the row in `own`

    def __call__(self, text: Sequence[int], count: int) -> Draft:
        own = self.own
        own.tokens += text[self.taken :]
        self.taken = len(text)
        known = [own] if self.others is None else [own, self.others.known()]
        known = [index for index in known if index.tokens]
        places = [*enumerate(own.lengths)]
        end = own.tokens[-own.lengths[-1] :]
        tokens: list[int] = []
        rates: list[Rate] = []
        if self.agree and self._next(end, known, [place for place in places if place[1] == self.agree]) is None:
            return Draft(tokens)
        places.reverse()
        likely = 1.0
        while len(tokens) < count and likely >= (LEAST_LIKELY if self.others is not None else 0.0):
            found = self._next(end, known, places)
            if found is None or found[0] in self.eos or found[0] == END:
                break
            token, rate = found
            tokens.append(token)
            rates.append(rate)
            likely *= rate.value
            end.append(token)
        return Draft(tokens, rates=rates)

    def _next(
        self, end: Sequence[int], known: Sequence[Index], places: Iterable[tuple[int, int]]
    ) -> tuple[int, Rate] | None:
        for place, length in places:
            if length > len(end):
                continue
            key = hash(tuple(end[-length:]))
            for index in known:
                value = index.after(key, place)
                if value is not None:
                    return value >> 4, self.followed.rate(length, value & 15, own=index is self.own)
        return None
