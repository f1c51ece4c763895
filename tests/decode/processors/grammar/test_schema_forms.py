"""Schemas of every day: all that is written is valid for another validator, and what is valid can be written."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import numpy
import pytest
from llguidance import LLMatcher

from genctl.decode.processors.closed_schema import closed
from genctl.decode.processors.grammar_source import read
from genctl.decode.processors.token_bytes import llguidance_tokenizer
from genctl.errors import UsageError
from genctl.params import Generation

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
END = 256


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


KIND = {"enum": ["a", "b", "c"]}
IS_A, IS_B = {"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"const": "b"}}, "required": ["k"]}
SCHEMAS: list[dict[str, Any]] = [
    {"not": {"type": "string"}},
    {"not": {"enum": ["a", 1, None]}},
    {"type": "string", "not": {"enum": ["a", "ab", "", "b.*"]}},
    {"type": "integer", "not": {"enum": [0, 3, 4]}},
    {"type": "number", "not": {"const": 2}},
    {"not": {"anyOf": [{"type": "string"}, {"type": "number"}]}},
    {"not": {"not": {"type": "integer"}}},
    {"type": "integer", "not": {"minimum": 3}},
    {"type": "string", "not": {"maxLength": 2}},
    {**thing(a=INTEGER, b=INTEGER), "not": {"required": ["a", "b"]}},
    {**thing(a=INTEGER), "required": ["a"], "not": {"properties": {"a": {"minimum": 5}}}},
    {**thing(k=KIND, x=INTEGER), "if": IS_A, "then": {"required": ["x"]}, "else": {"properties": {"x": False}}},
    {**thing(k=KIND, x=INTEGER), "if": IS_B, "then": {"required": ["x"]}},
    {"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "string"}},
    {
        **thing(k=KIND, x=INTEGER, y=INTEGER),
        "allOf": [{"if": IS_A, "then": {"required": ["x"]}}, {"if": IS_B, "then": {"required": ["y"]}}],
    },
    {**thing(a=INTEGER, b=INTEGER, c=INTEGER), "dependentRequired": {"a": ["b"]}},
    {**thing(a=INTEGER, b=INTEGER, c=INTEGER), "dependencies": {"a": ["b", "c"], "c": {"required": ["b"]}}},
    {**thing(a=INTEGER, b=INTEGER), "dependentSchemas": {"a": {"properties": {"b": {"minimum": 5}}}}},
    {"properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}},
    {**thing(a=INTEGER, b=TEXT), "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {**thing(a=INTEGER, b=TEXT), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [INTEGER, {"type": "string", "maxLength": 1}]},
    {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 5}]},
    {"oneOf": [{"const": 1}, {"const": 2}, {"enum": [2, 3]}]},
    {"oneOf": [{**thing(a=INTEGER, b=INTEGER), "required": ["a"]}, {**thing(b=INTEGER), "required": ["b"]}]},
    {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": INTEGER},
    {**thing(a=INTEGER, b=INTEGER), "propertyNames": {"enum": ["a"]}},
    {"type": "object", "propertyNames": {"maxLength": 1}, "additionalProperties": INTEGER},
    {"type": "array", "items": INTEGER, "contains": {"minimum": 5}, "maxItems": 3},
    {"type": "array", "items": {"enum": [1, "a"]}, "contains": {"const": "a"}, "minContains": 2, "maxItems": 3},
    {"type": "array", "items": INTEGER, "contains": INTEGER, "maxContains": 2},
    {"contains": {"const": 1}, "maxItems": 2},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True},
    {"items": {"enum": [1, 1.0, True]}, "uniqueItems": True},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
    {"type": "array", "items": INTEGER, "uniqueItems": True, "maxItems": 1},
    {"type": "object", "allOf": [thing(a=INTEGER), thing(b=INTEGER)], "unevaluatedProperties": False},
    {
        "$ref": "#/$defs/x",
        "properties": {"b": INTEGER},
        "unevaluatedProperties": False,
        "$defs": {"x": thing(a=INTEGER)},
    },
    {"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False},
    {**thing(a=INTEGER, b=INTEGER, c=INTEGER), "minProperties": 1},
    {**thing(a=INTEGER, b=INTEGER, c=INTEGER), "maxProperties": 2, "additionalProperties": False},
    {"type": "integer", "minimum": -1e20, "maximum": 1e20},
    {"type": "integer", "minimum": 3_000_000_000},
    {"type": "string", "maxLength": 2.0, "minLength": 1.0},
    {"type": "array", "items": INTEGER, "maxItems": 2**40},
    {"type": ["integer", "string"], "minimum": 3, "maxLength": 1},
    {"allOf": [{"$ref": "#/definitions/a"}, {"required": ["v"]}], "definitions": {"a": thing(v=INTEGER)}},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date", "pattern": "^2024"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "ipv6"},
]
ATOMS = [
    None, True, False, 0, 1, 2, 3, 4, 5, 6, -1, 2.5, 3_000_000_001, "", "a", "ab", "abc", "b", "x", "b.*",
    "2024-02-29", "2023-02-29", "2024-04-31", "2024-12-31", "2000-02-29", "1900-02-29", "::1", "::ffff:1.2.3.4",
    "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:1.2.3.4", "1::2::3", "12345::", "1::", "::", "1:2:3:4:5:6:7::", "1.2.3.4",
    "256.1.1.1",
]  # fmt: skip


def values() -> Iterator[Any]:
    yield from ATOMS
    for length in range(4):
        yield from map(list, itertools.product([1, 2, 3, 5, "a", True], repeat=length))
    for keys in (("k", "x", "y"), ("a", "b", "c"), ("v",), ("ab", "b")):
        for chosen in itertools.chain.from_iterable(itertools.combinations(keys, n) for n in range(len(keys) + 1)):
            for made in itertools.product([1, 5, "a", "b"], repeat=len(chosen)):
                yield dict(zip(chosen, made, strict=True))


@cache
def vocabulary() -> Any:
    return llguidance_tokenizer([bytes([byte]) for byte in range(256)])


def matcher(schema: dict[str, Any], **knobs: Any) -> LLMatcher:
    source = read(Generation(json_schema=schema, **knobs))
    assert source is not None
    made = LLMatcher(vocabulary(), LLMatcher.grammar_from_lark(source.lark), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def accepts(made: LLMatcher, value: Any) -> bool:
    tokens = [*json.dumps(value).encode(), END]
    return bool(made.validate_tokens(tokens) == len(tokens))


def draws(made: LLMatcher, draw: random.Random) -> str:
    """A text of the grammar that ends soon; "" if it did not."""
    here, written = made.deep_copy(), bytearray()
    while len(written) < 200:
        bits = numpy.unpackbits(numpy.frombuffer(here.compute_bitmask(), dtype=numpy.uint8), bitorder="little")
        ids = numpy.flatnonzero(bits[:128]).tolist()
        if here.is_accepting() and (not ids or draw.random() < 0.5):
            return written.decode()
        closing = [byte for byte in ids if byte in b'"}],:']
        byte = draw.choice(closing if closing and draw.random() < 0.4 else ids)
        here.consume_token(byte)
        written.append(byte)
    return ""


def standard(schema: dict[str, Any]) -> dict[str, Any]:
    """The same in draft 2020-12."""
    result = dict(schema)
    for name, needs in result.pop("dependencies", {}).items():
        word = "dependentRequired" if isinstance(needs, list) else "dependentSchemas"
        result.setdefault(word, {})[name] = needs
    return result


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:70])
def test_what_is_written_is_valid_and_what_is_valid_can_be_written(schema: dict[str, Any]) -> None:
    made = matcher(schema)
    kind = jsonschema.Draft202012Validator
    validator = kind(standard(schema), format_checker=kind.FORMAT_CHECKER)
    narrowed = kind(closed(standard(schema)), format_checker=kind.FORMAT_CHECKER)  # no keys that it does not name
    for value in values():
        if accepts(made, value):
            assert validator.is_valid(value), value
        else:
            assert not (narrowed.is_valid(value) and validator.is_valid(value)), value
    draw = random.Random(7)
    for _ in range(12):
        text = draws(made, draw)
        assert not text or validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "nullable": True}, [None, "a"], [1]),
        ({"$ref": "#/$defs/a", "nullable": True, "$defs": {"a": INTEGER}}, [None, 1], ["a"]),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, [1], [0]),
        ({"type": "integer", "maximum": 9, "exclusiveMaximum": False}, [9], [10]),
        ({"items": [INTEGER, TEXT], "additionalItems": False}, [[1, "a"], [1]], [["a"], [1, "a", 1]]),
        ({"items": [INTEGER], "additionalItems": TEXT}, [[1, "a", "b"]], [[1, 1]]),
        ({**thing(a={"$recursiveRef": "#"}), "required": []}, [{"a": {"a": {}}}], [{"a": 1}]),
        (
            {"$dynamicRef": "#n", "$defs": {"x": {"$dynamicAnchor": "n", **thing(n={"$dynamicRef": "#n"})}}},
            [{"n": {"n": {}}}],
            [{"n": 1}],
        ),
        ({"type": "string", "format": "time"}, ["12:30:00Z", "12:30:00.5+02:00"], ["24:00:00Z", "12:30"]),
        ({"type": "string", "format": "date-time"}, ["2024-02-29T12:30:00Z"], ["2023-02-29T12:30:00Z", "2024-01-01"]),
        ({"type": "string", "format": "json-pointer"}, ["", "/a~0/b"], ["a", "/~2"]),
        ({"type": "array", "items": INTEGER, "uniqueItems": False}, [[1, 1]], [["a"]]),
        ({"type": "integer", "then": {"minimum": 3}, "minContains": 2}, [1], ["a"]),
    ],
)
def test_other_spellings_mean_the_same(schema: dict[str, Any], valid: list[Any], invalid: list[Any]) -> None:
    made = matcher(schema)
    assert all(accepts(made, value) for value in valid)
    assert not any(accepts(made, value) for value in invalid)


UNENFORCED = [
    ({"properties": {"tags": {"items": TEXT, "uniqueItems": True}}}, "uniqueItems", "#/properties/tags"),
    ({"items": {"enum": [*range(9)]}, "uniqueItems": True}, "uniqueItems", "#"),
    ({"$defs": {"x/y": {"not": {"pattern": "a"}}}, "items": {"$ref": "#/$defs/x~1y"}}, "not", "#/$defs/x~1y"),
    ({"anyOf": [{"type": "array", "contains": {"const": 1}}]}, "contains", "#/anyOf/0"),
    ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "oneOf", "#"),
    ({"if": {"pattern": "a"}, "then": {"minLength": 3}}, "if", "#"),
    ({"propertyNames": {"pattern": "a", "maxLength": 3}}, "propertyNames", "#"),
    ({"type": "number", "minimum": 1e20}, "minimum", "#"),
    ({**thing(a=INTEGER, b=INTEGER), "additionalProperties": True, "minProperties": 1}, "minProperties", "#"),
    ({"dependentRequired": {str(n): ["a"] for n in range(9)}}, "dependentRequired", "#"),
    ({"anyOf": [{"anyOf": [thing(a=INTEGER)]}], "unevaluatedProperties": False}, "unevaluatedProperties", "#"),
]


@pytest.mark.parametrize(("schema", "keyword", "place"), UNENFORCED, ids=lambda one: str(one)[:40])
def test_what_cannot_be_enforced_is_refused_with_its_place_or_left_out_with_a_note(
    schema: dict[str, Any], keyword: str, place: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read(Generation(json_schema=schema))
    assert caught.value.message.startswith(f"json_schema: {keyword} cannot be enforced at {place}: ")
    assert len(caught.value.message) > len(f"json_schema: {keyword} cannot be enforced at {place}: ") + 20
    assert "json_schema_unenforced" in caught.value.hint
    source = read(Generation(json_schema=schema, json_schema_unenforced="drop"))
    assert source is not None
    assert source.notes == (f"json_schema: {keyword} at {place} is not enforced",)


def test_a_format_that_nobody_knows_is_an_annotation() -> None:
    source = read(Generation(json_schema={"properties": {"a": {"type": "string", "format": "color"}}}))
    assert source is not None
    (note,) = source.notes
    assert note.startswith('json_schema: format "color" at #/properties/a is not enforced, as an annotation')
    assert "ipv6" in note
    number = read(Generation(json_schema={"type": "integer", "format": "int32"}))
    assert number is not None
    assert number.notes == ()


@pytest.mark.parametrize("count", [3, 12, 40])
def test_conditions_on_the_values_of_one_property_do_not_multiply(count: int) -> None:
    names = [f"p{n}" for n in range(count)]
    schema = {
        **thing(k={"enum": names}, **dict.fromkeys(names, INTEGER)),
        "required": ["k"],
        "allOf": [{"if": {"properties": {"k": {"const": name}}}, "then": {"required": [name]}} for name in names],
    }
    made = matcher(schema)
    assert accepts(made, {"k": "p1", "p1": 1})
    assert not accepts(made, {"k": "p1", "p2": 1})


def test_the_library_names_no_option_that_nobody_can_set() -> None:
    for schema, _, _ in UNENFORCED:
        with pytest.raises(UsageError) as caught:
            read(Generation(json_schema=schema))
        assert "coerce_one_of" not in caught.value.message
