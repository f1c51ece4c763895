"""A JSON Schema in the words that llguidance takes, with the same meaning.

Keywords that llguidance lacks are written with those that it has: conditions as `anyOf`, names of keys as properties,
formats as patterns. What cannot be written so is refused with its place, or left out with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from genctl.decode.processors.closed_schema import parts
from genctl.decode.processors.schema_conditions import Conditions
from genctl.decode.processors.schema_counts import (
    PLACES,
    contains,
    number_of_properties,
    property_names,
    unevaluated_items,
    unique_items,
)
from genctl.decode.processors.schema_logic import CannotEnforce
from genctl.decode.processors.schema_values import FORMATS, PATTERNS, types_of

LARGEST = 9_200_000_000_000_000_000  # the largest limit of a number; the decimal digits of a float end long before
_LONGEST = 1_000_000_000  # characters or items: as good as no limit
_COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


class Unenforceable(Exception):
    """A keyword that is not enforced. `pointer` is the place of its schema, `reason` says what is taken."""

    def __init__(self, pointer: str, keyword: str, reason: str) -> None:
        super().__init__(reason)
        self.pointer, self.keyword, self.reason = pointer, keyword, reason


def written(schema: Any, *, drop: bool = False) -> tuple[Any, tuple[str, ...]]:
    """The schema in llguidance's words, and notes on what is not enforced.

    `drop` leaves out what cannot be enforced, with a note. Raises Unenforceable.
    """
    forms = _Forms(schema, drop)
    result = forms.form(schema, "#", alone=True)
    return result, tuple(dict.fromkeys(forms.notes))


@dataclass
class _Forms:
    root: Any
    drop: bool
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.conditions = Conditions(self.root)

    def form(self, schema: Any, pointer: str, *, alone: bool) -> Any:
        """One schema and those inside it. `alone`: nothing else describes the value."""
        if not isinstance(schema, dict):
            return schema
        result = _spelled(schema)
        self._references(result)
        self._numbers(result, pointer)
        self._format(result, pointer)
        extra = self.conditions.cases(result)
        for keyword, write in self._keywords().items():
            if keyword not in result:
                continue
            try:
                extra += write(result, alone)
            except CannotEnforce as reason:
                self._leave_out(result, keyword, pointer, reason.reason)
        if extra:
            given = result.get("allOf")
            result["allOf"] = [*(given if isinstance(given, list) else []), *extra]
        for inner, keyword, place, below in list(parts(result, alone)):
            where = f"{pointer}/{keyword}"
            if place is not None:
                where += "/" + str(place).replace("~", "~0").replace("/", "~1")
            if keyword == "allOf" and place >= len(result["allOf"]) - len(extra):
                where = pointer
            made = self.form(inner, where, alone=below)
            if place is None:
                result[keyword] = made
            else:
                result[keyword] = result[keyword].copy()
                result[keyword][place] = made
        return result

    def _keywords(self) -> dict[str, Callable[[dict[str, Any], bool], list[Any]]]:
        """What writes each keyword in other words, in this order; it returns further conditions on the value."""
        return {
            "not": self.conditions.not_,
            "if": self.conditions.if_,
            "then": _without_if,
            "else": _without_if,
            "dependencies": self.conditions.dependencies,
            "dependentRequired": self.conditions.dependencies,
            "dependentSchemas": self.conditions.dependencies,
            "oneOf": self.conditions.one_of,
            "unevaluatedProperties": self._unevaluated_properties,
            "unevaluatedItems": unevaluated_items,
            "propertyNames": property_names,
            "contains": contains,
            "minContains": _withoutcontains,
            "maxContains": _withoutcontains,
            "uniqueItems": unique_items,
            "minProperties": number_of_properties,
            "maxProperties": number_of_properties,
        }

    def _leave_out(self, schema: dict[str, Any], keyword: str, pointer: str, reason: str) -> None:
        if not self.drop:
            raise Unenforceable(pointer, keyword, reason)
        words = {"if": ("if", "then", "else"), "contains": ("contains", "minContains", "maxContains")}
        for word in words.get(keyword, (keyword,)):
            value = schema.pop(word, None)
        if keyword == "oneOf":
            schema["anyOf"] = value
        self.notes.append(f"{keyword} at {pointer} is not enforced")

    # -- spelling ------------------------------------------------------------------------------------------------------

    def _references(self, schema: dict[str, Any]) -> None:
        if schema.pop("$recursiveRef", None) == "#":
            schema["$ref"] = "#"
        dynamic = schema.get("$dynamicRef")
        if isinstance(dynamic, str):
            name = dynamic.removeprefix("#")
            found = [pointer for pointer, anchor in _anchors(self.root, "#") if anchor == name]
            if dynamic.startswith("#/") or len(found) == 1:
                schema["$ref"] = dynamic if dynamic.startswith("#/") else found[0]
                del schema["$dynamicRef"]
        for word in ("$dynamicAnchor", "$recursiveAnchor"):
            schema.pop(word, None)

    def _numbers(self, schema: dict[str, Any], pointer: str) -> None:
        for word in _COUNTS:
            value = schema.get(word)
            if isinstance(value, float) and value.is_integer():
                schema[word] = value = int(value)
            if word.startswith("max") and isinstance(value, int) and value > _LONGEST:
                del schema[word]
        for word in _LIMITS:
            value = schema.get(word)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or abs(value) <= LARGEST:
                continue
            if (value > 0) == (word in ("maximum", "exclusiveMaximum")):  # narrower: all that is written is valid
                schema[word] = LARGEST if value > 0 else -LARGEST
            else:
                self._leave_out(schema, word, pointer, f"limits are taken up to {LARGEST:.1e}, not {value:g}")

    def _format(self, schema: dict[str, Any], pointer: str) -> None:
        name = schema.get("format")
        types = types_of(schema)
        if not isinstance(name, str) or name in FORMATS:
            return
        del schema["format"]
        if name in PATTERNS:
            both = [{"pattern": PATTERNS[name]}] if "pattern" in schema else []
            schema.setdefault("pattern", PATTERNS[name])
            if both:
                schema["allOf"] = [*(schema.get("allOf") or []), *both]
        elif types is None or "string" in types:
            known = ", ".join(sorted({*FORMATS, *PATTERNS}))
            self.notes.append(f'format "{name}" at {pointer} is not enforced, as an annotation (enforced are {known})')

    # -- keys ----------------------------------------------------------------------------------------------------------

    def _unevaluated_properties(self, schema: dict[str, Any], alone: bool) -> list[Any]:
        value = schema["unevaluatedProperties"]
        if value is True or value == {} or "additionalProperties" in schema:
            del schema["unevaluatedProperties"]
            return []
        names, patterns = self._evaluated(
            {key: item for key, item in schema.items() if key not in ("anyOf", "oneOf")}, 0
        )
        choices = [word for word in ("anyOf", "oneOf") if word in schema]
        if len(choices) > 1:
            raise CannotEnforce("beside both anyOf and oneOf it is not taken; beside one of them, allOf and $ref it is")
        del schema["unevaluatedProperties"]
        rest = {"patternProperties": patterns} if patterns else {}
        if not choices:
            schema["properties"] = {**dict.fromkeys(names, True), **(schema.get("properties") or {})}
            if patterns:
                schema["patternProperties"] = {**patterns, **(schema.get("patternProperties") or {})}
            schema["additionalProperties"] = value
            return []
        ways = []
        for part in schema[choices[0]]:
            more, more_patterns = self._evaluated(part, 0)
            limits: dict[str, Any] = {"properties": dict.fromkeys([*names, *more], True), "additionalProperties": value}
            ways.append(
                {
                    "allOf": [
                        part,
                        {
                            **rest,
                            **limits,
                            **({"patternProperties": {**patterns, **more_patterns}} if more_patterns else {}),
                        },
                    ]
                }
            )
        schema[choices[0]] = ways
        return []

    def _evaluated(self, schema: Any, depth: int) -> tuple[list[str], dict[str, Any]]:
        """The keys that a schema and those beside it name, and patterns of keys."""
        if not isinstance(schema, dict):
            return [], {}
        if depth > PLACES:
            raise CannotEnforce("the references beside it contain themselves")
        for word in ("anyOf", "oneOf", "if", "dependentSchemas", "dependencies"):
            if word in schema:
                raise CannotEnforce(f"beside {word} of another schema it is not taken; beside allOf and $ref it is")
        if "additionalProperties" in schema and schema["additionalProperties"] is not False:
            return [], {"": True}
        names = list(schema.get("properties") or {})
        patterns = dict.fromkeys(schema.get("patternProperties") or {}, True)
        inner = list(schema.get("allOf") or [])
        if isinstance(schema.get("$ref"), str):
            inner.append(self.conditions.resolve(schema["$ref"]))
        for part in inner:
            more, more_patterns = self._evaluated(part, depth + 1)
            names += more
            patterns |= more_patterns
        return list(dict.fromkeys(names)), patterns


def _spelled(schema: dict[str, Any]) -> dict[str, Any]:
    """Older and other spellings: draft 4 and 7, OpenAPI."""
    result = dict(schema)
    items = result.get("items")
    if isinstance(items, list):
        more = result.pop("additionalItems", True)
        result["prefixItems"], result["items"] = items, more
    else:
        result.pop("additionalItems", None)
    for word, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(result.get(word), bool) and result.pop(word) and limit in result:
            result[word] = result.pop(limit)
    if result.get("uniqueItems") is False:
        del result["uniqueItems"]
    if result.pop("nullable", None) is True:
        types = types_of(result)
        if types is not None and "null" not in types:
            result["type"] = [*types, "null"]
        elif types is None and any(word in result for word in ("$ref", "anyOf", "oneOf", "allOf")):
            shared: dict[str, Any] = {
                key: result.pop(key) for key in ("$defs", "definitions", "x-guidance") if key in result
            }
            result = {**shared, "anyOf": [result, {"type": "null"}]}
    return result


def _anchors(part: Any, pointer: str) -> Iterator[tuple[str, str]]:
    if isinstance(part, dict):
        if isinstance(part.get("$dynamicAnchor"), str):
            yield pointer, part["$dynamicAnchor"]
        for key, inner in part.items():
            yield from _anchors(inner, f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}")
    elif isinstance(part, list):
        for place, inner in enumerate(part):
            yield from _anchors(inner, f"{pointer}/{place}")


def _without_if(schema: dict[str, Any], alone: bool) -> list[Any]:
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    return []


def _withoutcontains(schema: dict[str, Any], alone: bool) -> list[Any]:
    for word in ("minContains", "maxContains"):
        schema.pop(word, None)
    return []
