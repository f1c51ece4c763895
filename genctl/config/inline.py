"""Knobs on the command line as `setting=value,setting=value`. Commas inside quotes and brackets belong to the value."""

from __future__ import annotations

import json
from typing import Any

from genctl.config import presets
from genctl.config.check import known
from genctl.errors import UsageError

_OPEN, _CLOSE = "[{(", "]})"


def read_knobs(text: str, place: str, special: tuple[str, ...] = ()) -> dict[str, Any]:
    """`setting=value,setting=value` as values by name; `special` are names that no knob has.

    A name is not checked, except that - may stand for _. `place` begins every message. Raises UsageError.
    """
    values: dict[str, Any] = {}
    for part in split_pairs(text, place):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UsageError(f"{place}: {part.strip()!r} is not setting=value")
        names = (*known(), *special)
        if key not in names and (folded := key.replace("-", "_")) in names:
            key = folded
        if key in values:
            raise UsageError(f"{place}: {key} is said twice")
        values[key] = parse_value(key, value.strip())
    return values


def split_pairs(text: str, place: str) -> list[str]:
    """The parts between commas outside quotes and brackets. Raises UsageError if one is not closed."""
    parts, begin, depth, quote, skip = [], 0, 0, "", False
    for at, letter in enumerate(text):
        if skip:
            skip = False
        elif quote:
            skip = letter == "\\" and quote == '"'
            quote = "" if letter == quote else quote
        elif letter == '"' or (letter == "'" and text[:at].rstrip()[-1:] in ("=", "[", ",", ":", "{")):
            quote = letter  # an apostrophe inside a word is no quote
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth -= 1
        elif letter == "," and depth <= 0:
            parts.append(text[begin:at])
            begin = at + 1
    if quote or depth > 0:
        raise UsageError(f"{place}: a {'quote' if quote else 'bracket'} is not closed in {text!r}")
    parts.append(text[begin:])
    if not "".join(parts).strip():
        return []
    return parts


def parse_value(key: str, text: str) -> Any:
    """A value as JSON if it is JSON (`true`, `{"a": 1}`, `null`), else as TOML, else the bare text."""
    if text == "null" or text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass
    return presets.parse_value(key, text)
