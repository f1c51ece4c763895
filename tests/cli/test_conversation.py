"""Chats on a terminal: messages, never the template around them. Rows with tool calls."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import genctl as package
from genctl.api import load
from genctl.models import chat as templates
from tests.cli.tool import genctl
from tests.engines.server.stand_in import running
from tests.tiny import checkpoint

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(Path(package.__file__).parent / "models" / "builtin" / "stories", folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return str(folder)


def test_run_shows_the_answer_alone_and_with_echo_the_messages(chat: str) -> None:
    words = ("run", "-m", chat, "--chat", "Tell me a story", "-n", "3")
    record = genctl(*words, "--format", "jsonl").records[0]
    assert record["prompt"].startswith("<|im_start|>user\nTell me a story<|im_end|>")
    for more in ((), ("--stream",)):
        shown = genctl(*words, *more, terminal=True, color="never").out
        assert shown == f"{record['text']}\n"
        echoed = genctl(*words, *more, "--echo", terminal=True, color="never").out
        assert echoed == f"Tell me a story\n{record['text']}\n"


def test_beams_and_comparisons_show_the_messages(chat: str) -> None:
    words = ("-m", chat, "--system", "Be kind", "Hello", "-n", "3")
    for command in (("beam",), ("compare", "-p", "greedy", "-p", "beam5")):
        shown = genctl(*command, *words, terminal=True, color="never").out
        assert "im_start" not in shown, command
    shown = genctl("beam", *words, terminal=True, color="never").out.removeprefix("\x1b[?25l")
    assert shown.startswith("system: Be kind\nuser: Hello")


def test_a_page_shows_the_messages(chat: str, tmp_path: Path) -> None:
    page, recording = tmp_path / "page.html", tmp_path / "events.jsonl"
    words = ("-m", chat, "--chat", "Hello", "-n", "3", "--report", str(page), "--events", str(recording))
    assert genctl("beam", *words).status == 0
    assert "im_start" not in page.read_text()
    assert "im_start" in recording.read_text()


@pytest.mark.parametrize("command", ["run", "beam"])
def test_a_structure_begins_on_a_line_of_its_own(command: str) -> None:
    schema = '{"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"]}'
    words = (command, "The age", "--json-schema", schema, "-n", "20")
    lines = genctl(*words, terminal=True, color="never").out.splitlines()
    assert lines[0].removeprefix("\x1b[?25l").rstrip() == "The age"
    assert lines[1].removeprefix("\x1b[?25l").startswith("{")
    assert genctl("run", "The age", "--regex", "[0-9]", "-n", "4", terminal=True, color="never").out.startswith(
        "The age"
    )


def test_each_of_two_prompts_is_printed_once() -> None:
    shown = genctl("run", "Once upon a time", "One day", "-n", "3", terminal=True, color="never").out
    assert shown.count("Once upon a time") == shown.count("One day") == 1


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
    templates.close()


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
        ({"role": "user", "content": "x", "tool_calls": [{}]},
         "tool_calls: only the assistant calls tools, not 'user'"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "content: expected a string"),
        ({"role": "assistant", "content": 3, "tool_calls": [{"name": "x"}]}, "content: expected a string"),
        ({"role": "tool", "content": None, "tool_call_id": "c"}, "content: expected a string, got null"),
        ({"role": "tool", "content": "x", "tool_call_id": 3}, "tool_call_id: expected a string, got an integer"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "parts of type text, got 'image_url'"),
    ],
)  # fmt: skip
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
    templates.close()


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
