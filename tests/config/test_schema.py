"""The JSON Schema of a preset, with a validator of our own for the words of JSON Schema that it uses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from genctl import params
from genctl.config import presets
from genctl.config.presets import schema
from genctl.config.toml import decode, parse, read_bytes

KINDS: dict[str, Any] = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
HANDLED = {
    "type", "enum", "const", "anyOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength",
    "items", "minItems", "maxItems", "prefixItems", "properties", "required", "additionalProperties", "description",
    "default", "title", "$schema", "$defs", "$ref",
}  # fmt: skip


def valid(value: Any, rule: Any, root: dict[str, Any]) -> bool:
    if isinstance(rule, bool):
        return rule
    assert set(rule) <= HANDLED, f"the validator does not know {set(rule) - HANDLED}"
    if "$ref" in rule:
        return valid(value, root["$defs"][rule["$ref"].rsplit("/", 1)[1]], root)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kind = rule.get("type")
    if kind == "integer" and not (number and value == int(value)):
        return False
    if kind == "number" and not number:
        return False
    if kind in KINDS and not isinstance(value, KINDS[kind]):
        return False
    if value not in rule.get("enum", [value]) or value != rule.get("const", value):
        return False
    if "anyOf" in rule and not any(valid(value, branch, root) for branch in rule["anyOf"]):
        return False
    if number and not (
        rule.get("minimum", value) <= value <= rule.get("maximum", value)
        and rule.get("exclusiveMinimum", value - 1) < value < rule.get("exclusiveMaximum", value + 1)
    ):
        return False
    if isinstance(value, str) and len(value) < rule.get("minLength", 0):
        return False
    if isinstance(value, list):
        if not rule.get("minItems", 0) <= len(value) <= rule.get("maxItems", len(value)):
            return False
        first = rule.get("prefixItems", [])
        pairs = [*zip(value, first, strict=False), *((item, rule.get("items", True)) for item in value[len(first) :])]
        return all(valid(item, inner, root) for item, inner in pairs)
    if isinstance(value, dict):
        known = rule.get("properties", {})
        rest = rule.get("additionalProperties", True)
        return set(rule.get("required", [])) <= set(value) and all(
            valid(item, known.get(key, rest), root) for key, item in value.items()
        )
    return True


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return schema()


def test_the_schema_is_json_and_names_its_draft(document: dict[str, Any]) -> None:
    assert json.loads(json.dumps(document, allow_nan=False)) == json.loads(json.dumps(document))
    assert document["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_every_knob_is_in_it_with_its_meaning_and_default(document: dict[str, Any]) -> None:
    for kind in (params.Generation, params.Runtime):
        for key, item in params.knobs(kind).items():
            if key in ("trust_remote_code", "allow_pickle", "allow_plugins"):
                assert key not in document["properties"]
                continue
            rule = document["properties"][key]
            assert rule["description"] == item.metadata["about"]
            assert rule.get("default") == getattr(kind(), key)
    assert {"about", "extends", "processors", "stopping"} <= set(document["properties"])


@pytest.mark.parametrize("path", sorted(presets.shipped_folder().glob("*.toml")), ids=lambda path: path.stem)
def test_a_shipped_preset_satisfies_the_schema(document: dict[str, Any], path: Any) -> None:
    assert valid(parse(decode(read_bytes(path), path.name), path.name), document, document)


def test_the_defaults_satisfy_the_schema(document: dict[str, Any]) -> None:
    defaults = {key: rule["default"] for key, rule in document["properties"].items() if "default" in rule}
    assert valid(defaults, document, document)


@pytest.mark.parametrize(
    "text",
    [
        "temperature = -1",
        'top_k = "5"',
        "top_p = 1.5",
        "typical_p = 0",
        "epsilon_cutoff = 1",
        "unknown = 1",
        'dtype = "int3"',
        'eos_token_id = ["a"]',
        "extends = 3",
        'extends = [""]',
        "processors = [{}]",
        "stopping = 3",
        "do_sample = 1",
        "exponential_decay_length_penalty = [1]",
        "trust_remote_code = true",
        "about = 1",
    ],
)
def test_what_the_loader_refuses_the_schema_refuses(document: dict[str, Any], text: str) -> None:
    assert not valid(parse(text, "x"), document, document)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "temperature = 1",
        'extends = ["a", "b"]',
        "eos_token_id = 3",
        "eos_token_id = [3, 4]",
        '[[processors]]\nuse = "top_k"\ntop_k = 5',
        "exponential_decay_length_penalty = [5, 1.1]",
        "logit_bias = {a = 1.0}",
    ],
)
def test_what_the_loader_takes_the_schema_takes(document: dict[str, Any], text: str) -> None:
    assert valid(parse(text, "x"), document, document)
