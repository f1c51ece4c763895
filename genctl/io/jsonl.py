"""Check a row of named values, from a line of JSONL or a table. Hostile lines are refused with an error message.

A row is an object with exactly one of `prompt` (a string; `text` is used if there is none), `prompt_ids` (a list of
token ids) and `messages` (a list of `{"role", "content"}`, an assistant's also with `tool_calls`). Optional keys: `id`
(a string or an integer), `params` (an object of preset keys), `reference` (a string or a list of strings), `prefix`,
`system` and `negative_prompt` (strings), and `tools` (a list of objects), none of them null. All other keys are
columns, which are copied to the row's records. A row may also be a request of an OpenAI batch file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from genctl.config import reader
from genctl.config.check import known
from genctl.config.names import ALIASES
from genctl.config.reader import BadJson, kind_of
from genctl.errors import is_one_edit, nearest, quote
from genctl.io.rows import SCHEMA, RefusedRow
from genctl.io.template import Template
from genctl.params import knobs

LARGEST_ID = 2**63 - 1  # what an int64 tensor holds

PROMPTS = ("prompt", "prompt_ids", "messages")
EXTRA = ("reference", "prefix", "system", "negative_prompt")
KNOWN = ("id", *PROMPTS, "params", "tools", *EXTRA)
_EMPTY = ("", None)
_COMPARED = 200  # most column names that are compared with a missing key

_ESCAPED, _SURROGATE = re.compile(r"\\u[dD]"), re.compile("[\ud800-\udfff]")


def parse(line: str) -> dict[str, Any]:
    """The object on this line. Raises RefusedRow for anything but one finite JSON object without duplicate keys."""
    data = _loads(line)
    if not isinstance(data, dict):
        raise RefusedRow(f'expected an object such as {{"prompt": "…"}}, got {kind_of(data)}')
    return data


def _loads(text: str) -> Any:
    """The value of a JSON text. Raises RefusedRow, also for a lone surrogate."""
    try:
        value = reader.loads(text)
    except BadJson as error:
        raise RefusedRow(str(error)) from None
    if _ESCAPED.search(text) and (half := _SURROGATE.search(json.dumps(value, ensure_ascii=False))):
        raise RefusedRow(f"half of a surrogate pair ({quote(half[0])}) is not text")
    return value


def _nested(key: str, text: str) -> Any:
    """The value of a string that contains JSON. Raises RefusedRow, which names the key."""
    try:
        return _loads(text)
    except RefusedRow as error:
        raise RefusedRow(f"{key}: {error}") from None


# -- ids ---------------------------------------------------------------------------------------------------------------


def row_id(data: dict[str, Any]) -> str | None:
    """The explicit id of the row as a string; None if it has none. Raises RefusedRow if it is invalid."""
    if "id" not in data:
        return None
    value = data["id"]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise RefusedRow(f"id: expected a string or an integer, got {kind_of(value)}")
    if value == "":
        raise RefusedRow("id: is empty")
    try:
        return str(value)
    except ValueError:  # too many digits
        raise RefusedRow("id: an integer has too many digits") from None


class UsedIds:
    """Checks whether an earlier row has an id. A million rows with explicit ids take about 100 MiB, others nothing.

    Only 64-bit hashes of explicit ids are stored. Among a million ids, two different ones collide with a probability of
    3e-8; the later row is then refused as a duplicate, never confused with the other.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}  # hash of an explicit id -> the first row that has it
        self._own = bytearray()  # by index: whether the row has an explicit id; 0 beyond its end

    def claim(self, own_id: str | None, index: int, unit: str = "line") -> None:
        """Claim an id (None: the index). Raises RefusedRow if an earlier row has it. `unit` is a noun for rows."""
        name = str(index) if own_id is None else own_id
        earlier = self._rows.get(hash(name))
        if own_id is not None:
            self._own.extend(bytes(index - len(self._own)) + b"\1")
            if earlier is None and name.isdecimal() and len(name) < 20 and name == str(number := int(name)):
                earlier = number if number < index and not self._own[number] else None
            self._rows.setdefault(hash(name), index if earlier is None else earlier)
        if earlier is not None:
            raise RefusedRow(f"the id {quote(name)} is already used in {unit} {earlier + 1}")


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowShape:
    """The keys that a command reads from a row, and how."""

    known: tuple[str, ...]  # keys that the command reads ("own keys"); all others are columns
    prompts: tuple[str, ...]  # those of `known` that hold the prompt; a template replaces them
    # a row's own keys, and the names of its columns -> keyword arguments of `InputRow`; raises RefusedRow
    fields: Callable[[dict[str, Any], Iterable[str]], dict[str, Any]]
    nested: frozenset[str] = frozenset(("messages", "params", "prompt_ids", "tools"))  # JSON in a cell of a table

    def split(
        self, data: dict[str, Any], template: Template | None, *, cells: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The row's own keys, and its columns. With a template, prompt keys are columns, too.

        In a table (`cells`) an empty cell is a missing key. In a genctl record, `prompt_ids` replaces `prompt`.
        """
        is_record = template is None and data.get("schema") == SCHEMA and "prompt_ids" in data.keys() & {*self.known}
        own: dict[str, Any] = {}
        columns: dict[str, Any] = {}
        for key, value in data.items():
            if is_record and key == "prompt":
                continue
            if key not in self.known or (template is not None and key in self.prompts):
                columns[key] = value
            elif not (cells and value in _EMPTY):
                own[key] = value
        if "text" in columns and template is None and own.keys().isdisjoint(self.prompts):
            own["prompt"] = columns.pop("text")
        return own, columns

    def unfold(self, own: dict[str, Any]) -> None:
        """Parse the cells of a table that hold JSON. Raises RefusedRow."""
        for key in sorted(self.nested & own.keys()):
            value = own[key]
            own[key] = _nested(key, value) if isinstance(value, str) else _without_nulls(value)

    def filled(self, template: Template, data: dict[str, Any]) -> str:
        """The prompt that a template makes of a row. Raises RefusedRow, also for a row with another prompt key."""
        if data.get("schema") == SCHEMA:
            earlier = data.get("input")  # for a genctl record: the columns of its row
            return template.fill({**earlier, **data} if isinstance(earlier, dict) else data)
        for key in self.prompts:
            if key not in ("prompt", "text") and data.get(key) not in _EMPTY:
                raise RefusedRow(f"template: it makes a prompt, but the row has {key}")
        return template.fill(data)

    def suggested(self, name: str) -> str:
        """The key that a column's name is one edit from, or an empty string."""
        # `idx` is no misspelt `id`: names this short must match except for case
        choices = self.known if len(name) < 32 and name not in self.known else ()
        return next((key for key in choices if name.lower() == key or (len(key) > 2 and is_one_edit(name, key))), "")


def _without_nulls(value: Any) -> Any:
    """A Parquet value without nulls: Parquet's objects all have the same keys, with null for missing ones."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


class RowKey(NamedTuple):
    """The values that a key may have."""

    kind: type | tuple[type, ...]
    expected: str  # the same for error messages
    make: Callable[[Any], Any] = lambda value: value  # raises RefusedRow
    empty: str = ""  # the error for an empty value; "" if it is allowed


def checked(
    own: dict[str, Any], columns: Iterable[str], keys: Mapping[str, RowKey], lack: str, *groups: tuple[str, ...]
) -> dict[str, Any]:
    """The values of a row's own keys. Raises RefusedRow with all errors.

    Keys of a group exclude each other; one of the first group is required, and `lack` is the error if there is none.
    """
    mistakes = [no_prompt(lack, groups[0], columns)] if own.keys().isdisjoint(groups[0]) else []
    for group in groups:
        if len(given := [key for key in group if key in own]) > 1:
            mistakes.append(f"{' and '.join(given)} exclude each other")
    values: dict[str, Any] = {}
    for key, (kind, expected, make, empty) in keys.items():
        if key not in own:
            continue
        value = own[key]
        try:
            if not isinstance(value, kind):
                raise RefusedRow(f"expected {expected}, got {kind_of(value)}")
            if empty and not value:
                raise RefusedRow(empty)
            values[key] = make(value)
        except RefusedRow as error:
            mistakes.append(f"{key}: {error}")
    if mistakes:
        raise RefusedRow("; ".join(mistakes))
    return values


def _fields(own: dict[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    """The keyword arguments of `InputRow` besides id, index, columns and where. Raises RefusedRow with all errors."""
    values = checked(own, columns, _KEYS, "no prompt", PROMPTS)
    extra = {key: values.pop(key) for key in (*EXTRA, "tools") if key in values}
    return {**values, "extra": extra}


ROW = RowShape(KNOWN, PROMPTS, _fields)


def _scored_fields(own: dict[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    """The same for a row of `genctl score`, which has a `text` (or `prompt`) with `context` or `target`, or a list of
    `candidates` with `context`; the latter three are in `extra`. Raises RefusedRow with all errors.
    """
    values = checked(own, columns, _SCORED_KEYS, "nothing to score", SCORED, ("target", "candidates"))
    extra = {key: values[key] for key in ("context", "target", "candidates") if key in values}
    return {"prompt": values.get("text", values.get("prompt")), "extra": extra}


SCORED = ("text", "prompt", "candidates")
SCORED_ROW = RowShape(("id", *SCORED, "context", "target"), SCORED, _scored_fields, frozenset(("candidates",)))


def no_prompt(lack: str, expected: tuple[str, ...], columns: Iterable[str]) -> str:
    """The error message for a row or a table without a prompt."""
    names = list(islice(columns, _COMPARED))
    near = next((f" (is {quote(name)} meant as {key}?)" for key in expected if (name := nearest(key, names))), "")
    return f"{lack}: expected one of {', '.join(expected)}{near}"


def each(values: list[Any], make: Callable[[Any], Any], label: str = "item") -> tuple[Any, ...]:
    """The results of `make` for each item. A RefusedRow gets the item's number, from 1."""
    made: list[Any] = []
    for value in values:
        try:
            made.append(make(value))
        except RefusedRow as error:
            raise RefusedRow(f"{label} {len(made) + 1}: {error}") from None
    return tuple(made)


def _token_id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RefusedRow(f"expected an integer, got {kind_of(value)}")
    if not 0 <= value <= LARGEST_ID:
        raise RefusedRow(f"a token id lies between 0 and {LARGEST_ID}")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise RefusedRow(f"expected a string, got {kind_of(value)}")
    if not value:
        raise RefusedRow("is empty")
    return value


def _all(values: Any, kind: type, expected: str) -> Any:
    if isinstance(values, list) and not all(isinstance(value, kind) for value in values):
        raise RefusedRow(f"expected {expected}, got a list")
    return values


def unknown_keys(keys: Iterable[str], known: tuple[str, ...]) -> list[str]:
    """A phrase for each unknown key; at most three are named."""
    unknown = [key for key in keys if key not in known]
    near = [f" (did you mean {name}?)" if (name := nearest(key, known)) else "" for key in unknown[:3]]
    more = [f"and {len(unknown) - 3} more unknown keys"] if len(unknown) > 3 else []
    return [f"unknown key {quote(key)}{hint}" for key, hint in zip(unknown, near, strict=False)] + more


# -- messages of a conversation ----------------------------------------------------------------------------------------

_TEXTS = ("name", "tool_call_id")  # keys of a message that are strings, besides its role


def _message(value: Any) -> dict[str, Any]:
    """A message in the form that chat templates expect. Raises RefusedRow.

    Keys with null are dropped, except content beside tool calls: templates distinguish that from a missing key.
    """
    if not isinstance(value, dict):
        raise RefusedRow(f"expected an object with role and content, got {kind_of(value)}")
    if value.keys() == {"role", "content"} and value["role"] and all(isinstance(text, str) for text in value.values()):
        return value
    message = {key: item for key, item in value.items() if item is not None or key == "content"}
    if unknown := unknown_keys(message, ("role", "content", *_TEXTS, "tool_calls")):
        raise RefusedRow(unknown[0])
    for key in ("role", *_TEXTS):
        if key in message and not isinstance(message[key], str):
            raise RefusedRow(f"{key}: expected a string, got {kind_of(message[key])}")
    if not message.get("role"):
        raise RefusedRow("role: is empty" if "role" in message else "no role")
    if (calls := message.get("tool_calls", [])) == []:
        message.pop("tool_calls", None)
    else:
        if message["role"] != "assistant":
            raise RefusedRow(f"tool_calls: only the assistant calls tools, not {quote(message['role'])}")
        if not isinstance(calls, list):
            raise RefusedRow(f"tool_calls: expected a list, got {kind_of(calls)}")
        each(calls, _check_call, "tool_calls: item")
        if message.get("content") is None:
            return message
    if "content" not in message:
        raise RefusedRow("no content")
    message["content"] = _content(message["content"])
    return message


def _content(value: Any) -> str:
    """The text of a message. The texts of its parts are joined with newlines, as servers do."""
    if not isinstance(value, list):
        value = [{"type": "text", "text": value}]
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "output_text"):
            kind = part.get("type") if isinstance(part, dict) else part
            raise RefusedRow(f"content: expected a string or parts of type text, got {quote(str(kind))}")
        if not isinstance(part.get("text"), str):
            raise RefusedRow(f"content: expected a string, got {kind_of(part.get('text'))}")
    return "\n".join(part["text"] for part in value)


