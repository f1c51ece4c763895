"""Objects of a JSON Schema without the keys that it does not name.

JSON Schema allows any further keys in an object. In generated text this is rarely intended: the model invents keys. So
an object with `properties` has no other keys, unless `additionalProperties` allows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else")  # keywords whose value is a schema
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_COMBINED = ("anyOf", "oneOf", "allOf", "$ref", "if", "then", "else", "not")  # further conditions on the same value
_SAYS = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")

_NEUTRAL = {"$ref", "$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default", "examples"}


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever an object has properties and nothing says otherwise.

    Parts that describe one value together (`allOf`, or `anyOf` beside `properties`) stay as they are, since each of
    them names only some of the keys; an object whose properties name all of theirs is closed. Objects that need keys
    beyond those that they name stay open.
    """
    return _closed(schema, alone=True, together=set(shared(schema, alone=True)), pointer="#")


def _closed(schema: Any, *, alone: bool, together: set[str], pointer: str) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for inner, keyword, place, below in parts(schema, alone):
        where = f"{pointer}/{keyword}"
        if place is not None:
            where += "/" + str(place).replace("~", "~0").replace("/", "~1")
        part = _closed(inner, alone=below and where not in together, together=together, pointer=where)
        if place is None:
            result[keyword] = part
        else:
            result[keyword] = result[keyword].copy()
            result[keyword][place] = part
    if alone and closable(schema):
        result["additionalProperties"] = False
    return result


def closable(schema: Mapping[str, Any]) -> bool:
    """Whether an object has no other keys than its properties, as long as nothing else describes it."""
    properties = schema.get("properties")
    if not (isinstance(properties, Mapping) and properties) or any(word in schema for word in _SAYS):
        return False
    if any(word in schema for word in _COMBINED):
        names = _mentioned({word: schema[word] for word in _COMBINED if word in schema})
        if names is None or not names <= set(properties):
            return False
    least = schema.get("minProperties")
    return set(_names(schema.get("required"))) <= set(properties) and not (
        isinstance(least, int) and least > len(properties)
    )


def _mentioned(part: Any) -> set[str] | None:
    """The keys that conditions on one object name; None if they may allow others."""
    if not isinstance(part, Mapping):
        return set()
    names = set(_names(part.get("required")))
    if "$ref" in part or any(part.get(word, True) is not True for word in _SAYS):
        return None
    if isinstance(part.get("properties"), Mapping):
        names |= set(part["properties"])
    inner = [part[word] for word in _COMBINED if word in part]
    for one in (one for item in inner for one in (item if isinstance(item, list) else [item])):
        more = _mentioned(one)
        if more is None:
            return None
        names |= more
    return names


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def parts(schema: Mapping[str, Any], alone: bool) -> Iterator[tuple[Any, str, Any, bool]]:
    """The inner schemas, each with its keyword, its place there, and whether it alone describes a value."""
    for keyword in _ONE:
        if keyword in schema:
            yield schema[keyword], keyword, None, keyword in ("items", "additionalProperties")
    for keyword in _MAPS:
        if isinstance(schema.get(keyword), Mapping):
            for name, inner in schema[keyword].items():
                yield inner, keyword, name, True
    combined = sum(word in schema for word in ("properties", "required", *_COMBINED)) > 1
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            below = keyword == "prefixItems" or (keyword != "allOf" and alone and not combined)
            for place, inner in enumerate(schema[keyword]):
                yield inner, keyword, place, below


def shared(schema: Any, *, alone: bool) -> Iterator[str]:
    """The targets of references that describe a value together with other keywords."""
    if not isinstance(schema, Mapping):
        return
    if isinstance(schema.get("$ref"), str) and (not alone or set(schema) - _NEUTRAL):
        yield schema["$ref"]
    for inner, _, _, below in parts(schema, alone):
        yield from shared(inner, alone=below)
