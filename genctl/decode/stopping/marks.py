"""Special tokens in stops: they are part of the searched text, but not of the shown text.

`<|im_end|>` is one token, which decoding skips; a stop string that names it would never match. So each special token
that a stop names becomes one mark in the searched text: half of a surrogate pair, which cannot occur in a text. A mark
matches only the complete token, so `>` does not match in `<|im_end|>`. Other special tokens are skipped. (vLLM and
llama.cpp search the shown text, unless an option shows special tokens; transformers searches the spelling of all
tokens, and finds `>` in `<|im_end|>`.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
