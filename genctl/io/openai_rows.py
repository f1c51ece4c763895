"""Requests of OpenAI's batch files as rows: `custom_id` is the id, and `body` the prompt and its `params`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from genctl.config.check import known
from genctl.config.names import ALIASES
from genctl.params import knobs

_REQUEST = ("custom_id", "method", "url", "body")


class RequestRow(NamedTuple):
    """A request as the reader takes a row: its keys, the model that it names ("" for none), and what is wrong."""

    row: dict[str, Any]
    model: str
    mistakes: list[str]


def is_request(data: Mapping[str, Any], prompts: tuple[str, ...]) -> bool:
    """Whether a row of prompts is a request: it has a `body`, and no key of a prompt."""
    return isinstance(data.get("body"), dict) and "messages" in prompts and data.keys().isdisjoint((*prompts, "text"))


def row_of(data: Mapping[str, Any]) -> RequestRow:
    """The row of a request. A field without a counterpart in genctl is a mistake; keys beside `body` are columns."""
    row: dict[str, Any] = {key: value for key, value in data.items() if key not in _REQUEST}
    mistakes = ["id and custom_id exclude each other"] if "id" in row and "custom_id" in data else []
    if "params" in row:
        mistakes.append("params: a request has its settings in its body")
    if data.get("custom_id") is not None:
        row["id"] = data["custom_id"]
    body = {name: value for name, value in data["body"].items() if value is not None}
    model = str(body.pop("model", ""))
    row |= {name: body.pop(name) for name in ("prompt", "messages", "tools", "user", "metadata") if name in body}
    if isinstance(row.get("prompt"), list):
        row["prompt_ids"] = row.pop("prompt")
    params: dict[str, Any] = {}
    for name, value in body.items():
        if (settings := _settings(name, value)) is None:
            mistakes.append(f"body.{name}: genctl cannot honour it")
        for knob, setting in (settings or {}).items():
            if params.setdefault(knob, setting) != setting:
                mistakes.append(f"body.{name}: it contradicts {knob} = {params[knob]}")
    sampling = {knob for knob in params if knob in knobs() and knobs()[knob].metadata["sampling"]}
    if params.get("temperature") == 0 and params["temperature"] is not False:
        params = {"do_sample": False, **{knob: params[knob] for knob in params.keys() - sampling}}
    elif sampling:  # OpenAI's interface samples, unless the temperature is 0: then no other setting has an effect
        params = {"do_sample": True, **params}
    return RequestRow({**row, "params": params} if params else row, model, mistakes)


def _settings(name: str, value: Any) -> dict[str, Any] | None:
    """The settings of a field of the body; None for a field that genctl cannot honour."""
    match name, value:
        case "response_format", {"type": "text"}:
            return {}
        case "response_format", {"type": "json_object"}:
            return {"json_schema": {"type": "object"}}
        case "response_format", {"type": "json_schema", "json_schema": {"schema": schema}} if schema is not None:
            return {"json_schema": schema}
        case "logit_bias", dict():
            return {name: {f"#{key}" if key.isdecimal() else key: bias for key, bias in value.items()}}
        case (("echo" | "logprobs" | "store" | "stream"), False):
            return {}
    knob = ALIASES.get(name, name)
    return {knob: value} if knob in known() else None
