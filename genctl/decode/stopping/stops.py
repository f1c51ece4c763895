"""Where texts are cut: at the earliest stop string or match of a pattern, or before a stop token.

Special tokens in stops are part of the searched text, but not of the shown text. `<|im_end|>` is one token, which
decoding skips; a stop string that names it would never match. So each special token that a stop names becomes one mark
in the searched text: half of a surrogate pair, which cannot occur in a text. A mark matches only the complete token, so
`>` does not match in `<|im_end|>`. Other special tokens are skipped. (vLLM and llama.cpp search the shown text, unless
an option shows special tokens; transformers searches the spelling of all tokens, and finds `>` in `<|im_end|>`.)

Also the thinking tags: which ones a checkpoint has, and which parts of a text are outside them.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from genctl.errors import UsageError
from genctl.params import THOUGHT_TAGS


class Tags(NamedTuple):
    """Thinking tags."""

    opening: str
    closing: str
    end: str = ""  # the text that ends the thinking, if the closing tag alone does not

    def is_open_in(self, text: str) -> bool:
        """Whether a text ends between the tags."""
        return text.rfind(self.opening) > text.rfind(self.closing)


# the tags of `THOUGHT_TAGS`, and of gpt-oss, Command A, Kimi
FAMILIES = (
    *(Tags(opening, closing) for opening, closing in THOUGHT_TAGS),
    Tags("<|channel|>analysis<|message|>", "<|end|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("◁think▷", "◁/think▷"),
)


def added_tokens(tokenizer: Any) -> dict[int, Any]:
    """The added tokens of a tokenizer by id: those of its backend, if it has one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = getattr(tokenizer, "added_tokens_decoder", {}) if backend is None else backend.get_added_tokens_decoder()
    return dict(added)


def tags_of(tokenizer: Any) -> Tags | None:
    """The first family with tags that are in the chat template, or else in the vocabulary; None without any."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    added = {token.content for token in added_tokens(tokenizer).values()}
    for is_known in (template.__contains__, added.__contains__):
        for tags in FAMILIES:
            if is_known(tags.opening) and is_known(tags.closing):
                return tags
    return None


@dataclass(frozen=True)
class Thoughts:
    """The parts of new texts that are thinking."""

    openings: tuple[str, ...]  # the opening tag, in each spelling that can occur in a text
    closings: tuple[str, ...]
    is_open: bool  # at the beginning of the text

    def outside(self, text: str) -> Iterator[tuple[int, int]]:
        """Start and end of each part of a text that is neither thinking nor a tag."""
        at, is_open = 0, self.is_open
        while True:
            places = [(text.find(tag, at), -len(tag)) for tag in (self.closings if is_open else self.openings)]
            place, length = min((place for place in places if place[0] >= 0), default=(len(text), 0))
            if not is_open:
                yield at, place
            if not length:
                return
            at, is_open = place - length, not is_open

    def answer_start(self, text: str) -> int:
        """The start of the last part outside thinking, which may continue; the text's length if thinking is open."""
        begin, end = max(self.outside(text), default=(0, 0))
        return begin if end == len(text) else len(text)

    def named_in(self, stop: str) -> bool:
        """Whether a stop contains a tag: such a stop also counts within thinking."""
        return any(tag in stop for tag in (*self.openings, *self.closings))


_FIRST, _MOST = 0xD800, 0x800  # the halves of surrogate pairs


@dataclass(frozen=True)
class Marks:
    """The special tokens that stops name, each with its mark. Decoding skips their ids."""

    spelled: Mapping[str, str] = field(default_factory=dict)  # a token's spelling -> its mark, the longest first
    ids: Mapping[int, str] = field(default_factory=dict)  # id -> its mark

    def strings(self, stops: Sequence[str]) -> tuple[str, ...]:
        """The strings to search: each stop string as it is, and with marks."""
        marked = []
        for stop in stops:
            for text, mark in self.spelled.items():
                stop = stop.replace(text, mark)
            marked.append(stop)
        return tuple(dict.fromkeys([*stops, *marked]))

    def name(self, searched: str) -> str:
        """The stop string for which `searched` is searched."""
        return searched.translate({ord(mark): text for text, mark in self.spelled.items()})

    def pattern(self, source: str) -> str:
        """`source`, changed to also match tokens that it spells with metacharacters escaped and no quantifier."""
        for text, mark in self.spelled.items():
            source = _finder(text).sub(rf"(?:\g<0>|{mark})", source)
        return source

    def clean(self, text: str) -> str:
        """The text without marks."""
        for mark in self.spelled.values():
            text = text.replace(mark, "")
        return text


def marks(tokenizer: Any, special: Iterable[int], stops: Sequence[str], patterns: Sequence[str] = ()) -> Marks:
    """The marks for the ids in `special` that are spelled in a stop string or a regular expression."""
    spelled: dict[str, list[int]] = {}
    for token in special:
        added = getattr(tokenizer, "added_tokens_decoder", {}).get(token)
        text = getattr(added, "content", None)
        text = str(text if text is not None else tokenizer.convert_ids_to_tokens(token) or "")
        if text and (any(text in stop for stop in stops) or any(map(_finder(text).search, patterns))):
            spelled.setdefault(text, []).append(token)
    longest = sorted(spelled, key=lambda text: (-len(text), text))[:_MOST]
    table = {text: chr(_FIRST + place) for place, text in enumerate(longest)}
    return Marks(table, {token: table[text] for text in longest for token in spelled[text]})


