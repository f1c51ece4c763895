"""Objects under a schema have no keys that it does not name, unless it asks for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from genctl.decode.processors.closed_schema import closed
from tests.decode.processors.grammar.machines import machine
from tests.tiny import tokenizer

A = {"type": "object", "properties": {"a": {"const": 1}}}
CLOSED = {**A, "additionalProperties": False}


def accepts(schema: dict[str, Any], text: str) -> bool:
    return machine(json_schema=schema).accepts(tokenizer().encode(text))


def test_a_key_that_is_not_named_is_barred_unless_it_is_asked_for() -> None:
    assert accepts(A, '{"a":1}')
    assert not accepts(A, '{"b":1}')
    assert accepts({**A, "additionalProperties": True}, '{"b":1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"items": A},
        {"prefixItems": [A]},
        {"properties": {"x": A}, "additionalProperties": True},
        {"anyOf": [A, {"type": "null"}]},
        {"$defs": {"x": A}, "$ref": "#/$defs/x"},
    ],
)
def test_parts_are_closed_where_they_stand_alone(schema: dict[str, Any]) -> None:
    before = copy.deepcopy(schema)
    assert repr(closed(schema)) == repr(schema).replace(repr(A), repr(CLOSED))
    assert schema == before


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": {"type": "number"}},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "required": ["a", "b"]},
        {**A, "minProperties": 2},
        {**A, "allOf": [{"properties": {"b": {}}}]},
        {"allOf": [A, {"properties": {"b": {}}}]},
        {"properties": {"kind": {}}, "anyOf": [A, {"properties": {"b": {}}}]},
        {"$defs": {"x/y": A}, "allOf": [{"$ref": "#/$defs/x~1y"}, {"properties": {"b": {}}}]},
        {"$defs": {"x": A}, "$ref": "#/$defs/x", "required": ["b"]},
        True,
    ],
)
def test_parts_that_need_other_keys_stay_open(schema: Any) -> None:
    assert closed(schema) == schema
