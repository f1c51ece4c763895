"""Phrases that must appear, and how far a text has come with them.

A promise is one phrase, or several of which one is enough. A text works at one promise at a time, as in transformers 4:
a token that breaks a phrase half-way puts the promise back at the end of the queue, and begins nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

Phrase: TypeAlias = tuple[int, ...]
Alternatives: TypeAlias = tuple[Phrase, ...]


@dataclass(frozen=True)
class Progress:
    """How far one text has come. A value: rows that fork share it."""

    open: tuple[int, ...]  # promises not begun, in the order in which they are tried
    kept: int = 0
    current: int | None = None  # the promise at work
    done: Phrase = ()  # what of it is written

    @property
    def complete(self) -> bool:
        return not self.open and self.current is None


class Promises:
    """What must appear in a text."""

    def __init__(self, wanted: Sequence[Alternatives]) -> None:
        self.wanted = [_shortest(alternatives) for alternatives in wanted]
        self.heights = [max(map(len, alternatives)) for alternatives in self.wanted]
        self.highest = max(self.heights, default=0)

    def __len__(self) -> int:
        return len(self.wanted)

    @property
    def least(self) -> int:
        """Tokens needed to keep all of them."""
        return sum(min(map(len, alternatives)) for alternatives in self.wanted)

    @property
    def tokens(self) -> set[int]:
        return {token for alternatives in self.wanted for phrase in alternatives for token in phrase}

    def begin(self) -> Progress:
        return Progress(tuple(range(len(self.wanted))))

    def bank(self, progress: Progress) -> int:
        """The number of steps taken; rows compete with those that have taken as many (arXiv:1804.06609)."""
        begun = 0
        if progress.current is not None:
            begun = self.highest - (self.heights[progress.current] - len(progress.done))
        return progress.kept * self.highest + begun

    def next_tokens(self, progress: Progress) -> list[int]:
        """The tokens that bring the text further, each once."""
        if progress.current is not None:
            return self._following(progress.current, progress.done)
        found = [token for promise in progress.open for token in self._following(promise, ())]
        return list(dict.fromkeys(found))

    def step(self, progress: Progress, token: int) -> Progress:
        """The progress after `token`."""
        if progress.complete:
            return progress
        if progress.current is not None:
            if token in self._following(progress.current, progress.done):
                return self._grow(progress, progress.current, (*progress.done, token))
            return replace(progress, open=(*progress.open, progress.current), current=None, done=())
        for promise in progress.open:
            if token in self._following(promise, ()):
                rest = tuple(other for other in progress.open if other != promise)
                return self._grow(replace(progress, open=rest), promise, (token,))
        return progress

    def _grow(self, progress: Progress, promise: int, done: Phrase) -> Progress:
        if done in self.wanted[promise]:
            return replace(progress, kept=progress.kept + 1, current=None, done=())
        return replace(progress, current=promise, done=done)

    def _following(self, promise: int, done: Phrase) -> list[int]:
        length = len(done)
        found = (phrase[length] for phrase in self.wanted[promise] if len(phrase) > length and phrase[:length] == done)
        return list(dict.fromkeys(found))


def _shortest(alternatives: Alternatives) -> Alternatives:
    """Without those that begin with another: that one is there before they are."""
    unique = tuple(dict.fromkeys(alternatives))
    return tuple(
        phrase for phrase in unique if not any(phrase != other and phrase[: len(other)] == other for other in unique)
    )
