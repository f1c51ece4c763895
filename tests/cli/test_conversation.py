"""What a terminal shows before an answer: messages, never the template around them; a structure on its own line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import genctl as package
from genctl.events import conversation
from tests.cli.tool import genctl

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(Path(package.__file__).parent / "models" / "builtin" / "stories", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def test_a_conversation_names_roles_where_a_user_is_not_alone() -> None:
    hello = {"role": "user", "content": "Hello"}
    assert conversation([hello]) == "Hello"
    assert conversation([hello], "Be kind") == "system: Be kind\nuser: Hello"
    assert conversation([{"role": "user", "content": [{"type": "text", "text": "one"}, {"text": "two"}]}]) == "one two"
    assert conversation([]) == ""


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
