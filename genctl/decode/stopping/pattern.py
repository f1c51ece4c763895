"""The regular expression of stop_regex."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

from genctl.decode.stopping.marks import Marks
from genctl.errors import UsageError

BROKEN = "\N{REPLACEMENT CHARACTER}"
REGEX_WINDOW = 4096  # a match must begin within this many last characters
REGEX_SECONDS = 2.0  # for one search
REGEX_LENGTH = 10_000  # characters of a pattern
REGEX_SIZE = 100_000  # items of a pattern with its counted repetitions written out

_CALL = re.compile(r"(?<!\\)\(\?(?:R|[0-9]+|&\w+|P>\w+)\)")  # recursion into the pattern or a group
_COUNT = re.compile(r"\{(\d*),?(\d*)\}")


class Pattern:
    """A regular expression in Python's syntax, compiled by the `regex` package because that can be timed out.

    `marks` are the special tokens that it names. Raises UsageError when it does not compile, or when it matches the
    empty text and would end every row at once.
    """

    def __init__(self, source: str, marks: Marks | None = None) -> None:
        import regex  # type: ignore[import-untyped, unused-ignore]  # it has no types

        self.source = source
        if len(source) > REGEX_LENGTH:
            raise UsageError(
                f"the regular expression {self} has {len(source):,} characters, more than {REGEX_LENGTH:,}"
            )
        if _CALL.search(source):
            raise UsageError(f"the regular expression {self} calls itself, and may never end")
        if (size := _size(source)) > REGEX_SIZE:
            raise UsageError(f"the regular expression {self} repeats too much: it stands for {size:,} items")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # FutureWarning about syntax
                self._compiled: Any = regex.compile(source if marks is None else marks.pattern(source))
        except regex.error as error:
            where = "" if error.pos is None else f" at position {error.pos}"
            raise UsageError(f"the regular expression {self} is wrong{where}: {error.msg}") from error
        except (RecursionError, OverflowError, ValueError, MemoryError) as error:
            why = str(error) or "it needs too much memory"
            raise UsageError(f"the regular expression {self} cannot be compiled: {why}") from error
        if self.find("") is not None:
            raise UsageError(f"the regular expression {self} matches the empty text and would end every row at once")

    def __str__(self) -> str:
        shown = self.source if len(self.source) <= 120 else f"{self.source[:119]}…"
        return f'"{shown}"' if shown.isprintable() else quoted(shown)

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
        except MemoryError as error:
            raise UsageError(f"the regular expression {self} needs too much memory") from error
        return None if match is None else match.span()


def _size(source: str) -> int:
    """How many items a pattern has with its counted repetitions written out: the cost of compiling it."""
    groups = [0]  # items of each open group
    last = at = 0  # items that a repetition would repeat
    while at < len(source):
        mark = source[at]
        if mark == "(":
            groups.append(0)
        elif mark == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif mark == "{" and (match := _COUNT.match(source, at)):
            times = max(int(number[:9] or 0) for number in match.groups())
            groups[-1] += last * (max(times, 1) - 1)
            last *= max(times, 1)
            at = match.end() - 1
        else:
            at += mark == "\\"
            last = 1
            groups[-1] += 1
        at += 1
    return sum(groups)


def quoted(text: str) -> str:
    """The text in double quotes, control characters as escapes."""
    return json.dumps(text, ensure_ascii=False)
