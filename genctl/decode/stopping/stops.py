"""Where texts are cut: at the earliest stop string or match of a pattern, or before a stop token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from genctl.decode.stopping.marks import Marks
from genctl.decode.stopping.pattern import Pattern


def first(text: str, strings: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """The place of the earliest of `strings` in `text`, and the string; of several that begin there, the longest.

    Text before `start` is known to hold none of them: only those that end after it are searched.
    """
    places = ((text.find(string, max(0, start - len(string) + 1)), -len(string), string) for string in strings)
    at, _, string = min((place for place in places if place[0] >= 0), default=(-1, 0, ""))
    return (at, string) if string else None


@dataclass(frozen=True)
class Stops:
    """What cuts the texts of a lane. Special tokens that stops name are marks in `strings`, `patterns` and texts."""

    strings: tuple[str, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    ids: frozenset[int] = frozenset()  # stop tokens whose text is not shown
    marks: Marks = field(default_factory=Marks)
    keep: bool = False  # whether the stop itself is shown

    def cut(self, text: str) -> str:
        """The text before the earliest stop, or with it (`keep`); of several at one place the longest counts."""
        found = first(text, self.strings)
        spans = [] if found is None else [(found[0], found[0] + len(found[1]))]
        spans += [span for pattern in self.patterns if (span := pattern.find(text)) is not None]
        start, end = min(spans, key=lambda span: (span[0], -span[1]), default=(len(text), len(text)))
        return text[: end if self.keep else start]

    def safe(self, text: str, start: int) -> int:
        """The place, `start` or behind it, before which no stop can begin any more, whatever follows `text`.

        With a pattern it is `start`: where a match begins is not known before its end.
        """
        if self.patterns and not self.keep:
            return start
        for place in range(start, len(text)):
            if text[place] in self._beginnings and any(
                string.startswith(text[place : place + len(string)]) for string in self.strings
            ):
                return place
        return len(text)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        """The first characters of the stop strings."""
        return frozenset(string[0] for string in self.strings)
