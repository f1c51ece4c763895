"""Criteria on the text: stop strings and a regular expression."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from typing import Any

from genctl.decode.stopping.tail import BROKEN, TailText
from genctl.decode.stopping.trim import trim
from genctl.decode.types import Written
from genctl.errors import UsageError

REGEX_WINDOW = 4096  # characters: a match must begin within the last so many
REGEX_SECONDS = 2.0  # for one search


@dataclass(frozen=True)
class StopStrings:
    """Ends a row with the first token after which its text holds one of `stops`, wherever the tokens begin and end."""

    stops: tuple[str, ...]
    text: TailText

    def __call__(self, written: Written) -> tuple[str, str] | None:
        if self.text.silent(written.token):
            return None
        texts, whole = self.text.ends(written, max(map(len, self.stops)))
        if not any(stop in text for stop in self.stops for text in texts):
            return None
        found = trim(texts[0] if whole else self.text.whole(written), self.stops)[1]
        return ("stop", f"string {quoted(found)}") if found else None


@dataclass(frozen=True)
class StopRegex:
    """Ends a row with the first token after which `pattern` matches in the last 4096 characters of its text.

    To the pattern the text so far is all there is: `$` matches after every token.
    """

    pattern: Pattern
    text: TailText

    def __call__(self, written: Written) -> tuple[str, str] | None:
        if self.text.silent(written.token):
            return None
        texts, whole = self.text.ends(written, REGEX_WINDOW)
        if all(self.pattern.find(text) is None for text in texts):
            return None
        if not whole and self.pattern.find(self.text.whole(written)) is None:
            return None
        return "stop", f"regex {self.pattern.source}"


class Pattern:
    """A regular expression in Python's syntax, compiled by the `regex` package because that can be timed out.

    Raises UsageError when it does not compile, or when it matches the empty text and would end every row at once.
    """

    def __init__(self, source: str) -> None:
        import regex  # type: ignore[import-untyped, unused-ignore]

        self.source = source
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of syntax that may mean something else one day
                self._compiled: Any = regex.compile(source)
        except regex.error as error:
            where = "" if error.pos is None else f" at position {error.pos}"
            raise UsageError(f"the regular expression {self} is wrong{where}: {error.msg}") from error
        except (RecursionError, OverflowError, ValueError) as error:
            raise UsageError(f"the regular expression {self} cannot be compiled: {error}") from error
        if self.find("") is not None:
            raise UsageError(f"the regular expression {self} matches the empty text and would end every row at once")

    def __str__(self) -> str:
        return f'"{self.source}"' if self.source.isprintable() else quoted(self.source)

    def find(self, text: str) -> tuple[int, int] | None:
        """Where the first match in the last 4096 characters begins and ends; incomplete characters do not count.

        Raises UsageError when the search takes longer than two seconds.
        """
        text = text.rstrip(BROKEN)
        try:
            match = self._compiled.search(text, max(0, len(text) - REGEX_WINDOW), timeout=REGEX_SECONDS)
        except TimeoutError as error:
            raise UsageError(
                f"the regular expression {self} searched for more than {REGEX_SECONDS:g} s",
                hint="repetitions inside repetitions, such as (a+)+, take very long when they do not match",
            ) from error
        return None if match is None else match.span()


def quoted(text: str) -> str:
    """The text in double quotes, control characters as escapes."""
    return json.dumps(text, ensure_ascii=False)
