"""Conditions in a JSON Schema, written as alternatives.

The methods change a schema in place and return further conditions on its value. `alone`: nothing else describes the
value. They raise CannotEnforce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from genctl.decode.processors.closed_schema import closable
from genctl.decode.processors.schema_counts import PLACES
from genctl.decode.processors.schema_logic import ANNOTATIONS, CannotEnforce, disjoint
from genctl.decode.processors.schema_logic import negated as negation_of
from genctl.decode.processors.schema_values import distinct, finite, other_types, same, shown, types_of


@dataclass
class Conditions:
    """The conditions of one schema; references are followed in `root`."""

    root: Any

    def negated(self, schema: Any, types: list[str] | None = None) -> Any:
        """What a schema refuses."""
        return _opened(negation_of(schema, types, self.resolve))

    def resolve(self, pointer: str) -> Any:
        """The schema that a reference names."""
        place = self.root
        if pointer != "#" and not pointer.startswith("#/"):
            raise CannotEnforce(f"the reference {shown(pointer)} cannot be followed here; those that begin with #/ can")
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and name.isdigit() and int(name) < len(place):
                place = place[int(name)]
            elif isinstance(place, dict) and name in place:
                place = place[name]
            else:
                raise CannotEnforce(f"{shown(pointer)} does not exist")
        return place

    def not_(self, schema: dict[str, Any], alone: bool) -> list[Any]:
        """`not`: the negation, as other keywords say it."""
        found = self.negated(schema["not"], types_of(schema))
        del schema["not"]
        return [found]

    def if_(self, schema: dict[str, Any], alone: bool) -> list[Any]:
        """`if`, `then` and `else`: two alternatives."""
        condition, then, other = schema["if"], schema.get("then", True), schema.get("else", True)
        ways = []
        if then is True and other is True:
            found: list[Any] = []
        else:
            negation = self.negated(condition, types_of(schema))
            if then is not False:
                ways.append(_both(_opened(condition), then))
            if other is not False:
                ways.append(_both(negation, other))
            found = [{"anyOf": ways}]
        for word in ("if", "then", "else"):
            schema.pop(word, None)
        return found

    def dependencies(self, schema: dict[str, Any], alone: bool) -> list[Any]:
        """`dependentRequired`, `dependentSchemas` and `dependencies`: without the key, or with what it needs."""
        word = next(word for word in ("dependencies", "dependentRequired", "dependentSchemas") if word in schema)
        table = schema[word]
        if not isinstance(table, dict):
            raise CannotEnforce(f"{word} must be an object")
        if len(table) > PLACES:
            raise CannotEnforce(f"it has {len(table)} keys; at most {PLACES} are taken")
        found: list[Any] = []
        for name, needs in table.items():
            there: Any = {"required": [name, *needs]} if isinstance(needs, list) else _both({"required": [name]}, needs)
            found.append({"anyOf": [{"properties": {name: False}}, there]})
        del schema[word]
        types = types_of(schema)
        if types is None:  # values of other types are free
            found = [{"anyOf": [{"type": other_types("object")}, {"type": "object", **one}]} for one in found]
        return found

    def one_of(self, schema: dict[str, Any], alone: bool) -> list[Any]:
        """`oneOf`: alternatives, each without the others that overlap it."""
        given = schema["oneOf"]
        if not isinstance(given, list):
            return []
        beside = bool(set(schema) - {"oneOf", "type", *ANNOTATIONS})
        bodies = [self.body(part) for part in given]
        ways = []
        for place, part in enumerate(given):
            closed = not beside and alone and isinstance(bodies[place], dict) and closable(bodies[place])
            body = {**bodies[place], "additionalProperties": False} if closed else bodies[place]
            refused = [
                self.negated(other, types_of(body) or types_of(schema))
                for at, other in enumerate(bodies)
                if at != place and not disjoint(body, other) and not _lacks(body, other)
            ]
            if False in refused:
                continue
            refused = [one for one in refused if one is not True]
            ways.append(_with(part, refused) if refused else part)
        if (
            len(ways) > 1
            and any(way is not part for way, part in zip(ways, given, strict=False))
            and len(ways) > PLACES
        ):
            raise CannotEnforce(f"its {len(ways)} parts overlap; at most {PLACES} such parts are taken")
        del schema["oneOf"]
        if "anyOf" in schema:
            return [{"anyOf": ways}]
        schema["anyOf"] = ways
        return []

    def body(self, part: Any) -> Any:
        """A part with its reference followed, if it has nothing else."""
        for _ in range(PLACES):
            if not (
                isinstance(part, dict) and isinstance(part.get("$ref"), str) and not set(part) - {"$ref", *ANNOTATIONS}
            ):
                return part
            part = self.resolve(part["$ref"])
        return part

    def cases(self, schema: dict[str, Any]) -> list[Any]:
        """Several conditions in `allOf` on the values of one property: one alternative for each value.

        Written one by one, they multiply.
        """
        given = schema.get("allOf")
        if not isinstance(given, list) or types_of(schema) != ["object"]:
            return []
        found = [(part, _case(part)) for part in given]
        names = [case[0] for _, case in found if case is not None]
        name = next((name for name in names if names.count(name) > 1), None)
        if name is None:
            return []
        cases = [(part, case) for part, case in found if case is not None and case[0] == name]
        schema["allOf"] = [part for part in given if not any(part is taken for taken, _ in cases)]
        values = distinct(value for _, case in cases for value in case[1])
        ways: dict[tuple[bool, ...], list[Any]] = {}
        for value in values:
            holds = tuple(any(same(value, one) for one in case[1]) for _, case in cases)
            ways.setdefault(holds, []).append(value)
        parts: list[tuple[Any, tuple[bool, ...]]] = [({"enum": chosen}, holds) for holds, chosen in ways.items()]
        parts.append(({"not": {"enum": values}}, (False,) * len(cases)))
        result = [
            {"required": [name], "properties": {name: one}, "allOf": _chosen(cases, holds)} for one, holds in parts
        ]
        if name not in (schema.get("required") or ()):
            missing = tuple(case[2] for _, case in cases)
            result.append({"properties": {name: False}, "allOf": _chosen(cases, missing)})
        return [{"anyOf": result}]


def _case(part: Any) -> tuple[str, list[Any], bool] | None:
    """The property and the values that a condition asks for, and whether it holds without the property."""
    condition = part.get("if") if isinstance(part, dict) else None
    if not isinstance(condition, dict) or set(part) - {"if", "then", "else", *ANNOTATIONS}:
        return None
    properties, required = condition.get("properties"), condition.get("required", [])
    if set(condition) - {"properties", "required", "type", *ANNOTATIONS} or condition.get("type", "object") != "object":
        return None
    if not isinstance(properties, dict) or len(properties) != 1 or required not in ([], [*properties]):
        return None
    ((name, rule),) = properties.items()
    values = finite(rule)
    return None if values is None else (name, values, not required)


def _chosen(cases: list[tuple[Any, Any]], holds: tuple[bool, ...]) -> list[Any]:
    chosen = (part.get("then" if held else "else", True) for (part, _), held in zip(cases, holds, strict=True))
    return [one for one in chosen if one is not True]


def _both(one: Any, other: Any) -> Any:
    if one is True or other is True:
        return other if one is True else one
    return {"allOf": [one, other]}


def _with(part: Any, conditions: list[Any]) -> Any:
    if not isinstance(part, dict) or "$ref" in part:
        return {"allOf": [part, *conditions]}
    return {**part, "allOf": [*(part.get("allOf") or []), *conditions]}


def _opened(schema: Any) -> Any:
    """A condition, whose objects may have other keys than those that it names."""
    if isinstance(schema, list):
        return [_opened(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, part in schema.items():
        if key in ("properties", "patternProperties") and isinstance(part, dict):
            result[key] = {name: _opened(inner) for name, inner in part.items()}
        else:
            result[key] = part if key in ("enum", "const") else _opened(part)
    if "properties" in result:
        result.setdefault("additionalProperties", True)
    return result


def _lacks(one: Any, other: Any) -> bool:
    """Whether objects of `one`, which have no other keys than it names, lack a key that `other` requires."""
    if not (isinstance(one, dict) and isinstance(other, dict) and one.get("additionalProperties") is False):
        return False
    if "patternProperties" in one or types_of(one) != ["object"] or not isinstance(one.get("properties"), dict):
        return False
    required = other.get("required")
    return isinstance(required, list) and any(name not in one["properties"] for name in required)
