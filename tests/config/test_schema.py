"""The JSON Schema of a preset."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from genctl import params
from genctl.config import presets
from genctl.config.presets import schema
from genctl.config.toml import decode, parse, read_bytes


def valid(value: Any, document: dict[str, Any]) -> bool:
    return bool(Draft202012Validator(document).is_valid(value))


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
    assert valid(parse(decode(read_bytes(path), path.name), path.name), document)


def test_the_defaults_satisfy_the_schema(document: dict[str, Any]) -> None:
    defaults = {key: rule["default"] for key, rule in document["properties"].items() if "default" in rule}
    assert valid(defaults, document)


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
    assert not valid(parse(text, "x"), document)


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
    assert valid(parse(text, "x"), document)
