"""Structured output, as the different servers ask for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from genctl.decode.processors.closed_schema import closed
from genctl.documents import reader
from genctl.documents.reader import BadJson, Unreadable
from genctl.engines.server.fields import LLAMA_CPP_PYTHON
from genctl.errors import UsageError
from genctl.params import GRAMMARS, Generation

Refuse = Callable[[str, str], object]
MOST_BYTES = 1 << 20  # of a file


def constrained(
    generation: Generation, fields: frozenset[str], refuse: Any, *, chat: bool, kind: str = ""
) -> dict[str, Any]:
    """The fields that hold the text to a schema, an expression or a grammar. Raises UsageError for a broken file."""
    given = [name for name in GRAMMARS if getattr(generation, name) is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} cannot be combined: each says what the whole text is")
    if not given:
        return {}
    knob = given[0]
    value = schema_of(generation) if knob == "json_schema" else getattr(generation, knob)
    if knob == "grammar":
        value = _text_of(knob, value)
    short = {"json_schema": "json"}.get(knob, knob)
    if "structured_outputs" in fields:  # vLLM since 0.11
        return {"structured_outputs": {short: value}}
    if f"guided_{short}" in fields:  # vLLM before that
        return {f"guided_{short}": value}
    if knob == "json_schema" and "response_format" in fields and (chat or knob not in fields):
        return {"response_format": _response_format(value, kind)}
    names = {"json_schema": ("json_schema",), "regex": ("regex",), "grammar": ("grammar", "ebnf")}[knob]
    name = next((name for name in names if name in fields), None)
    if name is None:
        refuse(knob)
        return {}
    return {name: json.dumps(value) if name == "json_schema" and kind == "sglang" else value}


def _response_format(schema: Any, kind: str) -> dict[str, Any]:
    if kind == LLAMA_CPP_PYTHON:
        return {"type": "json_object", "schema": schema}
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def schema_of(generation: Generation) -> Any:
    """The schema: itself, or what a file or a text holds, without keys that it does not name. Raises UsageError."""
    value = generation.json_schema
    if not isinstance(value, str):
        return closed(value)
    text = _text_of("json_schema", value)
    try:
        return closed(reader.loads(text))
    except BadJson as error:
        raise UsageError(f"json_schema: {error}") from None


def _text_of(knob: str, value: str) -> str:
    """A text, or what the file holds that it names."""
    if any(mark in value for mark in "\n{:") and not _is_file(value):
        return value
    try:
        return reader.text(Path(value).expanduser(), MOST_BYTES, regular=True)
    except (Unreadable, RuntimeError) as error:  # RuntimeError: ~ of a user who is not there
        reason = error if isinstance(error, Unreadable) else "no such file"
        raise UsageError(f"{knob}: {value}: {reason}") from None


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except (OSError, ValueError):  # too long for a name
        return False


def incomplete(generation: Generation, text: str) -> str:
    """The knob whose structure a text that was cut off does not have; "" where that cannot be told."""
    if generation.json_schema is not None:
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return "json_schema"
    if generation.regex is not None:
        try:
            return "" if re.fullmatch(generation.regex, text, re.DOTALL) else "regex"
        except re.error:
            return ""
    return ""
