"""One line of a JSONL batch: from text to the fields of a row. Hostile lines are refused with a sentence.

A row is an object with exactly one of `prompt` (a string), `prompt_ids` (a list of token ids) and `messages` (a list
of `{"role", "content"}`); besides, `id` (a string or an integer), `params` (an object of preset keys), `reference`
(a string or a list of strings), `prefix`, `system` and `negative_prompt` (strings). Nothing else, and no nulls.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from genctl.batch.printable import Refused, quote
from genctl.errors import nearest, reason_of

DEEPEST = 64  # levels of nesting; far below what recursive code downstream can take
LARGEST_ID = 2**63 - 1  # what an int64 tensor holds

PROMPTS = ("prompt", "prompt_ids", "messages")
EXTRA = ("reference", "prefix", "system", "negative_prompt")
KNOWN = ("id", *PROMPTS, "params", *EXTRA)

_SURROGATE = re.compile("[\ud800-\udfff]")


def parse(line: str) -> dict[str, Any]:
    """The object on this line. Raises Refused for anything that is not one plain, finite, unambiguous JSON object."""
    try:
        data = json.loads(line, parse_constant=_constant, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise Refused(reason_of(error)) from None
    except RecursionError:
        raise Refused(f"nested more than {DEEPEST} levels deep") from None
    except ValueError:  # the interpreter's limit on the digits of an integer
        raise Refused("an integer has too many digits") from None
    if not isinstance(data, dict):
        raise Refused(f'expected an object such as {{"prompt": "…"}}, got {_kind(data)}')
    for key, value in data.items():
        _check_plain(key, value)
    return data


def row_id(data: dict[str, Any]) -> str | None:
    """The id that the row says, as a string; None if it says none. Raises Refused if it cannot be one."""
    if "id" not in data:
        return None
    value = data["id"]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise Refused(f"id: expected a string or an integer, got {_kind(value)}")
    if value == "":
        raise Refused("id: is empty")
    try:
        return str(value)
    except ValueError:  # more digits than may be written
        raise Refused("id: an integer has too many digits") from None


def fields(data: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `InputRow` besides id, index and where. Raises Refused with all mistakes in one line."""
    mistakes = _unknown(data, KNOWN)
    given = [key for key in PROMPTS if key in data]
    if not given:
        mistakes.append("no prompt: expected one of prompt, prompt_ids, messages")
    elif len(given) > 1:
        mistakes.append(f"{' and '.join(given)} exclude each other")
    made: dict[str, Any] = {}
    for key, make in (("prompt", _prompt), ("prompt_ids", _prompt_ids), ("messages", _messages), ("params", _params)):
        if key in data:
            try:
                made[key] = make(data[key])
            except Refused as error:
                mistakes.append(f"{key}: {error}")
    for key in EXTRA:
        value = data.get(key, "")
        listed = key == "reference" and isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not isinstance(value, str) and not listed:
            wanted = "a string or a list of strings" if key == "reference" else "a string"
            mistakes.append(f"{key}: expected {wanted}, got {_kind(value)}")
    if mistakes:
        raise Refused("; ".join(mistakes))
    return {**made, "extra": {key: data[key] for key in EXTRA if key in data}}


def _prompt(value: Any) -> str:
    if not isinstance(value, str):
        raise Refused(f"expected a string, got {_kind(value)}")
    if not value:
        raise Refused("empty prompt")
    return value


def _prompt_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise Refused(f"expected a list of token ids, got {_kind(value)}")
    if not value:
        raise Refused("empty prompt")
    for place, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int):
            raise Refused(f"item {place}: expected an integer, got {_kind(item)}")
        if not 0 <= item <= LARGEST_ID:
            raise Refused(f"item {place}: a token id lies between 0 and {LARGEST_ID}")
    return tuple(value)


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list):
        raise Refused(f"expected a list of messages, got {_kind(value)}")
    if not value:
        raise Refused("empty prompt")
    for place, item in enumerate(value):
        if not isinstance(item, dict):
            raise Refused(f"item {place}: expected an object with role and content, got {_kind(item)}")
        if unknown := _unknown(item, ("role", "content")):
            raise Refused(f"item {place}: {unknown[0]}")
        for key in ("role", "content"):
            if key not in item:
                raise Refused(f"item {place}: no {key}")
            if not isinstance(item[key], str):
                raise Refused(f"item {place}: {key}: expected a string, got {_kind(item[key])}")
        if not item["role"]:
            raise Refused(f"item {place}: role: is empty")
    return tuple(value)


def _params(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused(f"expected an object, got {_kind(value)}")
    return value


def _unknown(data: dict[str, Any], known: tuple[str, ...]) -> list[str]:
    unknown = [key for key in data if key not in known]
    mistakes = []
    for key in unknown[:3]:
        near = nearest(key, known)
        mistakes.append(f"unknown key {quote(key)}" + (f" (did you mean {near}?)" if near else ""))
    if len(unknown) > 3:
        mistakes.append(f"and {len(unknown) - 3} more unknown keys")
    return mistakes


def _check_plain(key: str, value: Any) -> None:
    """Raises Refused if there is a number or a string in here that is none, or too deep a nest."""
    waiting: list[tuple[Any, int]] = [(key, 1), (value, 2)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, str):
            if half := _SURROGATE.search(item):
                raise Refused(f"{quote(key)}: half of a surrogate pair ({quote(half[0])}) is not text")
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise Refused(f"{quote(key)}: a number is too large")
        elif isinstance(item, (dict, list)):
            if depth > DEEPEST:
                raise Refused(f"{quote(key)}: nested more than {DEEPEST} levels deep")
            if isinstance(item, dict):
                waiting += [(inner, depth + 1) for inner in item]
            waiting += [(inner, depth + 1) for inner in (item.values() if isinstance(item, dict) else item)]


def _constant(name: str) -> NoReturn:
    raise Refused(f"not JSON: {name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise Refused(f"the key {quote(key)} occurs twice")
        made[key] = value
    return made


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {str: "a string", int: "an integer", float: "a number", list: "a list", dict: "an object"}
    return names[type(value)]
