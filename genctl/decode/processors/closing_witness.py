"""A shortest text of each regular expression and string of a grammar.

A pattern without anchors allows any token until the pattern is complete, so what may follow does not tell how much of
it is still missing. Its shortest text does: llguidance intersects the pattern with a maximum length, and the least
length that leaves a text is found by bisection.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from genctl.decode.processors.token_bytes import llguidance_tokenizer

_MOST = 16  # texts of a grammar
_LONGEST = 1024  # characters of a text
_FARTHEST = 100_000  # tokens that a token can require
_MOST_FORMAT = 64  # characters that a format requires at most
_MARK = "%json "
_PREFERRED = b'"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789'


@lru_cache(maxsize=64)
def witnesses(lark: str) -> tuple[bytes, ...]:
    """Shortest texts of the patterns in a grammar; those of JSON strings with their quotes."""
    header, _, body = lark.partition("\n")
    if body.startswith(f"start: {_MARK}"):
        made = dict.fromkeys(json.dumps(part) for part in _strings(json.loads(body.partition(_MARK)[2])))
        parts = [_json_string(header, text) for text in made]
    else:
        found = re.findall(r"(?<![\w/])/((?:\\.|[^/\\\n])+)/([a-z]*)", body)
        parts = [_terminal(header, *pattern) for pattern in dict.fromkeys(found)]
    texts = (_shortest(part) for part in parts[:_MOST])
    return tuple(text for text in texts if text)


@lru_cache(maxsize=64)
def literals(lark: str) -> str:
    """The parts of a grammar that may stand in its texts."""
    _, _, body = lark.partition("\n")
    return "\n".join(_literals(json.loads(body.partition(_MARK)[2]))) if body.startswith(f"start: {_MARK}") else body


def _literals(part: Any, word: str = "") -> Iterator[str]:
    if isinstance(part, list):
        for inner in part:
            yield from _literals(inner, word)
    elif isinstance(part, dict):
        if word in ("properties", "patternProperties"):
            yield from part
        for key, inner in part.items():
            yield from _literals(inner, key if word != "properties" else "")
    elif word in ("const", "enum", "pattern", "required"):
        yield json.dumps(part, ensure_ascii=False)


def _strings(part: Any) -> Iterator[dict[str, Any]]:
    """The conditions on strings in a schema, those on keys included."""
    if isinstance(part, list):
        for inner in part:
            yield from _strings(inner)
    if not isinstance(part, dict):
        return
    words = {key: part[key] for key in ("pattern", "format", "minLength", "maxLength") if key in part}
    if {"pattern", "format", "minLength"} & set(words):
        yield words
    keys = part.get("patternProperties")
    if isinstance(keys, dict):
        yield from ({"pattern": key} for key in keys)
    for inner in part.values():
        yield from _strings(inner)


@lru_cache(maxsize=64)
def reach(lark: str) -> int:
    """How many tokens one more token can require: what the grammar spells out, and what it repeats."""
    _, _, body = lark.partition("\n")
    repeated = _repeated(body)
    if body.startswith(f"start: {_MARK}"):
        root = json.loads(body.partition(_MARK)[2])
        known: dict[str, int] = {}
        repeated = max((_least(part, root, known) for part in _parts(root)), default=0)
    return min(len(body) + _MOST_FORMAT + repeated, _FARTHEST)


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _parts(inner)


def _least(part: Any, root: Any, known: dict[str, int]) -> int:
    """About how many bytes a value needs; a reference inside itself counts nothing."""
    if not isinstance(part, dict):
        return 0
    least = 0
    if isinstance(pointer := part.get("$ref"), str):
        if pointer not in known:
            known[pointer] = 0
            known[pointer] = _least(_target(root, pointer), root, known)
        least = known[pointer]
    for word in ("anyOf", "oneOf"):
        if isinstance(part.get(word), list):
            least += min((_least(inner, root, known) for inner in part[word]), default=0)
    if isinstance(part.get("allOf"), list):
        least += sum(_least(inner, root, known) for inner in part["allOf"])
    named = part.get("properties")
    if isinstance(named, dict) and isinstance(part.get("required"), list):
        least += sum(len(str(key)) + 5 + _least(named.get(key), root, known) for key in part["required"])
    least += _number(part.get("minItems")) * (2 + _least(part.get("items"), root, known))
    least += _number(part.get("minLength")) + _number(part.get("minProperties"))
    if isinstance(part.get("pattern"), str):
        least += _repeated(part["pattern"])
    return min(least, _FARTHEST)


def _target(root: Any, pointer: str) -> Any:
    for step in pointer.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _number(value: Any) -> int:
    return int(value) if isinstance(value, (int, float)) and 0 <= value <= _FARTHEST else 0


def _repeated(pattern: str) -> int:
    """How much the counts of a pattern can require; counts of groups may stand in others."""
    counts = [int(count) for count in re.findall(r"\{(\d{1,5})[,}]", pattern)]
    nested = bool(re.search(r"\)\{", pattern))
    return min((math.prod(max(count, 1) for count in counts) * len(pattern)) if nested else sum(counts), _FARTHEST)


def _json_string(header: str, text: str) -> Callable[[int], str]:
    schema = json.loads(text)

    def limited(most: int) -> str:
        limit = schema.get("maxLength", most)
        limit = most if not isinstance(limit, int) else min(limit, most)
        return f"{header}\nstart: {_MARK}{json.dumps({**schema, 'type': 'string', 'maxLength': limit})}"

    return limited


def _terminal(header: str, pattern: str, flags: str) -> Callable[[int], str]:
    return lambda most: f"{header}\nstart: TEXT\nTEXT: /{pattern}/{flags} & /(?s:.{{0,{most}}})/"


def _shortest(limited: Callable[[int], str]) -> bytes:
    """The text of the least length; b"" if there is none of at most `_LONGEST` characters."""
    most, text = 4, b""
    while not (text := _text(limited(most))):
        most *= 4
        if most > _LONGEST:
            return b""
    low, high = (0 if most == 4 else most // 4 + 1), most
    while low < high:
        middle = (low + high) // 2
        shorter = _text(limited(middle))
        if shorter:
            text, high = shorter, middle
        else:
            low = middle + 1
    return text


def _text(lark: str) -> bytes:
    """A text of a grammar whose texts have a maximum length; b"" if it has none, or the empty one."""
    from llguidance import LLMatcher

    matcher, text = LLMatcher(_bytes(), LLMatcher.grammar_from_lark(lark), log_level=0), bytearray()
    while not matcher.is_error() and not matcher.is_accepting():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")[:256]
        allowed = np.flatnonzero(bits).tolist()
        if not allowed or len(text) > 4 * _LONGEST:
            return b""
        byte = next((one for one in _PREFERRED if bits[one]), allowed[0])
        matcher.consume_token(byte)
        text.append(byte)
    return b"" if matcher.is_error() else bytes(text)


@lru_cache(maxsize=1)
def _bytes() -> Any:
    return llguidance_tokenizer([bytes([byte]) for byte in range(256)])
