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
    them names only some of the keys. So do objects that need keys beyond those that they name.
    """
    return _closed(schema, alone=True, shared=set(_shared(schema, alone=True)), pointer="#")


def _closed(schema: Any, *, alone: bool, shared: set[str], pointer: str) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for inner, keyword, place, below in _parts(schema, alone):
        where = f"{pointer}/{keyword}"
        if place is not None:
            where += "/" + str(place).replace("~", "~0").replace("/", "~1")
        part = _closed(inner, alone=below and where not in shared, shared=shared, pointer=where)
        if place is None:
            result[keyword] = part
        else:
            result[keyword] = result[keyword].copy()
            result[keyword][place] = part
    properties = schema.get("properties")
    if (
        alone
        and isinstance(properties, Mapping)
        and properties
        and not any(word in schema for word in (*_SAYS, *_COMBINED))
        and set(_names(schema.get("required"))) <= set(properties)
        and not (isinstance(least := schema.get("minProperties"), int) and least > len(properties))
    ):
        result["additionalProperties"] = False
    return result


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _parts(schema: Mapping[str, Any], alone: bool) -> Iterator[tuple[Any, str, Any, bool]]:
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


def _shared(schema: Any, *, alone: bool) -> Iterator[str]:
    """The targets of references that describe a value together with other keywords."""
    if not isinstance(schema, Mapping):
        return
    if isinstance(schema.get("$ref"), str) and (not alone or set(schema) - _NEUTRAL):
        yield schema["$ref"]
    for inner, _, _, below in _parts(schema, alone):
        yield from _shared(inner, alone=below)
