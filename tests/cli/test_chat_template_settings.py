"""Settings of the chat template: its variables, its tools, the choice among several; compared with transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from genctl.models import chat
from tests.cli.tool import Done, genctl, ok
from tests.engines.server.stand_in import running
from tests.tiny import checkpoint

PLAIN = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ effort }}[assistant]"
)
TEMPLATES = {"default": PLAIN, "tool_use": "with tools:" + PLAIN, "rag": "by documents:" + PLAIN}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = checkpoint("llama", tmp_path_factory.mktemp("chat") / "model")
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.chat_template = TEMPLATES
    tokenizer.save_pretrained(made)
    yield made
    chat.close()


def run(folder: Path, *settings: str, chat: bool = True) -> Done:
    flags = [part for setting in settings for part in ("--set", setting)]
    return genctl("run", "-m", str(folder), *(["--chat"] if chat else []), "hi", "-n", "1", "--format", "jsonl", *flags)


@pytest.mark.parametrize(
    ("settings", "keywords"),
    [
        ((), {}),
        (("enable_thinking=false",), {"enable_thinking": False}),
        (("enable_thinking=true",), {"enable_thinking": True}),
        (('chat_template_kwargs={effort="low"}',), {"effort": "low"}),
        (('chat_template="rag"', "enable_thinking=false"), {"chat_template": "rag", "enable_thinking": False}),
        (('tools=[{type="function"}]',), {"tools": [{"type": "function"}]}),
        (('tools=[{type="function"}]', 'chat_template="default"'),
         {"tools": [{"type": "function"}], "chat_template": "default"}),
    ],
)  # fmt: skip
def test_the_prompt_is_that_of_apply_chat_template(
    folder: Path, settings: tuple[str, ...], keywords: dict[str, Any]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (record,) = run(folder, *settings).records
    assert record["prompt"] == tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True, **keywords
    )


def test_rows_have_settings_and_tools_of_their_own(folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rows: list[dict[str, Any]] = [
        {"messages": messages, "tools": TOOLS},
        {"messages": messages, "params": {"tools": TOOLS, "enable_thinking": False, "chat_template": "rag"}},
        {"messages": messages, "tools": "weather"},
        {"prompt": "hi", "params": {"enable_thinking": False}},
        {"messages": messages, "params": {"chat_template_kwargs": {"messages": []}}},
    ]
    done = genctl(
        "run", "-m", str(folder), "-n", "1", "--format", "jsonl", "--input", "-", "--input-format", "jsonl",
        stdin="\n".join(map(json.dumps, rows)),
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = [
        tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False),
        tokenizer.apply_chat_template(
            messages, tools=TOOLS, chat_template="rag", enable_thinking=False, tokenize=False
        ),
    ]
    assert [record["prompt"] for record in done.records[:2]] == expected
    errors = [record["error"]["message"] for record in done.records[2:]]
    assert "tools: expected a list of objects" in errors[0]
    assert "enable_thinking would change nothing: the prompt is not a chat" in errors[1]
    assert "chat_template_kwargs cannot set messages: they are the prompt" in errors[2]
    assert done.status == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (('chat_template="nope"',), "has no chat template named 'nope'\nhint: chat_template can be default, "),
        (("chat_template_kwargs={tools=[]}",), "chat_template_kwargs cannot set tools: they are the setting tools"),
        (("chat_template_kwargs={enable_thinking=true}", "enable_thinking=true"),
         "enable_thinking is set alone and in chat_template_kwargs; leave out one of them"),
        (("enable_thinking=1",), "enable_thinking = 1"),
        (("tools=3",), "tools = 3"),
    ],
)  # fmt: skip
def test_mistakes_are_said(folder: Path, settings: tuple[str, ...], message: str) -> None:
    done = run(folder, *settings)
    assert done.status in (2, 3)
    assert message in done.err


def test_a_setting_that_changes_nothing_is_said(folder: Path) -> None:
    assert "note: the chat template of" in run(folder, "chat_template_kwargs={depth=3}").err
    assert "does not use" not in run(folder, 'chat_template_kwargs={effort="low"}').err
    done = run(folder, "enable_thinking=false", chat=False)
    assert (done.status, done.out) == (2, "")
    assert "enable_thinking would change nothing: the prompt is not a chat" in done.err


def test_a_checkpoint_without_names_says_so() -> None:
    done = run(Path("builtin:stories"), 'chat_template="rag"')
    assert done.status == 3
    assert "has no chat template named 'rag'" in done.err


def test_servers_get_the_variables_and_nothing_that_they_do_not_know() -> None:
    with running() as server:
        flags = ["--backend", server.url, "--chat", "hi", "-n", "2"]
        ok("run", *flags, "--set", "enable_thinking=false")
        assert server.rows[-1]["chat_template_kwargs"] == {"enable_thinking": False}
        for setting in ('tools=[{type="function"}]', 'chat_template="rag"', "processed_logprobs=true"):
            refused = genctl("run", *flags, "--set", setting)
            assert refused.status != 0
            assert "the server has no field for it" in refused.err
    with running(owner="openai") as server:
        refused = genctl("run", "--backend", server.url, "--chat", "hi", "--set", "enable_thinking=false")
        assert refused.status != 0
        assert "chat_template_kwargs" in refused.err