def _check_call(value: Any) -> None:
    """Raises RefusedRow for a tool call without a name, or with arguments that are neither an object nor its JSON."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedRow('expected {"function": {"name": "…", "arguments": {…}}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        arguments = _nested("arguments", arguments)
    if not isinstance(arguments, dict) and arguments not in (None, ""):
        raise RefusedRow(f"arguments: expected an object, got {kind_of(arguments)}")


_KEYS = {
    "prompt": RowKey(str, "a string", empty="empty prompt"),
    "prompt_ids": RowKey(list, "a list of token ids", lambda ids: each(ids, _token_id), "empty prompt"),
    "messages": RowKey(list, "a list of messages", lambda messages: each(messages, _message), "empty prompt"),
    "params": RowKey(dict, "an object"),
    "reference": RowKey(
        (str, list), "a string or a list of strings", lambda texts: _all(texts, str, "a string or a list of strings")
    ),
    **dict.fromkeys(("prefix", "system", "negative_prompt"), RowKey(str, "a string")),
    "tools": RowKey(list, "a list of objects", lambda tools: _all(tools, dict, "a list of objects")),
}
_SCORED_KEYS = {
    **dict.fromkeys(("text", "prompt", "context", "target"), RowKey(str, "a string", empty="is empty")),
    "candidates": RowKey(list, "a list of strings", lambda texts: each(texts, _string), "is empty"),
}


# -- requests of OpenAI's batch files ----------------------------------------------------------------------------------

_REQUEST = ("custom_id", "method", "url", "body")
_OFF = ("echo", "logprobs", "store", "stream")  # fields that may only be false, and are then ignored


def is_request(data: Mapping[str, Any], prompts: tuple[str, ...]) -> bool:
    """Whether a row is a request: it has a `body`, and no prompt key."""
    return isinstance(data.get("body"), dict) and "messages" in prompts and data.keys().isdisjoint((*prompts, "text"))


def request_row(data: Mapping[str, Any]) -> dict[str, Any]:
    """The row for a request: `custom_id` is the id, `body` holds the prompt and its `params`; other keys are columns.

    Raises RefusedRow for a field without a counterpart in genctl.
    """
    row = {key: value for key, value in data.items() if key not in _REQUEST}
    if not row.keys().isdisjoint(("id", "params")):
        raise RefusedRow("a request has its id in custom_id and its settings in its body")
    if data.get("custom_id") is not None:
        row["id"] = data["custom_id"]
    params: dict[str, Any] = {}
    for name, value in data["body"].items():
        if value is None or name == "model" or (value is False and name in _OFF):
            continue
        if name in ("prompt", "messages", "tools", "user", "metadata"):
            row["prompt_ids" if name == "prompt" and isinstance(value, list) else name] = value
        elif name == "logit_bias" and isinstance(value, dict):
            params[name] = {f"#{key}" if key.isdecimal() else key: bias for key, bias in value.items()}
        elif name == "response_format":
            params |= _format(value)
        elif (knob := ALIASES.get(name, name)) in known():
            if params.setdefault(knob, value) != value:
                raise RefusedRow(f"body.{name}: it contradicts {knob} = {params[knob]}")
        else:
            raise RefusedRow(f"body.{name}: genctl cannot honour it")
    sampling = {name for name in params if name in knobs() and knobs()[name].metadata["sampling"]}
    if params.get("temperature") == 0 and params["temperature"] is not False:
        params = {"do_sample": False, **{name: value for name, value in params.items() if name not in sampling}}
    elif sampling:  # OpenAI's API samples unless the temperature is 0; then other sampling settings are ignored
        params = {"do_sample": True, **params}
    return {**row, "params": params} if params else row


def _format(value: Any) -> dict[str, Any]:
    """The settings of a `response_format`."""
    match value:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": schema}} if schema is not None:
            return {"json_schema": schema}
    raise RefusedRow("body.response_format: genctl cannot honour it")
