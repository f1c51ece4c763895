"""Drafts without a model: what followed the last tokens where they occurred before, in the row or in other texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TYPE_CHECKING, ClassVar

from genctl.decode.types import Context, Draft
from genctl.params import MOST_MATCHED
from genctl.strategies.draft_length import Rates

if TYPE_CHECKING:
    from genctl.strategies.draft_models import DraftWriter, Draw

PLACES = 32  # of the last two tokens that are compared, the latest
MOST_KEPT = 2**17  # tokens of other texts; the older half goes when there are more
END = -1  # between two texts


class Index:
    """Texts one after another, and where every token and pair of tokens ends in them, if something follows it."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = list(tokens)
        self.indexed = 0  # what ends before this place is indexed
        self.latest: dict[int, int] = {}  # token -> its latest end
        self.pairs: dict[tuple[int, int], list[int]] = {}

    def find(self, text: Sequence[int], longest: int) -> tuple[int, int]:
        """How many of the last tokens of `text` agree with those before a place, and the place; (0, 0) for none.

        The place where most agree counts, up to `longest`; of several the latest.
        """
        self._grow()
        tokens, length = self.tokens, len(text)
        ends = self.pairs.get((text[-2], text[-1]), ()) if length > 1 < longest else ()
        place = self.latest.get(text[-1], 0)
        best = int(place > 0)
        for end in reversed(ends[-PLACES:]):
            same = 2
            while same < min(longest, end, length) and tokens[end - 1 - same] == text[length - 1 - same]:
                same += 1
            if same > best:
                best, place = same, end
        return best, place

    def _grow(self) -> None:
        tokens, latest, pairs = self.tokens, self.latest, self.pairs
        for end in range(self.indexed + 1, len(tokens)):
            latest[tokens[end - 1]] = end
            if end > 1:
                pairs.setdefault((tokens[end - 2], tokens[end - 1]), []).append(end)
        self.indexed = max(self.indexed, len(tokens) - 1)


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

    texts: Index = field(default_factory=Index)
    rates: Rates = field(default_factory=Rates)
    waiting: list[Sequence[int]] = field(default_factory=list)  # texts that nobody has looked into yet

    kind: ClassVar[str] = "suffix"

    def keep(self, tokens: Sequence[int]) -> None:
        """Draft from this text, too."""
        self.waiting.append(tokens)

    def known(self) -> Index:
        """The texts that were kept."""
        for tokens in self.waiting:
            self.texts.tokens += [*tokens, END]
        self.waiting.clear()
        if len(self.texts.tokens) > MOST_KEPT:
            self.texts = Index(self.texts.tokens[-MOST_KEPT // 2 :])
        return self.texts

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        return LookupDraftWriter(MOST_MATCHED, _source(context), context.eos, self)


def _source(context: Context) -> list[int]:
    source = context.prefix.source
    return [] if source is None else source.ids[0].tolist()


class LookupDraftWriter:
    """Where the row agrees with itself, or else with the texts of `others`."""

    def __init__(
        self, longest: int, before: Iterable[int], eos: Sequence[int], others: SuffixDrafter | None = None
    ) -> None:
        self.longest, self.eos, self.others = longest, frozenset(eos), others
        self.own = Index(before)
        self.taken = 0  # tokens of the row in `own`

    def __call__(self, text: Sequence[int], count: int) -> Draft:
        own = self.own
        own.tokens += text[self.taken :]
        self.taken = len(text)
        match, place = own.find(own.tokens, self.longest)
        # at the end of the text the draft itself goes on: what repeats itself goes round and round
        found: Iterable[int] = islice(cycle(own.tokens[place : place + count]), count if match else 0)
        if self.others is not None and match < self.longest:
            known = self.others.known()
            longer, place = known.find(text, self.longest)
            if longer > match:
                match, found = longer, known.tokens[place : place + count]
        tokens: list[int] = []
        for token in found:
            if token in self.eos or token == END:
                break
            tokens.append(token)
        return Draft(tokens, match=match)
