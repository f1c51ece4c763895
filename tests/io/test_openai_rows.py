"""Requests of OpenAI's batch files are rows: their prompts, their settings, and what genctl cannot honour."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from genctl.io.readers import read
from genctl.io.rows import BadRow, InputRow
from tests.cli.tool import genctl

HI = [{"role": "user", "content": "Hi"}]


def rows(*requests: Any, said: list[str] | None = None) -> list[InputRow | BadRow]:
    data = "".join(f"{json.dumps(request)}\n" for request in requests).encode()
    say = (said if said is not None else []).append
    return list(read(io.BytesIO(data), format="jsonl", name="in", report=say))


def row(body: dict[str, Any], url: str | None = None, **keys: Any) -> InputRow:
    (found,) = rows({"custom_id": "a", "method": "POST", **({"url": url} if url else {}), "body": body, **keys})
    assert isinstance(found, InputRow), found
    return found


def mistake(request: dict[str, Any]) -> str:
    (found,) = rows(request)
    assert isinstance(found, BadRow), found
    return found.message.removeprefix("line 1: ")


def test_a_request_is_a_row_with_its_prompt() -> None:
    chat = row({"model": "gpt", "messages": HI}, "/v1/chat/completions")
    assert (chat.id, chat.own_id, chat.messages, chat.params, chat.columns) == ("a", True, tuple(HI), {}, {})
    assert row({"prompt": "Once"}, "/v1/completions").prompt == "Once"
    assert row({"prompt": [5, 6]}).prompt_ids == (5, 6), "the URL may be absent"
    labelled = row({"prompt": "Once", "user": "me", "metadata": {"run": "1"}}, label="x")
    assert labelled.columns == {"label": "x", "user": "me", "metadata": {"run": "1"}}

    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    assert row({"messages": HI, "tools": [tool]}).extra["tools"] == [tool]


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"max_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_completion_tokens": 5, "stop": ["a", "b"]}, {"max_new_tokens": 5, "stop_strings": ["a", "b"]}),
        ({"temperature": 0.7, "seed": 3}, {"do_sample": True, "temperature": 0.7, "seed": 3}),
        ({"top_p": 0.9}, {"do_sample": True, "top_p": 0.9}),
        ({"top_k": 9, "do_sample": False}, {"do_sample": False, "top_k": 9}),
        ({"temperature": 0, "top_p": 0.9, "min_p": 0.1}, {"do_sample": False}),
        ({"n": 2, "presence_penalty": 1, "frequency_penalty": -1}, {
            "num_return_sequences": 2, "presence_penalty": 1, "frequency_penalty": -1,
        }),
        ({"logit_bias": {"14": -100}}, {"logit_bias": {"#14": -100}}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            {"json_schema": {"type": "null"}},
        ),
        ({"stream": False, "store": False, "logprobs": False, "user": None, "stop": None}, {}),
    ],
)  # fmt: skip
def test_fields_of_the_body_are_settings(fields: dict[str, Any], params: dict[str, Any]) -> None:
    assert row({"messages": HI, **fields}).params == params


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", True), ("logprobs", 0), ("top_logprobs", 2), ("stream", True), ("store", True), ("echo", True),
        ("tool_choice", "required"), ("functions", []), ("suffix", "x"), ("no_such_field", 1),
        ("reasoning_effort", "low"), ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", {"type": "grammar"}), ("response_format", "json"), ("response_format", {}), ("input", "Hi"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_honoured_is_an_error_that_names_it(field: str, value: Any) -> None:
    found = mistake({"custom_id": "a", "body": {"messages": HI, field: value}})
    assert found.startswith(f"body.{field}: "), found


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (
            {"body": {"prompt": "x", "max_tokens": 3, "max_completion_tokens": 4}},
            "body.max_completion_tokens: it contradicts max_new_tokens = 3",
        ),
        ({"custom_id": "a", "body": {}}, "no prompt: expected one of prompt, prompt_ids, messages"),
        ({"custom_id": 1.5, "body": {"prompt": "x"}}, "id: expected a string or an integer, got a number"),
        ({"id": "b", "body": {"prompt": "x"}}, "a request has its id in custom_id and its settings in its body"),
        ({"body": {"prompt": "x"}, "params": {}}, "a request has its id in custom_id and its settings in its body"),
    ],
)
def test_a_request_that_is_none_is_an_error_of_its_row(request_: dict[str, Any], sentence: str) -> None:
    assert mistake(request_) == sentence


def test_a_bad_request_keeps_its_id_and_costs_no_other() -> None:
    found = rows(
        {"custom_id": 7, "body": {"prompt": "a"}},
        {"custom_id": "b", "body": {"prompt": 1}},
        {"body": {"prompt": "c"}},
        {"custom_id": None, "body": {"prompt": "d"}},
        {"custom_id": "7", "body": {"prompt": "e"}},
    )
    assert [(type(one), one.id) for one in found] == [
        (InputRow, "7"), (BadRow, "b"), (InputRow, "2"), (InputRow, "3"), (BadRow, "7"),
    ]  # fmt: skip


def test_a_row_with_a_prompt_of_its_own_is_no_request() -> None:
    (found,) = rows({"prompt": "Hi", "body": {"prompt": "x"}, "custom_id": "a"})
    assert isinstance(found, InputRow)
    assert (found.prompt, found.id) == ("Hi", "0")
    assert found.columns == {"body": {"prompt": "x"}, "custom_id": "a"}


def test_the_model_that_requests_name_is_said_once() -> None:
    said: list[str] = []
    rows(*[{"body": {"prompt": "x", "model": "gpt"}}] * 3, said=said)
    assert said == ["note: in, line 1: the model 'gpt' is not used: --model names that of all rows"]


def test_run_reads_the_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    requests = [
        {"custom_id": 1, "url": "/v1/completions", "body": {"prompt": "12", "max_tokens": 2, "temperature": 0.5}},
        {"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "12", "max_tokens": -2}},
        {"url": "/v1/completions", "body": {"prompt": "12", "max_tokens": 1, "temperature": 0, "top_p": 0.5}},
        {"custom_id": "y", "body": {"prompt": "12", "echo": True}},
    ]
    path.write_text("".join(f"{json.dumps(one)}\r\n" for one in requests), encoding="utf-8-sig")
    done = genctl("run", "-m", "builtin:numbers", "-i", str(path), "--format", "jsonl", "--do-sample", "--top-k", "9")
    first, failed, last, unknown = done.records
    assert done.status == 1
    assert (first["id"], first["strategy"], first["usage"]["new_tokens"]) == ("1", "sample", 2)
    assert failed["id"] == "x"
    assert "max_new_tokens = -2" in failed["error"]["message"]
    assert "body.echo: genctl cannot honour it" in unknown["error"]["message"]
    assert (last["id"], last["strategy"], last["usage"]["new_tokens"]) == ("2", "greedy", 1)
