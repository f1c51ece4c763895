"""A row of named values, from a line of JSONL or a table: to its fields. Hostile lines are refused with a sentence.

A row is an object with exactly one of `prompt` (a string; `text` serves where there is none), `prompt_ids` (a list of
token ids) and `messages` (a list of `{"role", "content"}`, those of an assistant also with `tool_calls`); besides, `id`
(a string or an integer), `params` (an object of preset keys), `reference` (a string or a list of strings), `prefix`,
`system` and `negative_prompt` (strings), and `tools` (a list of objects), none of them null. Its other keys are
columns, which go into its records.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from genctl.documents import reader
from genctl.documents.reader import BadJson, kind_of
from genctl.errors import is_one_edit, nearest, quote
from genctl.io.rows import SCHEMA, RefusedRow
from genctl.io.template import Template

LARGEST_ID = 2**63 - 1  # what an int64 tensor holds

PROMPTS = ("prompt", "prompt_ids", "messages")
EXTRA = ("reference", "prefix", "system", "negative_prompt")
KNOWN = ("id", *PROMPTS, "params", "tools", *EXTRA)
_EMPTY = ("", None)
_COMPARED = 200  # names of columns that are compared with a missing key
_LONG = 32  # letters of a name that is not compared with ours

_ESCAPED, _SURROGATE = re.compile(r"\\u[dD]"), re.compile("[\ud800-\udfff]")


def parse(line: str) -> dict[str, Any]:
    """The object on this line. Raises RefusedRow for anything but one plain, finite, unambiguous JSON object."""
    data = _loads(line)
    if not isinstance(data, dict):
        raise RefusedRow(f'expected an object such as {{"prompt": "…"}}, got {kind_of(data)}')
    return data


def _loads(text: str) -> Any:
    """The value of a JSON text. Raises RefusedRow, also for half of a surrogate pair, which is no text."""
    try:
        value = reader.loads(text)
    except BadJson as error:
        raise RefusedRow(str(error)) from None
    if _ESCAPED.search(text) and (half := _SURROGATE.search(json.dumps(value, ensure_ascii=False))):
        raise RefusedRow(f"half of a surrogate pair ({quote(half[0])}) is not text")
    return value


def _nested(key: str, text: str) -> Any:
    """The value of a text that is JSON itself. Raises RefusedRow, which names the key."""
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

    Explicit ids are stored as 64 bits of their hash with the row's index. Among a million ids two different ones
    collide with a probability of 3e-8; then the later row is refused as a duplicate, never confused with the other.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}  # hash of an explicit id -> the first row that has it
        self._named = bytearray()  # by index: whether the row has an explicit id, or is bad; 0 beyond its end

    def claim(self, own_id: str | None, index: int, unit: str = "line") -> None:
        """Claim an id (None: the index). Raises RefusedRow if an earlier row has it; `unit` is what rows are called."""
        if own_id is None and not self._rows:
            return
        name = str(index) if own_id is None else own_id
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        key = int.from_bytes(digest, "big")
        earlier = self._rows.get(key)
        if own_id is not None:
            if earlier is None and len(name) < 20 and name.isdecimal() and name.isascii() and str(int(name)) == name:
                number = int(name)
                by_index = number < index and not any(self._named[number : number + 1])
                earlier = number if by_index else None
            self.not_by_index(index)
            self._rows.setdefault(key, index if earlier is None else earlier)
        if earlier is not None:
            raise RefusedRow(f"the id {quote(name)} is already used in {unit} {earlier + 1}")

    def not_by_index(self, index: int) -> None:
        """Note that the newest row has an explicit id, or is bad."""
        self._named.extend(bytes(index + 1 - len(self._named)))
        self._named[index] = 1


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowShape:
    """What a command makes of a row."""

    known: tuple[str, ...]  # keys of its own; all others are columns
    prompts: tuple[str, ...]  # those of `known` that are what is read; a template takes their place
    # its own keys, and the names of its columns -> keyword arguments of `InputRow`; raises RefusedRow
    fields: Callable[[dict[str, Any], Iterable[str]], dict[str, Any]]
    nested: frozenset[str] = frozenset(("messages", "params", "prompt_ids", "tools"))  # JSON in a cell of a table

    def split(
        self, data: dict[str, Any], template: Template | None, *, cells: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The row's own keys, and its columns. Those that a template makes the prompt of are columns, too.

        In the `cells` of a table an empty one is a key that the row lacks. Of a record the ids say what was read.
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
        """Read the cells of a table that hold JSON. Raises RefusedRow."""
        for key in sorted(self.nested & own.keys()):
            value = own[key]
            own[key] = _nested(key, value) if isinstance(value, str) else _without_nulls(value)

    def filled(self, template: Template, data: dict[str, Any]) -> str:
        """The prompt that a template makes of a row. Raises RefusedRow, also for a row with another than `prompt`."""
        if data.get("schema") == SCHEMA:
            earlier = data.get("input")  # the columns of a record that is a row
            return template.fill({**earlier, **data} if isinstance(earlier, dict) else data)
        for key in self.prompts:
            if key not in ("prompt", "text") and data.get(key) not in _EMPTY:
                raise RefusedRow(f"template: it makes a prompt, but the row has {key}")
        return template.fill(data)

    def suggested(self, name: str) -> str:
        """The key that a column's name is one edit from, or an empty string."""
        if len(name) >= _LONG or name in self.known:
            return ""
        # `idx` is no misspelt `id`: of names as short as that only other capitals count
        return next((key for key in self.known if name.lower() == key or (len(key) > 2 and is_one_edit(name, key))), "")


