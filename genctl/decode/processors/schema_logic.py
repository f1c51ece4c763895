"""The negation of a JSON Schema, as far as other keywords can say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from genctl.decode.processors.schema_values import TYPES, finite, kind_of, others, same, types_of

ANNOTATIONS = frozenset(
    {
        "$schema", "$id", "$comment", "$anchor", "title", "description", "default", "examples", "example", "readOnly",
        "writeOnly", "deprecated", "contentMediaType", "contentEncoding", "$defs", "definitions", "discriminator",
        "xml", "externalDocs", "x-guidance",
    }
)  # fmt: skip
_DEEPEST = 12


class CannotEnforce(Exception):
    """A keyword that cannot be enforced. `reason` completes a sentence; it says what could be."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


Resolve = Callable[[str], Any]


def negated(schema: Any, types: Sequence[str] | None, resolve: Resolve, depth: int = 0) -> Any:
    """A schema of what `schema` refuses. `types` are those that a value can have, None for any.

    Raises CannotEnforce.
    """
    if depth > _DEEPEST:
        raise CannotEnforce("a condition nested too deeply, or one that contains itself, cannot be negated")
    if isinstance(schema, bool) or not isinstance(schema, dict):
        return not schema if isinstance(schema, bool) else True
    values = finite(schema)
    if values is not None:
        parts = others(values, types)
        if parts is None:
            raise CannotEnforce("values that are arrays or objects cannot be excluded; texts, numbers and others can")
        return {"anyOf": parts}
    ways: list[Any] = []
    for word, value in schema.items():
        if word in ANNOTATIONS or (word == "additionalProperties" and value is True):
            continue
        ways += _ways(word, value, schema, types, resolve, depth + 1)
    return _any([way for way in ways if way is not False])


def _any(ways: list[Any]) -> Any:
    if True in ways or not ways:
        return bool(ways)
    return ways[0] if len(ways) == 1 else {"anyOf": ways}


def _ways(
    word: str, value: Any, schema: dict[str, Any], types: Sequence[str] | None, resolve: Resolve, depth: int
) -> list[Any]:
    """Schemas of the values that a keyword refuses."""
    if word == "type":
        return _other_types(types_of(schema) or [], types)
    if word in ("enum", "const"):
        parts = others(value if word == "enum" else [value], types)
        if parts is None:
            raise CannotEnforce("values that are arrays or objects cannot be excluded; texts, numbers and others can")
        return parts
    if word in _OPPOSITE and isinstance(value, (int, float)):
        kind, opposite, step = _OPPOSITE[word]
        limit = value + step
        return [{"type": kind, opposite: limit}] if limit >= 0 or kind == "number" else []
    if word == "required" and isinstance(value, list):
        return [{"type": "object", "properties": {name: False}} for name in value]
    if word == "properties" and isinstance(value, dict):
        inner = {name: negated(part, None, resolve, depth) for name, part in value.items()}
        return [
            {"type": "object", "required": [name], "properties": {name: part}}
            for name, part in inner.items()
            if part is not False
        ]
    if word == "allOf" and isinstance(value, list):
        return [negated(part, types, resolve, depth) for part in value]
    if word == "anyOf" and isinstance(value, list):
        return [{"allOf": [negated(part, types, resolve, depth) for part in value]}]
    if word == "oneOf" and isinstance(value, list):
        parts = [(part, negated(part, types, resolve, depth)) for part in value]
        two = [{"allOf": [one[0], other[0]]} for one, other in combinations(parts, 2)]
        return [{"allOf": [negation for _, negation in parts]}, *two]
    if word == "not":
        return [value]
    if word == "$ref" and isinstance(value, str):
        return [negated(resolve(value), types, resolve, depth)]
    raise CannotEnforce(
        f"{word} cannot be negated; type, const, enum, required, properties and limits of numbers and lengths can"
    )


# keyword -> the type that it concerns, the keyword that says the opposite, and what is added to its limit
_OPPOSITE: dict[str, tuple[str, str, int]] = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}


def _other_types(named: Sequence[str], types: Sequence[str] | None) -> list[Any]:
    left = [kind for kind in (TYPES if types is None else types) if kind not in named]
    if "integer" in named and "number" in left:
        if left == ["number"]:
            raise CannotEnforce("numbers that are no integers cannot be told from others")
        left.remove("number")  # fewer: all that is written is valid
    if "number" in named:
        left = [kind for kind in left if kind != "integer"]
    return [{"type": left}] if left else []


def disjoint(one: Any, other: Any) -> bool:
    """Whether it is plain that no value satisfies both schemas."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return one is False or other is False
    values, more = finite(one), finite(other)
    if values is not None and more is not None:
        return not any(same(value, another) for value in values for another in more)
    kinds, others_kinds = _kinds(one, values), _kinds(other, more)
    if kinds is not None and others_kinds is not None:
        shared = kinds & others_kinds
        if not shared:
            return True
        if shared == {"object"}:
            return _objects_differ(one, other) or _objects_differ(other, one)
    return False


def _kinds(schema: dict[str, Any], values: list[Any] | None) -> set[str] | None:
    if values is not None:
        return {kind_of(value) for value in values}
    named = types_of(schema)
    return None if named is None else {"number" if kind == "integer" else kind for kind in named}


def _objects_differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether `one` requires a key that `other` does not have, or has with other values."""
    properties, others_properties = one.get("properties"), other.get("properties")
    required = one.get("required")
    if not (isinstance(properties, dict) and isinstance(others_properties, dict) and isinstance(required, list)):
        return False
    for name in required:
        if name not in others_properties:
            if other.get("additionalProperties") is False and "patternProperties" not in other:
                return True
        elif name in (other.get("required") or ()) and disjoint(properties.get(name), others_properties[name]):
            return True
    return False
