"""The JSON Schema of a preset, for editors that complete and check TOML."""

from __future__ import annotations

from typing import Any

from genctl import params
from genctl.config.check import UNSAFE, default, known
from genctl.params import Generation, Runtime

NAMES = {"type": "string", "minLength": 1}


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a preset file: every knob with type, bound, meaning and default."""
    from pydantic import TypeAdapter

    properties: dict[str, Any] = {
        "about": {"type": "string", "description": "one line on what the preset is for"},
        "extends": {
            "description": "presets to start from, left to right: names, or files beside this one",
            "anyOf": [NAMES, {"type": "array", "items": NAMES}],
        },
    }
    definitions: dict[str, Any] = {}
    for kind in (Generation, Runtime):
        for key, item in params.knobs(kind).items():
            if key in UNSAFE:
                continue
            knob_schema = TypeAdapter(known()[key][1]).json_schema(ref_template="#/$defs/{model}")
            definitions |= knob_schema.pop("$defs", {})
            properties[key] = {"description": item.metadata["about"], **_without_null(knob_schema)}
            if default(key) is not None:
                properties[key]["default"] = default(key)
    for key, plural in (("processors", "logits processors"), ("stopping", "stopping criteria")):
        properties[key] = {
            "type": "array",
            "description": f"{plural}, in the order in which they are applied",
            "items": {
                "type": "object",
                "properties": {"use": {"type": "string", "minLength": 1, "description": "which one"}},
                "required": ["use"],
            },
        }
    document: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "genctl preset",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }
    return document | ({"$defs": definitions} if definitions else {})


def _without_null(knob_schema: dict[str, Any]) -> dict[str, Any]:
    """A knob's schema without null, which TOML does not have, and without pydantic's titles."""
    knob_schema = {key: value for key, value in knob_schema.items() if key not in ("title", "default")}
    branches = [branch for branch in knob_schema.pop("anyOf", []) if branch != {"type": "null"}]
    if len(branches) == 1:
        return {**branches[0], **knob_schema}
    return {**knob_schema, "anyOf": branches} if branches else knob_schema