def _without_nulls(value: Any) -> Any:
    """A value of Parquet, whose objects all have the same keys: null where one has none."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


# the type of each key, and its name
_EXPECTED: dict[str, tuple[type | tuple[type, ...], str]] = {
    "prompt": (str, "a string"),
    "prompt_ids": (list, "a list of token ids"),
    "messages": (list, "a list of messages"),
    "params": (dict, "an object"),
    "reference": ((str, list), "a string or a list of strings"),
    "prefix": (str, "a string"),
    "system": (str, "a string"),
    "negative_prompt": (str, "a string"),
    "tools": (list, "a list of objects"),
}
_ITEMS = {"reference": str, "tools": dict}  # of lists


def _fields(own: dict[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    """The keyword arguments of `InputRow` besides id, index, columns and where. Raises RefusedRow with all errors."""
    mistakes = []
    prompts = [key for key in PROMPTS if key in own]
    if not prompts:
        mistakes.append(no_prompt("no prompt", PROMPTS, columns))
    elif len(prompts) > 1:
        mistakes.append(f"{' and '.join(prompts)} exclude each other")
    values: dict[str, Any] = {}
    for key, (kind, expected) in _EXPECTED.items():
        if key not in own:
            continue
        value: Any = own[key]
        values[key] = value
        items = value if isinstance(value, list) and key in _ITEMS else ()
        if not isinstance(value, kind) or not all(isinstance(item, _ITEMS[key]) for item in items):
            mistakes.append(f"{key}: expected {expected}, got {kind_of(value)}")
        elif key in PROMPTS and not value:
            mistakes.append(f"{key}: empty prompt")
        elif key in ("prompt_ids", "messages"):
            try:
                values[key] = each(own[key], _token_id if key == "prompt_ids" else _message)
            except RefusedRow as error:
                mistakes.append(f"{key}: {error}")
    if mistakes:
        raise RefusedRow("; ".join(mistakes))
    extra = {key: values.pop(key) for key in (*EXTRA, "tools") if key in values}
    return {**values, "extra": extra}


ROW = RowShape(KNOWN, PROMPTS, _fields)


def no_prompt(lack: str, expected: tuple[str, ...], columns: Iterable[str]) -> str:
    """The sentence for a row, or a table, that has nothing to read."""
    names = list(islice(columns, _COMPARED))
    near = next((f" (is {quote(name)} meant as {key}?)" for key in expected if (name := nearest(key, names))), "")
    return f"{lack}: expected one of {', '.join(expected)}{near}"


def each(values: list[Any], make: Callable[[Any], Any]) -> tuple[Any, ...]:
    """What `make` returns for each item. Its RefusedRow gets the item's number, from 1."""
    made: list[Any] = []
    for value in values:
        try:
            made.append(make(value))
        except RefusedRow as error:
            raise RefusedRow(f"item {len(made) + 1}: {error}") from None
    return tuple(made)


def _token_id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RefusedRow(f"expected an integer, got {kind_of(value)}")
    if not 0 <= value <= LARGEST_ID:
        raise RefusedRow(f"a token id lies between 0 and {LARGEST_ID}")
    return value


def unknown_keys(keys: Iterable[str], known: tuple[str, ...]) -> list[str]:
    """A phrase for each key that is not known, of which three are named."""
    unknown = [key for key in keys if key not in known]
    mistakes = []
    for key in unknown[:3]:
        near = nearest(key, known)
        mistakes.append(f"unknown key {quote(key)}" + (f" (did you mean {near}?)" if near else ""))
    if len(unknown) > 3:
        mistakes.append(f"and {len(unknown) - 3} more unknown keys")
    return mistakes


# -- messages of a conversation ----------------------------------------------------------------------------------------

_TEXTS = ("name", "tool_call_id")  # keys of a message that are strings, besides its role


def _message(value: Any) -> dict[str, Any]:
    """A message as a chat template reads it. Raises RefusedRow.

    Null is no value, but for content beside calls of tools, which templates tell from none.
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
        try:
            each(calls, _check_call)
        except RefusedRow as error:
            raise RefusedRow(f"tool_calls: {error}") from None
        if message.get("content") is None:
            return message
    if "content" not in message:
        raise RefusedRow("no content")
    message["content"] = _content(message["content"])
    return message


def _content(value: Any) -> str:
    """The text of a message; of parts, their texts, a line each, as servers join them."""
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
    """Raises RefusedRow for a call of a tool without a name, or whose arguments are neither an object nor its JSON."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedRow('expected {"function": {"name": "…", "arguments": {…}}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        arguments = _nested("arguments", arguments)
    if not isinstance(arguments, dict) and arguments not in (None, ""):
        raise RefusedRow(f"arguments: expected an object, got {kind_of(arguments)}")
