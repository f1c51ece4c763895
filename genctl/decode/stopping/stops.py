"""Where texts are cut: at the earliest stop string or match of a pattern, or before a stop token.

Special tokens in stops are part of the searched text, but not of the shown text. `<|im_end|>` is one token, which
decoding skips; a stop string that names it would never match. So each special token that a stop names becomes one mark
in the searched text: half of a surrogate pair, which cannot occur in a text. A mark matches only the complete token, so
`>` does not match in `<|im_end|>`. Other special tokens are skipped. (vLLM and llama.cpp search the shown text, unless
an option shows special tokens; transformers searches the spelling of all tokens, and finds `>` in `<|im_end|>`.)
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from genctl.decode.stopping.thoughts import Thoughts
from genctl.errors import UsageError

_FIRST, _MOST = 0xD800, 0x800  # the halves of surrogate pairs
_UNMARKED = re.compile(r"\(\?P?<\w+>|\\[gk]<\w+>|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)  # names of groups, and sets
_SIGNS = ".^$*+?{}[]\\|()"
_STEP = re.compile(r"\\?.", re.DOTALL)


@dataclass(frozen=True)
class Marks:
    """The special tokens that stops name, each with its mark. Decoding skips their ids."""

    spelled: Mapping[str, str] = field(default_factory=dict)  # how a token is spelled -> its mark, the longest first
    ids: Mapping[int, str] = field(default_factory=dict)  # id -> its mark

    def stops(self, stops: Sequence[str]) -> dict[str, str]:
        """Searched string -> its stop string: each stop string as it is, and with marks."""
        searched = {stop: stop for stop in stops}
        for stop in stops:
            searched.setdefault(self._marked(stop), stop)
        return searched

    def pattern(self, source: str) -> str:
        """A regular expression that also finds the tokens it names, outside of sets and not repeated."""
        for text, mark in self.spelled.items():
            source = _also(source, text, mark)
        return source

    def clean(self, text: str) -> str:
        """The text without marks."""
        for mark in self.spelled.values():
            text = text.replace(mark, "")
        return text

    def _marked(self, stop: str) -> str:
        for text, mark in self.spelled.items():
            stop = stop.replace(text, mark)
        return stop


def marks(tokenizer: Any, special: Iterable[int], stops: Sequence[str], patterns: Sequence[str] = ()) -> Marks:
    """The marks for those of the ids `special` whose spelling is in a stop string or a regular expression."""
    spelled: dict[str, list[int]] = {}
    for token in special:
        text = _spelling(tokenizer, token)
        is_named = any(text in stop for stop in stops) or any(_also(source, text, "") != source for source in patterns)
        if text and is_named:
            spelled.setdefault(text, []).append(token)
    longest = sorted(spelled, key=lambda text: (-len(text), text))[:_MOST]
    table = {text: chr(_FIRST + place) for place, text in enumerate(longest)}
    return Marks(table, {token: table[text] for text in longest for token in spelled[text]})


def _spelling(tokenizer: Any, token: int) -> str:
    added = getattr(tokenizer, "added_tokens_decoder", {}).get(token)
    text = getattr(added, "content", None)
    return str(text if text is not None else tokenizer.convert_ids_to_tokens(token) or "")


def _finder(text: str) -> re.Pattern[str]:
    r"""Finds `text` in a regular expression: `<\|im_end\|>` for `<|im_end|>`, where it is not repeated."""
    slash = {True: r"\\", False: r"\\?"}  # needed before a metacharacter, optional before others
    letters = ("" if letter.isalnum() else slash[letter in _SIGNS] for letter in text)
    spelled = "".join(before + re.escape(letter) for before, letter in zip(letters, text, strict=True))
    return re.compile(spelled + r"(?![*+?{])")


def _also(source: str, text: str, mark: str) -> str:
    """A regular expression that finds `mark` too where it finds `text`, outside of sets."""
    if text not in source.replace("\\", ""):
        return source
    finder, result, at = _finder(text), "", 0
    while at < len(source):
        skipped = _UNMARKED.match(source, at)
        match = None if skipped else finder.match(source, at)
        if match:
            result += f"(?:{match[0]}|{mark})"
        else:
            match = skipped or _STEP.match(source, at)
            assert match is not None
            result += match[0]
        at = match.end()
    return result


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

        self.source, self.plain = source, source.replace("\\", "")
        if len(source) > REGEX_LENGTH:
            raise UsageError(
                f"the regular expression {self} has {len(source):,} characters, more than {REGEX_LENGTH:,}"
            )
        if _CALL.search(source):
            raise UsageError(f"the regular expression {self} calls itself, and may never end")
        if (size := _size(source)) > REGEX_SIZE:
            raise UsageError(f"the regular expression {self} repeats too much: it expands to {size:,} items")
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

    def find(self, text: str, thoughts: Thoughts | None = None) -> tuple[int, int] | None:
        """Where the first match in the last 4096 characters begins and ends, outside of `thoughts`.

        Incomplete characters do not count. Raises UsageError when the search takes longer than two seconds.
        """
        text = text.rstrip(BROKEN)
        start = max(0, len(text) - REGEX_WINDOW)
        try:
            matches = (
                self._compiled.search(text, max(start, begin), end, timeout=REGEX_SECONDS)
                for begin, end in parts_of(text, self.plain, thoughts)
                if end >= start
            )
            match = next(filter(None, matches), None)
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


def first(
    text: str, strings: Sequence[str], start: int = 0, thoughts: Thoughts | None = None
) -> tuple[int, str] | None:
    """The place of the earliest of `strings` in `text`, and the string; of several that begin there, the longest.

    Text before `start` is known to hold none of them: only those that end after it are searched, outside of `thoughts`.
    """
    places = (
        (text.find(string, max(begin, start - len(string) + 1), end), -len(string), string)
        for string in strings
        for begin, end in parts_of(text, string, thoughts)
    )
    at, _, string = min((place for place in places if place[0] >= 0), default=(-1, 0, ""))
    return (at, string) if string else None


def parts_of(text: str, stop: str, thoughts: Thoughts | None) -> Iterable[tuple[int, int]]:
    """The parts of a text in which a stop counts: outside of thoughts, or all if it names a tag."""
    if thoughts is None or thoughts.named_in(stop):
        return ((0, len(text)),)
    return thoughts.outside(text)


def _counts_from(stop: str, since: int, thoughts: Thoughts | None) -> int:
    """Where a stop may begin in what follows a text, in which stops that name no tag count `since` there."""
    return 0 if thoughts is None or thoughts.named_in(stop) else since


@dataclass(frozen=True)
class Stops:
    """What cuts the texts of a lane. Special tokens that stops name are marks in `strings`, `patterns` and texts."""

    strings: tuple[str, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    ids: frozenset[int] = frozenset()  # stop tokens whose text is not shown
    marks: Marks = field(default_factory=Marks)
    keep: bool = False  # whether the stop itself is shown
    thoughts: Thoughts | None = None  # in which strings and patterns do not count

    def cut(self, text: str) -> str:
        """The text before the earliest stop, or with it (`keep`); of several at one place the longest counts."""
        found = first(text, self.strings, thoughts=self.thoughts)
        spans = [] if found is None else [(found[0], found[0] + len(found[1]))]
        spans += [span for pattern in self.patterns if (span := pattern.find(text, self.thoughts)) is not None]
        start, end = min(spans, key=lambda span: (span[0], -span[1]), default=(len(text), len(text)))
        return text[: end if self.keep else start]

    def safe(self, text: str, start: int) -> int:
        """The place, `start` or behind it, before which no stop can begin any more, whatever follows `text`.

        With a pattern that counts it is `start`: where a match begins is not known before its end.
        """
        since, end = 0 if self.thoughts is None else self.thoughts.answer_start(text), len(text)
        if self.patterns and not self.keep:
            end = max(start, min(_counts_from(pattern.plain, since, self.thoughts) for pattern in self.patterns))
        for place in range(start, end):
            if text[place] in self._beginnings and any(
                string.startswith(text[place : place + len(string)])
                for string in self.strings
                if place >= _counts_from(string, since, self.thoughts)
            ):
                return place
        return end

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        """The first characters of the stop strings."""
        return frozenset(string[0] for string in self.strings)
