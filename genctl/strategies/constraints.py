"""Phrases that must appear, and the progress of a text towards them.

A constraint is one phrase, or several alternatives. It is satisfied as soon as one of them is in the new tokens,
at any place: phrases may overlap, contain one another, or begin inside an incomplete match of another. One automaton
matches all (Aho and Corasick 1975, doi:10.1145/360825.360855): its state is the longest suffix of the text that is a
prefix of a phrase. A constraint that is given twice must appear twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple, TypeAlias

Phrase: TypeAlias = tuple[int, ...]
Alternatives: TypeAlias = tuple[Phrase, ...]

EXACT = 6  # most open constraints for which the shortest completion is searched; above, overlaps are ignored


class Progress(NamedTuple):
    """The state of one text. Immutable: forked rows share it."""

    open: tuple[int, ...]  # for each constraint how often it must still be satisfied
    tail: Phrase = ()  # the longest suffix of the text that is a prefix of a phrase

    @property
    def complete(self) -> bool:
        return not any(self.open)


class Constraints:
    """The phrases that must appear in a text."""

    def __init__(self, constraints: Sequence[Alternatives]) -> None:
        sets = [frozenset(alternatives) for alternatives in constraints]
        distinct = list(dict.fromkeys(sets))
        self.distinct = [_least(alternatives) for alternatives in distinct]  # each constraint once
        self.times = tuple(sets.count(alternatives) for alternatives in distinct)  # how often each is given
        self.numbers = [distinct.index(alternatives) for alternatives in sets]
        self.shortest = [min(map(len, phrases)) for phrases in self.distinct]
        self.tokens = frozenset(token for phrases in self.distinct for phrase in phrases for token in phrase)
        phrases = [phrase for alternatives in self.distinct for phrase in alternatives]
        self._beginnings = {phrase[:length] for phrase in phrases for length in range(len(phrase) + 1)}
        self._steps: dict[tuple[Progress, int], Progress] = {}
        self._lacking: dict[Progress, int] = {}
        self._needed: dict[Progress, int] = {}

    def __len__(self) -> int:
        """Constraints, counted with repetitions."""
        return sum(self.times)

    def begin(self) -> Progress:
        return Progress(self.times)

    def satisfied(self, progress: Progress) -> int:
        """Constraints satisfied so far."""
        return len(self) - sum(progress.open)

    def step(self, progress: Progress, token: int) -> Progress:
        """The progress after `token`."""
        if token not in self.tokens:
            return Progress(progress.open)
        after = self._steps.get((progress, token))
        if after is None:
            tail = (*progress.tail, token)
            while tail not in self._beginnings:
                tail = tail[1:]
            ended = [any(tail[-len(phrase) :] == phrase for phrase in phrases) for phrases in self.distinct]
            still = tuple(max(0, times - ends) for times, ends in zip(progress.open, ended, strict=True))
            after = self._steps[progress, token] = Progress(still, tail)
        return after

    def next_tokens(self, progress: Progress) -> list[int]:
        """The tokens that begin or continue a phrase of an open constraint, each once."""
        phrases, tail = list(self._open_phrases(progress)), progress.tail
        ends = [tail[begin:] for begin in range(len(tail) + 1)]
        tokens = [phrase[len(end)] for end in ends for phrase in phrases if _continues(phrase, end)]
        return list(dict.fromkeys(tokens))

    def lacking(self, progress: Progress) -> int:
        """Tokens to satisfy all constraints: complete the best begun phrase, then write the others one after another.

        At every step some token reduces the number by at least 1, until it is 0.
        """
        fewest = self._lacking.get(progress)
        if fewest is None:
            fewest = self._apart(progress.open)
            for phrase, begun in self._begun(progress):
                fewest = min(fewest, len(phrase) - begun + self._apart(self._walk(progress, phrase[begun:]).open))
            self._lacking[progress] = fewest
        return fewest

    def needed(self, progress: Progress) -> int:
        """The fewest tokens that satisfy all constraints, with overlaps between phrases.

        With more than `EXACT` open constraints this is `lacking`.
        """
        fewest = self._needed.get(progress)
        if fewest is None:
            fewest = self.lacking(progress)
            if sum(progress.open) <= EXACT:
                begun = dict(self._begun(progress))
                for phrase in self._open_phrases(progress):
                    rest = phrase[begun.get(phrase, 0) :]
                    fewest = min(fewest, len(rest) + self.needed(self._walk(progress, rest)))
            self._needed[progress] = fewest
        return fewest

    def fits(self, progress: Progress, room: int) -> bool:
        """Whether `room` more tokens can satisfy all constraints."""
        return self.lacking(progress) <= room or self.needed(progress) <= room

    def open_in(self, tokens: Sequence[int]) -> list[int]:
        """The indices of the constraints that a text of new tokens does not satisfy."""
        progress = self.begin()
        for token in tokens:
            progress = self.step(progress, token)
        still = list(progress.open)
        open_constraints = []
        for place in reversed(range(len(self.numbers))):  # of equal constraints the last ones count as open
            if still[self.numbers[place]]:
                still[self.numbers[place]] -= 1
                open_constraints.append(place)
        return open_constraints[::-1]

    # -- what is left to write -----------------------------------------------------------------------------------------

    def _walk(self, progress: Progress, tokens: Phrase) -> Progress:
        for token in tokens:
            progress = self.step(progress, token)
        return progress

    def _apart(self, still: Sequence[int]) -> int:
        """Tokens for all open constraints, if no two phrases overlap."""
        return sum(times * length for times, length in zip(still, self.shortest, strict=True))

    def _open_phrases(self, progress: Progress) -> Iterator[Phrase]:
        open_phrases = (
            phrase for times, phrases in zip(progress.open, self.distinct, strict=True) if times for phrase in phrases
        )
        yield from dict.fromkeys(open_phrases)

    def _begun(self, progress: Progress) -> Iterator[tuple[Phrase, int]]:
        """The open phrases of which the text ends in a prefix, and the length of that prefix."""
        tail = progress.tail
        for phrase in self._open_phrases(progress):
            begun = next((tail[begin:] for begin in range(len(tail)) if _continues(phrase, tail[begin:])), ())
            if begun:
                yield phrase, len(begun)


def _continues(phrase: Phrase, begun: Phrase) -> bool:
    """Whether a phrase begins with `begun`, and has more tokens."""
    return len(phrase) > len(begun) and phrase[: len(begun)] == begun


def _least(alternatives: Set[Phrase]) -> Alternatives:
    """The alternatives that do not contain another one, in an order that does not depend on hashes."""
    return tuple(
        phrase
        for phrase in sorted(alternatives)
        if not any(phrase != other and _inside(other, phrase) for other in alternatives)
    )


def _inside(phrase: Phrase, other: Phrase) -> bool:
    return any(other[at : at + len(phrase)] == phrase for at in range(len(other) - len(phrase) + 1))
