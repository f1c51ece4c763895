"""Rows with calls of tools: templates read arguments as objects, servers as JSON texts."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from genctl.api import load
from genctl.models import chat
from tests.cli.tool import genctl
from tests.engines.server.stand_in import running
from tests.tiny import checkpoint

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}[{{ message.role }}"
    "{% if message.name %} {{ message.name }}{% endif %}{% if message.tool_call_id %} {{ message.tool_call_id }}"
    "{% endif %}]{% if message.content is string %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls %}{% set f = call.function if call.function else call %}"
    "<{{ f.name }}{% for key, value in f.arguments.items() %} {{ key }}={{ value | tojson }}{% endfor %}>"
    "{% endfor %}{% endfor %}[assistant]"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ARGUMENTS = {"city": "Rome", "days": [1, 2], "exact": True}


def talk(arguments: Any, content: Any = None, **more: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": content, "tool_calls": [call], **more},
        {"role": "tool", "content": "none", "tool_call_id": "c1", "name": "weather"},
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = checkpoint("llama", tmp_path_factory.mktemp("tools") / "model")
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made)
    yield made
    chat.close()


def run(folder: Path | str, *rows: Any, flag: str = "-m") -> Any:
    stdin = "\n".join(map(json.dumps, rows))
    words = ("run", flag, str(folder), "-n", "1", "--format", "jsonl", "--input", "-", "--input-format", "jsonl")
    return genctl(*words, stdin=stdin)


def test_the_prompt_is_that_of_apply_chat_template_with_objects(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = tokenizer.apply_chat_template(talk(ARGUMENTS), tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert '<weather city="Rome" days=[1, 2] exact=true>' in expected
    without_content = talk(ARGUMENTS)
    del without_content[1]["content"]
    flat = talk(ARGUMENTS)
    flat[1]["tool_calls"] = [{"name": "weather", "arguments": json.dumps(ARGUMENTS)}]
    conversations = [
        talk(ARGUMENTS), talk(json.dumps(ARGUMENTS)), without_content, flat,
        talk(ARGUMENTS, refusal=None, function_call=None),
    ]  # fmt: skip
    done = run(folder, *({"messages": messages, "tools": TOOLS} for messages in conversations))
    assert done.status == 0, done.err
    assert [record["prompt"] for record in done.records] == [expected] * 5
    results = load(str(folder)).generate([talk(json.dumps(ARGUMENTS))], tools=TOOLS, max_new_tokens=1)
    assert results[0].prompt == expected


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"arguments": "{city"}, "item 2: tool_calls: item 1: arguments: not JSON"),
        ({"arguments": "[1]"}, "item 2: tool_calls: item 1: arguments: expected an object, got a list"),
        ({"arguments": '{"a": 1, "a": 2}'}, "item 2: tool_calls: item 1: arguments: the key 'a' occurs twice"),
        ({"arguments": 0}, "item 2: tool_calls: item 1: arguments: expected an object, got an integer"),
        ({"name": None}, 'item 2: tool_calls: item 1: expected {"function": {"name": "…", "arguments": {…}}}'),
        ("weather", "item 2: tool_calls: item 1: expected"),
    ],
)
def test_a_call_that_is_none_is_the_error_of_its_row(folder: Path, change: Any, sentence: str) -> None:
    messages = talk(ARGUMENTS)
    calls = messages[1]["tool_calls"]
    if isinstance(change, dict):
        calls[0]["function"] |= change
    else:
        calls[0] = change
    failed, fine = run(folder, {"messages": messages}, {"messages": talk("")}).records
    assert sentence in failed["error"]["message"]
    assert "<weather>" in fine["prompt"], "no arguments"


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            {"role": "user", "content": "x", "tool_calls": [{}]},
            "tool_calls: only the assistant calls tools, not 'user'",
        ),
        ({"role": "assistant", "content": None, "tool_calls": []}, "content: expected a string"),
        ({"role": "assistant", "content": 3, "tool_calls": [{"name": "x"}]}, "content: expected a string"),
        ({"role": "tool", "content": None, "tool_call_id": "c"}, "content: expected a string, got null"),
        ({"role": "tool", "content": "x", "tool_call_id": 3}, "tool_call_id: expected a string, got an integer"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "parts of type text, got 'image_url'"),
    ],
)
def test_what_a_message_cannot_have(folder: Path, message: dict[str, Any], sentence: str) -> None:
    (record,) = run(folder, {"messages": [message]}).records
    assert sentence in record["error"]["message"]


def test_parts_of_text_are_lines(folder: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (record,) = run(folder, {"messages": [{"role": "user", "content": parts}]}).records
    assert record["prompt"] == "[user]a\nb[assistant]"


def test_a_template_without_tools_says_so(tmp_path: Path) -> None:
    made = checkpoint("llama", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(made)
    row = {"messages": [{"role": "user", "content": "Rain?"}], "tools": TOOLS}
    assert "the chat template does not use tools" in run(made, row).err
    chat.close()


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS), "", None])
def test_servers_get_arguments_as_texts(arguments: Any) -> None:
    messages = talk(arguments)
    with running() as server:
        done = run(server.url, {"messages": messages}, flag="--backend")
        assert done.status == 0, done.err
        (sent,) = [body["messages"] for body in server.rows]
    expected = copy.deepcopy(messages)
    text = json.dumps(arguments) if isinstance(arguments, dict) else arguments or "{}"
    expected[1]["tool_calls"][0]["function"]["arguments"] = text
    assert sent == expected
