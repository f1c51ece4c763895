"""Requests of OpenAI's batch files as rows: `{"custom_id", "method", "url", "body"}`.

The body's prompt becomes that of the row, and its other fields become `params`. A field that genctl cannot honour is a
mistake of the row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from genctl.config.check import known
from genctl.config.names import ALIASES
from genctl.documents.reader import kind_of
from genctl.errors import quote
from genctl.io.rows import RefusedRow
from genctl.params import knobs

MOST_MISTAKES = 5  # that are listed of a request
_REQUEST = frozenset(("custom_id", "method", "url", "body"))
_URL = re.compile(r"(?:.*/v\d+)?/?(chat/completions|completions|responses)/?")
PROMPTS = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}  # the field of the body
LABELS = ("metadata", "user", "safety_identifier", "prompt_cache_key")  # fields that say who asks: columns of the row
# values that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "include": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("auto",),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}


class RequestRow(NamedTuple):
    """A request as the reader takes a row: its keys, the model that it names ("" for none), and what is wrong."""

    row: dict[str, Any]
    model: str
    mistakes: list[str]


def is_request(data: Mapping[str, Any], prompts: tuple[str, ...]) -> bool:
    """Whether a row of prompts is a request: it has a `body`, or two of a request's keys, and none of a prompt's."""
    has_keys = isinstance(data.get("body"), dict) or len(data.keys() & _REQUEST) > 1
    return has_keys and "messages" in prompts and data.keys().isdisjoint((*prompts, "text"))


def row_of(data: Mapping[str, Any]) -> RequestRow:
    """The row of a request. Keys besides those of a request are columns, and so are the body's `LABELS`."""
    row: dict[str, Any] = {key: value for key, value in data.items() if key not in _REQUEST}
    mistakes = ["id and custom_id exclude each other"] if "id" in row and "custom_id" in data else []
    if "params" in row:
        mistakes.append("params: a request has its settings in its body")
    if data.get("custom_id") is not None:
        row["id"] = data["custom_id"]
    if (method := str(data.get("method") or "POST")).upper() != "POST":
        mistakes.append(f"method: expected POST, got {quote(method)}")
    if not isinstance(body := data.get("body"), dict):
        return RequestRow(row, "", [*mistakes, f"body: expected an object, got {kind_of(body)}"])
    fields = {name: value for name, value in body.items() if value is not None}
    model = fields.pop("model", "")
    params: dict[str, Any] = {}
    try:
        row |= _prompt(data.get("url"), fields)
    except RefusedRow as error:
        mistakes.append(str(error))
        fields = {name: value for name, value in fields.items() if name not in PROMPTS.values()}
    for name, value in fields.items():
        try:
            if name in LABELS:
                row[name] = value
            elif name == "tools":
                row[name] = _tools(value)
            else:
                for knob, setting in _settings(name, value).items():
                    before = params.setdefault(knob, setting)
                    if isinstance(before, dict) and isinstance(setting, dict):
                        params[knob] = {**before, **setting}
                    elif before != setting:
                        raise RefusedRow(f"{json.dumps(setting)} contradicts {json.dumps(before)}")
        except RefusedRow as error:
            mistakes.append(f"body.{name}: {error}")
    if len(mistakes) > MOST_MISTAKES:
        mistakes[MOST_MISTAKES:] = [f"and {len(mistakes) - MOST_MISTAKES} more mistakes"]
    sampling = {knob for knob in params if knob in knobs() and knobs()[knob].metadata["sampling"]}
    if params.get("temperature") == 0 and params["temperature"] is not False:
        # greedy: nothing else of sampling has an effect
        params = {"do_sample": False, **{knob: params[knob] for knob in params.keys() - sampling}}
    elif sampling:  # the interface samples, unless the temperature is 0
        params = {"do_sample": True, **params}
    if params:
        row["params"] = params
    return RequestRow(row, str(model), mistakes)


def _prompt(url: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The prompt of a row, taken out of the fields: by the URL, else the one that is there. Raises RefusedRow."""
    match = _URL.fullmatch(str(url))
    if match is None and url is not None:
        raise RefusedRow(f"url: expected one of {', '.join(f'/v1/{end}' for end in PROMPTS)}, got {quote(str(url))}")
    expected = [PROMPTS[match[1]]] if match else list(PROMPTS.values())
    name = next((name for name in expected if name in fields), None)
    if name is None:
        raise RefusedRow(f"body: expected {' or '.join(expected)}")
    value = fields.pop(name)
    if name == "input":
        return {"messages": _conversation(value, fields.pop("instructions", None))}
    if name == "prompt" and isinstance(value, list):
        if value and not isinstance(value[0], int):
            if len(value) > 1:
                raise RefusedRow(f"body.prompt: {len(value)} prompts in one request; write a request for each")
            value = value[0]
        name = "prompt_ids" if isinstance(value, list) else name
    return {name: value}


def _conversation(value: Any, instructions: Any) -> Any:
    """The messages of a request for a response. Raises RefusedRow."""
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in value if isinstance(value, list) else [{"role": "user", "content": value}]:
        kind = item.get("type", "message") if isinstance(item, dict) else ""
        if kind == "message":
            messages.append({key: item[key] for key in item if key not in ("type", "id", "status")})
        elif kind == "function_call":
            function = {key: item.get(key) for key in ("name", "arguments")}
            call = {"function": function, "id": item.get("call_id"), "type": "function"}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        else:
            raise RefusedRow(f"body.input: genctl does not read items of type {quote(str(kind))}")
    return messages


def _tools(value: Any) -> Any:
    """Tools as a chat template reads them: that of a request for a response has its fields beside its type."""
    return [
        {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}
        if isinstance(tool, dict) and "name" in tool and "function" not in tool
        else tool
        for tool in (value if isinstance(value, list) else [value])
    ]


def _settings(name: str, value: Any) -> dict[str, Any]:
    """The settings of a field of the body. Raises RefusedRow for one that genctl cannot honour."""
    if name in ("text", "reasoning"):  # those of a request for a response hold one field that genctl has
        inner = "format" if name == "text" else "effort"
        if not isinstance(value, dict):
            raise RefusedRow(f"expected an object, got {kind_of(value)}")
        if others := [key for key in value if key != inner and value[key] is not None]:
            raise RefusedRow(f"genctl cannot honour {quote(others[0])}")
        name, value = "response_format" if name == "text" else "reasoning_effort", value.get(inner)
        if value is None:
            return {}
    if name == "reasoning_effort":
        return {"chat_template_kwargs": {"reasoning_effort": value}}
    if name == "response_format":
        kind = value.get("type") if isinstance(value, dict) else ""
        if kind == "text":
            return {}
        if kind == "json_object":
            return {"json_schema": {"type": "object"}}
        nested = value.get("json_schema", value) if kind == "json_schema" else None
        if not isinstance(nested, dict) or "schema" not in nested:
            raise RefusedRow("expected the type text, json_object, or json_schema with a schema")
        return {"json_schema": nested["schema"]}
    if name == "logit_bias" and isinstance(value, dict):
        return {name: {f"#{key}" if key.isdecimal() else key: bias for key, bias in value.items()}}
    if any(type(value) is type(one) and value == one for one in NEUTRAL.get(name, ())):
        return {}
    if (knob := ALIASES.get(name, name)) in known():
        return {knob: value}
    hint = ": --top-logprobs K gives them for all rows" if name in ("logprobs", "top_logprobs") else ""
    raise RefusedRow(f"genctl cannot honour it{hint}")
