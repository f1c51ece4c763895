"""Phrases that must appear, and how far a text has come with them.

A promise is one phrase, or several of which one is enough. It is kept as soon as a phrase of it is in the new tokens,
wherever it begins: phrases may overlap, lie inside one another, or begin inside a broken attempt at another. All of
them are followed at once by one automaton (Aho and Corasick 1975, doi:10.1145/360825.360855). A promise that is made
twice needs two places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple, TypeAlias

Phrase: TypeAlias = tuple[int, ...]
Alternatives: TypeAlias = tuple[Phrase, ...]

EXACT = (
    8  # open promises for which the shortest completion is searched; above, overlaps between phrases are not counted
)


class Progress(NamedTuple):
    """How far one text has come. A value: rows that fork share it."""

    open: tuple[int, ...]  # for each promise how often it has still to be kept
    node: int = 0  # of the automaton: the longest end of the text with which a phrase begins

    @property
    def complete(self) -> bool:
        return not any(self.open)


class Promises:
    """What must appear in a text."""

    def __init__(self, wanted: Sequence[Alternatives]) -> None:
        given = [frozenset(alternatives) for alternatives in wanted]
        each = list(dict.fromkeys(given))
        self.wanted = [_least(alternatives) for alternatives in each]  # each promise once
        self.times = tuple(given.count(alternatives) for alternatives in each)  # and how often it is made
        self.numbers = [each.index(alternatives) for alternatives in given]
        self.shortest = [min(map(len, phrases)) for phrases in self.wanted]
        self.tokens = frozenset(token for phrases in self.wanted for phrase in phrases for token in phrase)
        self._grow()
        self._steps: dict[tuple[Progress, int], Progress] = {}
        self._lacking: dict[Progress, int] = {}
        self._needed: dict[Progress, int] = {}
        self._overlaps: dict[tuple[Phrase, Phrase], int] = {}

    def __len__(self) -> int:
        """Promises, each as often as it is made."""
        return sum(self.times)

    def begin(self) -> Progress:
        return Progress(self.times)

    def kept(self, progress: Progress) -> int:
        """Promises kept so far."""
        return len(self) - sum(progress.open)

    def step(self, progress: Progress, token: int) -> Progress:
        """The progress after `token`."""
        if token not in self.tokens:
            return Progress(progress.open)
        known = self._steps.get((progress, token))
        if known is None:
            node = self._next(progress.node, token)
            still = list(progress.open)
            for promise in self._ends[node]:
                still[promise] = max(0, still[promise] - 1)
            known = self._steps[progress, token] = Progress(tuple(still), node)
        return known

    def next_tokens(self, progress: Progress) -> list[int]:
        """The tokens that begin a phrase of an open promise, or go on with one; each once."""
        found = [
            token
            for node in self._suffixes(progress.node)
            for token, child in self._children[node].items()
            if any(progress.open[promise] for promise in self._leads[child])
        ]
        return list(dict.fromkeys(found))

    def lacking(self, progress: Progress) -> int:
        """Tokens with which all promises can be kept: the best phrase is finished, the others follow one by one.

        Some token takes it down by one at least, until it is 0.
        """
        known = self._lacking.get(progress)
        if known is None:
            known = self._apart(progress.open)
            for phrase, begun in self._begun(progress):
                known = min(known, len(phrase) - begun + self._apart(self._walk(progress, phrase[begun:]).open))
            self._lacking[progress] = known
        return known

    def needed(self, progress: Progress) -> int:
        """The fewest tokens with which all promises can be kept, where phrases overlap as well.

        With more than `EXACT` open promises it is `lacking`.
        """
        known = self._needed.get(progress)
        if known is None:
            known = self.lacking(progress)
            if sum(progress.open) <= EXACT and self.bound(progress) < known:
                begun = dict(self._begun(progress))
                for phrase in self._open_phrases(progress):
                    rest = phrase[begun.get(phrase, 0) :]
                    known = min(known, len(rest) + self.needed(self._walk(progress, rest)))
            self._needed[progress] = known
        return known

    def fits(self, progress: Progress, room: int) -> bool:
        """Whether all promises can be kept with `room` more tokens."""
        return self.lacking(progress) <= room or self.needed(progress) <= room

    def least(self) -> int:
        """A number of tokens below which the promises cannot be kept: the fewest, with up to `EXACT` promises."""
        begin = self.begin()
        return self.needed(begin) if len(self) <= EXACT else self.bound(begin)

    def bound(self, progress: Progress) -> int:
        """A number of tokens below which the promises cannot be kept.

        Each phrase takes its length, less the most that any other, or the text so far, can share with it.
        """
        phrases = list(self._open_phrases(progress))
        begun = dict(self._begun(progress))
        total = 0
        for promise, times in enumerate(progress.open):
            if not times:
                continue
            others = [other for other in phrases if other not in self.wanted[promise] or self._shared(other, progress)]
            if any(_inside(phrase, other) for phrase in self.wanted[promise] for other in others):
                continue
            total += times * min(
                len(phrase) - max(begun.get(phrase, 0), *(self._overlap(other, phrase) for other in phrases))
                for phrase in self.wanted[promise]
            )
        return total

    def open_in(self, tokens: Sequence[int]) -> list[int]:
        """Which of the promises, numbered as they were given, are not kept in a text of new tokens."""
        progress = self.begin()
        for token in tokens:
            progress = self.step(progress, token)
        still = list(progress.open)
        found = []
        for place in reversed(range(len(self.numbers))):  # of equal ones the last are those that are missing
            if still[self.numbers[place]]:
                still[self.numbers[place]] -= 1
                found.append(place)
        return found[::-1]

    # -- the automaton -------------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        """A tree of all phrases, with a link from each node to the longest proper end of its text that is a node."""
        self._children: list[dict[int, int]] = [{}]
        self._links = [0]
        self._depths = [0]
        ends: list[set[int]] = [set()]  # promises of which a phrase ends with the text of the node
        self._leads: list[set[int]] = [set()]  # promises of which a phrase begins with it
        self._prefixes: list[list[Phrase]] = [[]]  # the phrases that are longer than it and begin with it
        for promise, phrases in enumerate(self.wanted):
            for phrase in phrases:
                node = 0
                for token in phrase:
                    if phrase not in self._prefixes[node]:
                        self._prefixes[node].append(phrase)
                    if token not in self._children[node]:
                        self._children[node][token] = len(self._links)
                        self._children.append({})
                        self._links.append(0)
                        self._depths.append(self._depths[node] + 1)
                        ends.append(set())
                        self._leads.append(set())
                        self._prefixes.append([])
                    node = self._children[node][token]
                    self._leads[node].add(promise)
                ends[node].add(promise)
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            for token, child in self._children[node].items():
                self._links[child] = self._next(self._links[node], token)
                ends[child] |= ends[self._links[child]]
                queue.append(child)
        self._ends = [tuple(sorted(found)) for found in ends]

    def _next(self, node: int, token: int) -> int:
        while node and token not in self._children[node]:
            node = self._links[node]
        return self._children[node].get(token, 0)

    def _suffixes(self, node: int) -> Iterator[int]:
        """A node and what its links lead to, the root last."""
        while node:
            yield node
            node = self._links[node]
        yield 0

    # -- what is left to write -----------------------------------------------------------------------------------------

    def _walk(self, progress: Progress, tokens: Phrase) -> Progress:
        for token in tokens:
            progress = self.step(progress, token)
        return progress

    def _apart(self, still: Sequence[int]) -> int:
        """Tokens for all that is open, where no phrase shares any with another."""
        return sum(times * length for times, length in zip(still, self.shortest, strict=True))

    def _open_phrases(self, progress: Progress) -> Iterator[Phrase]:
        found = (
            phrase for times, phrases in zip(progress.open, self.wanted, strict=True) if times for phrase in phrases
        )
        yield from dict.fromkeys(found)

    def _begun(self, progress: Progress) -> Iterator[tuple[Phrase, int]]:
        """The open phrases with which the text ends, and how much of each is there: less than all of it."""
        wanted = set(self._open_phrases(progress))
        for node in self._suffixes(progress.node):
            for phrase in self._prefixes[node] if node else ():
                if phrase in wanted:
                    wanted.discard(phrase)
                    yield phrase, self._depths[node]

    def _overlap(self, first: Phrase, then: Phrase) -> int:
        """How many of the last tokens of `first` can be the first ones of `then`, which is not whole with them."""
        known = self._overlaps.get((first, then))
        if known is None:
            most = min(len(first), len(then) - 1)
            known = next((n for n in range(most, 0, -1) if first[-n:] == then[:n]), 0)
            self._overlaps[first, then] = known
        return known

    def _shared(self, phrase: Phrase, progress: Progress) -> bool:
        """Whether several open promises have this phrase."""
        promises = zip(progress.open, self.wanted, strict=True)
        return sum(bool(times) and phrase in phrases for times, phrases in promises) > 1


def _least(alternatives: Set[Phrase]) -> Alternatives:
    """Without those that hold another: that one is there when they are. In an order that does not depend on hashes."""
    return tuple(
        phrase
        for phrase in sorted(alternatives)
        if not any(phrase != other and _inside(other, phrase) for other in alternatives)
    )


def _inside(phrase: Phrase, other: Phrase) -> bool:
    return any(other[at : at + len(phrase)] == phrase for at in range(len(other) - len(phrase) + 1))