def _finder(text: str) -> re.Pattern[str]:
    r"""Finds `text` in a regular expression: `<\|im_end\|>` for `<|im_end|>`, but not as the name of a group."""
    return re.compile(r"(?<!\(\?)(?<!\(\?P)" + re.escape(re.escape(text)) + r"(?![*+?{])")


BROKEN = "\N{REPLACEMENT CHARACTER}"
REGEX_WINDOW = 4096  # a match must begin within the last so many characters
REGEX_SECONDS = 2.0  # time limit of one search
REGEX_SIZE = 1_000_000  # most characters with all counted repetitions expanded as if they were nested

_CALL = re.compile(r"(?<!\\)\(\?(?:R|[0-9]+|&\w+|P>\w+)\)")  # recursion into the pattern or a group
_COUNT = re.compile(r"\{(\d*),?(\d*)\}")


class Pattern:
    """A regular expression in Python's syntax, compiled by the `regex` package because that supports a timeout.

    `marks` are the special tokens that it names. Raises UsageError if it calls itself, is too large or does not
    compile, or if it matches the empty text and would end every row at once.
    """

    def __init__(self, source: str, marks: Marks | None = None) -> None:
        import regex  # type: ignore[import-untyped, unused-ignore]  # it has no types

        self.source, self.plain = source, source.replace("\\", "")
        if _CALL.search(source):
            raise UsageError(f"the regular expression {self} calls itself, and may never end")
        counts = [max(int(number[:9] or 0) for number in pair) for pair in _COUNT.findall(source)]
        if len(source) * math.prod(max(count, 1) for count in counts) > REGEX_SIZE:
            raise UsageError(f"the regular expression {self} is too long, or repeats too much")
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
        """Start and end of the first match in the last 4096 characters, outside `thoughts`.

        An incomplete last character does not count. Raises UsageError if a search takes longer than two seconds.
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


def quoted(text: str) -> str:
    """The text in double quotes, with control characters escaped."""
    return json.dumps(text, ensure_ascii=False)


class Match(NamedTuple):
    """A stop in a text."""

    start: int
    end: int
    what: str  # the stop string as given, or the source of the pattern
    kind: str  # string | regex


@dataclass(frozen=True)
class Stops:
    """The stops that cut a lane's texts. Special tokens that they name are marks in `strings`, `patterns` and texts."""

    strings: tuple[str, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    ids: frozenset[int] = frozenset()  # stop tokens whose text is not shown
    marks: Marks = field(default_factory=Marks)
    keep: bool = False  # whether the stop itself is shown
    thoughts: Thoughts | None = None  # in which strings and patterns do not count

    def find(self, text: str, since: int = 0) -> Match | None:
        """The earliest stop in a text, and the longest of those that begin there.

        The text before `since` is known to contain no stop string: only those that end after it are searched.
        """
        places = [
            (text.find(string, max(begin, since - len(string) + 1), end), -len(string), string)
            for string in self.strings
            for begin, end in parts_of(text, string, self.thoughts)
        ]
        at, length, string = min((place for place in places if place[0] >= 0), default=(-1, 0, ""))
        found = [Match(at, at - length, self.marks.name(string), "string")] if string else []
        for pattern in self.patterns:
            if (span := pattern.find(text, self.thoughts)) is not None:
                found.append(Match(*span, pattern.source, "regex"))
        return min(found, key=lambda match: (match.start, -match.end), default=None)

    def cut(self, text: str) -> str:
        """The text up to the earliest stop; with `keep`, the stop included."""
        match = self.find(text)
        return text if match is None else text[: match.end if self.keep else match.start]

    def safe(self, text: str, start: int) -> int:
        """The place, at least `start`, before which no stop can begin any more, whatever follows `text`.

        Without `keep`, a pattern holds back all text in which it counts: a match's start is not known before its end.
        """
        since, end = 0 if self.thoughts is None else self.thoughts.answer_start(text), len(text)

        def counts_from(stop: str) -> int:
            return 0 if self.thoughts is None or self.thoughts.named_in(stop) else since

        if self.patterns and not self.keep:
            end = max(start, min(counts_from(pattern.plain) for pattern in self.patterns))
        for place in range(start, end):
            if text[place] in self._beginnings and any(
                string.startswith(text[place : place + len(string)])
                for string in self.strings
                if place >= counts_from(string)
            ):
                return place
        return end

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        """The first characters of the stop strings."""
        return frozenset(string[0] for string in self.strings)


def parts_of(text: str, stop: str, thoughts: Thoughts | None) -> Iterable[tuple[int, int]]:
    """The parts of a text in which a stop counts: those outside thinking, or all if it names a tag."""
    if thoughts is None or thoughts.named_in(stop):
        return ((0, len(text)),)
    return thoughts.outside(text)
