"""Keywords on arrays and on the keys of objects, written with those that llguidance has.

Each function changes a schema in place and returns further conditions on the value. `alone`: nothing else describes
the value. They raise CannotEnforce.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import combinations, permutations
from typing import Any

from genctl.decode.processors.closed_schema import closable
from genctl.decode.processors.schema_logic import ANNOTATIONS, CannotEnforce
from genctl.decode.processors.schema_values import PATTERNS, finite, other_types, types_of

WAYS = 400  # alternatives that a keyword may be written as
PLACES = 8  # items of an array that `contains` is written out for


def unevaluated_items(schema: dict[str, Any], alone: bool) -> list[Any]:
    """`unevaluatedItems`: as `items`, where nothing else evaluates any."""
    value = schema["unevaluatedItems"]
    if value is not True and "items" not in schema:
        if any(word in schema for word in ("$ref", "allOf", "anyOf", "oneOf", "if", "contains")):
            raise CannotEnforce("it is taken beside prefixItems and items alone")
        schema["items"] = value
    del schema["unevaluatedItems"]
    return []


def property_names(schema: dict[str, Any], alone: bool) -> list[Any]:
    """`propertyNames`: the names among `properties`, and a pattern for others."""
    rule = schema["propertyNames"]
    properties, more = schema.get("properties") or {}, schema.get("additionalProperties", True)
    types = types_of(rule) if isinstance(rule, dict) else None
    rest = (
        {}
        if not isinstance(rule, dict)
        else {key: value for key, value in rule.items() if key not in (*ANNOTATIONS, "type")}
    )
    if types is not None and "string" not in types:
        rule = False
    elif rule is not False and not rest:
        del schema["propertyNames"]
        return []
    values = [] if rule is False else finite(rest)
    if "patternProperties" in schema:
        raise CannotEnforce("beside patternProperties it is not taken")
    if values is not None:
        allowed = [name for name in values if isinstance(name, str)]
        fits: Callable[[str], bool] = allowed.__contains__
        schema["properties"] = {name: part if fits(name) else False for name, part in properties.items()}
        if more is not False:
            schema["properties"].update({name: more for name in allowed if name not in properties})
        schema["additionalProperties"] = False
    else:
        pattern = _name_pattern(rest)
        if properties:
            fits = _matcher(pattern)
            schema["properties"] = {name: part if fits(name) else False for name, part in properties.items()}
        if more is not False:
            schema["patternProperties"] = {pattern: more}
        schema["additionalProperties"] = False
    del schema["propertyNames"]
    return []


def _name_pattern(rule: dict[str, Any]) -> str:
    words = set(rule)
    if words == {"pattern"} and isinstance(rule["pattern"], str):
        return str(rule["pattern"])
    if words == {"format"} and rule["format"] in PATTERNS:
        return PATTERNS[rule["format"]]
    if words <= {"minLength", "maxLength"}:
        low, high = rule.get("minLength", 0), rule.get("maxLength", "")
        return f"^(?s:.{{{low},{high}}})$"
    raise CannotEnforce("names are taken by enum, const, pattern, or minLength and maxLength, one of these")


def _matcher(pattern: str) -> Callable[[str], bool]:
    try:
        compiled = re.compile(pattern)
    except re.error:
        raise CannotEnforce("its pattern cannot be compared with the names in properties") from None
    return lambda name: compiled.search(name) is not None


# -- arrays ------------------------------------------------------------------------------------------------------------


def contains(schema: dict[str, Any], alone: bool) -> list[Any]:
    """`contains`, `minContains` and `maxContains`: one alternative for each choice of places."""
    rule, least, most = schema["contains"], schema.get("minContains", 1), schema.get("maxContains")
    limit, items = schema.get("maxItems"), schema.get("items", True)
    if not isinstance(least, int) or (most is not None and not isinstance(most, int)):
        raise CannotEnforce("minContains and maxContains must be whole numbers")
    every = rule is True or rule == {} or ("prefixItems" not in schema and rule == items)
    found: list[Any] = []
    if every:
        schema["minItems"] = max(schema.get("minItems", 0), least)
        if most is not None:
            schema["maxItems"] = most if limit is None else min(limit, most)
    else:
        if most is not None and (limit is None or most < limit):
            raise CannotEnforce("maxContains is taken where all items count, or where maxItems is not larger")
        if least:
            if not isinstance(limit, int) or limit > PLACES:
                raise CannotEnforce(f"it is taken with maxItems of at most {PLACES}, or where all items count")
            ways = [
                {
                    "minItems": places[-1] + 1,
                    "prefixItems": [rule if at in places else True for at in range(places[-1] + 1)],
                }
                for places in combinations(range(limit), least)
            ]
            found = [_for_type("array", schema, ways)]
    for word in ("contains", "minContains", "maxContains"):
        schema.pop(word, None)
    return found


def _for_type(kind: str, schema: dict[str, Any], ways: list[Any]) -> Any:
    """Alternatives for values of one type; others are free."""
    if types_of(schema) == [kind]:
        return {"anyOf": ways}
    return {"anyOf": [{"type": other_types(kind)}, *({"type": kind, **way} for way in ways)]}


def unique_items(schema: dict[str, Any], alone: bool) -> list[Any]:
    """`uniqueItems`: all orders of a few values."""
    low, high = schema.get("minItems", 0), schema.get("maxItems")
    found: list[Any] = []
    if not (isinstance(high, int) and high <= 1):
        values = None if "prefixItems" in schema else finite(schema.get("items"))
        if values is None:
            raise CannotEnforce("it is taken where items have few values: an enum, a const, booleans or a short range")
        sizes = range(
            low if isinstance(low, int) else 0, min(len(values), high if isinstance(high, int) else len(values)) + 1
        )
        if sum(math.perm(len(values), size) for size in sizes) > WAYS:
            raise CannotEnforce(f"{len(values)} values in any order are too many; maxItems of 2 or 3 makes them fewer")
        arrays = [list(order) for size in sizes for order in permutations(values, size)]
        found = [_for_type("array", schema, [{"enum": arrays}])]
        if types_of(schema) == ["array"]:
            found = [{"enum": arrays}]
            for word in ("items", "minItems", "maxItems"):
                schema.pop(word, None)
    del schema["uniqueItems"]
    return found


# -- the number of keys ------------------------------------------------------------------------------------------------


def number_of_properties(schema: dict[str, Any], alone: bool) -> list[Any]:
    """`minProperties` and `maxProperties`: one alternative for each choice of optional keys."""
    properties = schema.get("properties")
    low, high = schema.get("minProperties", 0), schema.get("maxProperties")
    if not isinstance(properties, dict) or not isinstance(low, int) or not isinstance(high, (int, type(None))):
        return []
    names = [name for name, part in properties.items() if part is not False]
    required = [name for name in schema.get("required") or [] if name in names]
    optional = [name for name in names if name not in required]
    if not optional:
        return []
    if (
        not (schema.get("additionalProperties") is False or (alone and closable(schema)))
        or "patternProperties" in schema
    ):
        raise CannotEnforce("with optional properties it is taken where additionalProperties is false")
    found: list[Any] = []
    need, spare = low - len(required), None if high is None else high - len(required)
    if need > 0:
        if math.comb(len(optional), min(need, len(optional))) > WAYS or need > len(optional):
            raise CannotEnforce("there are too many ways to choose among the optional properties")
        found.append({"anyOf": [{"required": list(chosen)} for chosen in combinations(optional, need)]})
    if spare is not None and spare < len(optional):
        if spare < 0 or math.comb(len(optional), spare) > WAYS:
            raise CannotEnforce("there are too many ways to choose among the optional properties")
        ways = [[name for name in optional if name not in chosen] for chosen in combinations(optional, spare)]
        found.append({"anyOf": [{"properties": dict.fromkeys(barred, False)} for barred in ways]})
    for word in ("minProperties", "maxProperties"):
        schema.pop(word, None)
    schema["additionalProperties"] = False
    if types_of(schema) != ["object"]:
        found = [{"anyOf": [{"type": other_types("object")}, {"type": "object", **one}]} for one in found]
    return found
