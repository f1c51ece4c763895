"""Values and strings in a JSON Schema: finite sets, their complements, and formats as patterns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

TYPES = ("null", "boolean", "number", "string", "array", "object")
_MOST = 64  # values of a small range of integers

# Formats that llguidance has, by their grammar; all other names are annotations, or stand in `PATTERNS`.
FORMATS = frozenset({"email", "hostname", "ipv4", "uri", "uuid", "duration"})

_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX = "[0-9a-fA-F]{1,4}"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"


def _ipv6() -> str:
    """RFC 4291: eight groups, `::` for any that are zero, and an IPv4 address in place of the last two."""
    last = f"(?:{_HEX}:{_HEX}|{_IPV4})"
    ways = [f"(?:{_HEX}:){{6}}{last}"]
    for after in range(6):  # groups between `::` and the last two
        before = 5 - after
        lead = f"(?:{_HEX}(?::{_HEX}){{0,{before - 1}}})?" if before else ""
        ways.append(f"{lead}::(?:{_HEX}:){{{after}}}{last}")
    ways += [f"(?:{_HEX}(?::{_HEX}){{0,5}})?::{_HEX}", f"(?:{_HEX}(?::{_HEX}){{0,6}})?::"]
    return "|".join(ways)


# Formats that llguidance lacks, or takes too widely.
PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv6": _ipv6(),
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
PATTERNS = {name: f"^(?:{pattern})$" for name, pattern in PATTERNS.items()}


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where 1 is 1.0 and true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def distinct(values: Iterable[Any]) -> list[Any]:
    """The values without those that are equal to an earlier one."""
    found: list[Any] = []
    for value in values:
        if not any(same(value, earlier) for earlier in found):
            found.append(value)
    return found


def kind_of(value: Any) -> str:
    """The type of a value, as a schema names it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def has_type(value: Any, types: Sequence[str]) -> bool:
    """Whether a value is of one of these types."""
    kind = kind_of(value)
    return kind in types or (kind == "number" and "integer" in types and float(value).is_integer())


def other_types(kind: str) -> list[str]:
    """All types but one."""
    return [one for one in TYPES if one != kind]


def types_of(schema: Any) -> list[str] | None:
    """The types that a schema names; None if it names none."""
    value = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(value, str):
        return [value]
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else None


def finite(schema: Any) -> list[Any] | None:
    """All values of a schema; None if there are many, or if other keywords decide too."""
    if not isinstance(schema, dict):
        return [] if schema is False else None
    words = set(schema) - {"title", "description", "default", "examples", "$comment"}
    types = types_of(schema)
    if words <= {"type", "enum"} and isinstance(schema.get("enum"), list):
        return distinct(value for value in schema["enum"] if types is None or has_type(value, types))
    if words <= {"type", "const"} and "const" in schema:
        return [schema["const"]] if types is None or has_type(schema["const"], types) else []
    if words == {"type"} and types and set(types) <= {"null", "boolean"}:
        return [value for kind in types for value in ((None,) if kind == "null" else (False, True))]
    if words == {"type", "minimum", "maximum"} and types == ["integer"]:
        low, high = schema["minimum"], schema["maximum"]
        if all(isinstance(end, int) and not isinstance(end, bool) for end in (low, high)) and high - low < _MOST:
            return list(range(low, high + 1))
    if words in ({"anyOf"}, {"oneOf"}):
        parts = [finite(part) for part in next(iter(schema[word] for word in ("anyOf", "oneOf") if word in schema))]
        if all(part is not None for part in parts):
            return distinct(value for part in parts for value in part or ())
    return None


def others(values: Sequence[Any], types: Sequence[str] | None) -> list[Any] | None:
    """Schemas of all values of these types (None: of any type) but `values`; None if they cannot be written."""
    parts: list[Any] = []
    for kind in TYPES if types is None else types:
        excluded = [value for value in values if has_type(value, [kind])]
        if not excluded:
            parts.append({"type": kind})
        elif kind == "string":
            parts.append({"type": "string", "pattern": _not_these(excluded)})
        elif kind in ("number", "integer"):
            parts += _between(sorted(excluded), kind)
        elif kind == "boolean":
            parts.append({"enum": [value for value in (False, True) if value not in excluded]})
        elif kind != "null":
            return None
    return [part for part in parts if part != {"enum": []}]


def _between(points: Sequence[float], kind: str) -> list[dict[str, Any]]:
    low, high = ("exclusiveMinimum", "exclusiveMaximum")
    parts = []
    for below, above in pairwise([None, *points, None]):
        part: dict[str, Any] = {"type": kind}
        if below is not None:
            part[low] = below
        if above is not None:
            part[high] = above
        if below is None or above is None or below + (kind == "integer") < above:
            parts.append(part)
    return parts


def _not_these(texts: Iterable[str]) -> str:
    """A pattern of all strings but these."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return f"^(?:{_outside(tree)})$"


def _outside(node: dict[str, Any]) -> str:
    letters = [letter for letter in node if letter]
    ways = [] if "" in node else [""]
    ways.append(f"[^{''.join(map(escaped, letters))}](?s:.*)" if letters else "(?s:.+)")
    ways += [f"{escaped(letter)}(?:{_outside(node[letter])})" for letter in letters]
    return "|".join(ways)


def escaped(text: str) -> str:
    """A text as a regular expression of it, inside brackets too."""
    return "".join(f"\\{letter}" if letter in "\\.+*?()|[]{}^$#&-~/" else letter for letter in text)


def shown(value: Any) -> str:
    """A value in a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}…"
