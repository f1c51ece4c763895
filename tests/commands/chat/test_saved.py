"""A saved chat: it continues with the same answers, settings and checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from genctl.commands.chat.log import ChatLog
from tests.cli.tool import Done, genctl

DRAWN = ("-n", "10", "--do-sample", "--seed", "5", "--format", "jsonl")


def chat(*arguments: str, turns: tuple[str, ...]) -> Done:
    return genctl("chat", *arguments, stdin="".join(f"{turn}\n" for turn in turns))


def messages(path: Path) -> list[str]:
    return [message.content for message in ChatLog.look(path).here]


def change_header(path: Path, **fields: object) -> None:
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps({**json.loads(first), **fields}) + "\n" + "".join(rest))


def test_a_chat_goes_on_with_the_bytes_that_it_would_have_had(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    one = chat("--save", str(whole), *DRAWN, turns=("A fox", "A bear", "A hen"))
    assert one.status == 0, one.err
    first = chat("--save", str(parts), *DRAWN, turns=("A fox",))
    then = chat("--open", str(parts), "--format", "jsonl", turns=("A bear", "A hen"))
    assert then.status == 0, then.err
    texts = [record["text"] for record in (*first.records, *then.records)]
    assert texts == [record["text"] for record in one.records]
    assert parts.read_bytes() == whole.read_bytes()
    answers = [message for message in ChatLog.look(whole).here if message.role == "assistant"]
    assert [answer.seed for answer in answers] == [record["seed"] for record in one.records]
    assert {answer.finish_reason for answer in answers} == {record["finish_reason"] for record in one.records}


def test_one_read_of_the_conversation_and_then_new_turns_alone(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    chat("--save", str(path), "-n", "12", turns=("Once upon a time", "And then"))
    first, second = chat("--open", str(path), "-n", "12", "--format", "jsonl", turns=("More", "And more")).records
    assert first["usage"]["reused_tokens"] == 0
    known = first["usage"]["prompt_tokens"] + first["usage"]["new_tokens"]
    assert known - 2 <= second["usage"]["reused_tokens"] <= known


def test_a_chat_keeps_the_settings_that_it_began_with(tmp_path: Path) -> None:
    file = str(tmp_path / "chat.jsonl")
    chat("--save", file, "-n", "3", "--format", "jsonl", turns=("A fox",))
    assert chat("--open", file, "--format", "jsonl", turns=("More",)).records[0]["usage"]["new_tokens"] == 3
    assert chat("--open", file, "-n", "5", "--format", "jsonl", turns=("More",)).records[0]["usage"]["new_tokens"] == 5


def test_a_chat_saves_settings_of_generation_and_nothing_else(tmp_path: Path) -> None:
    """A schema is saved as its text, so the chat continues without the schema's file."""
    path, schema = tmp_path / "chat.jsonl", tmp_path / "schema.json"
    schema.write_text('{"const": "x"}')
    flags = ("--json-schema", str(schema), "--device", "cpu", "--dtype", "float32", "--threads", "1")
    assert chat("--save", str(path), "-n", "8", *flags, turns=("A fox",)).status == 0
    saved = json.loads(path.read_text().splitlines()[0])
    values = {key for layer in saved["settings"] for key in layer["values"]}
    assert values == {"max_new_tokens", "json_schema"}
    schema.unlink()
    again = chat("--open", str(path), turns=("More",))
    assert (again.status, again.out.strip(), again.err) == (0, '"x"', "")


def test_a_chat_of_another_state_of_a_checkpoint_continues_where_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    assert chat("--save", str(file), "-n", "3", turns=("A fox",)).status == 0
    change_header(file, checkpoint="sha256:0")
    refused = chat("--open", str(file), turns=("More",))
    assert refused.status == 2
    assert refused.err.startswith(
        f"error: -m builtin:stories continues {file} with this checkpoint: the chat was begun"
    )
    done = chat("--open", str(file), "-m", "builtin:stories", "-n", "2", turns=("More",))
    assert (done.status, len(done.out.splitlines())) == (0, 1), done.err
    assert "builtin:stories continues it, as -m says" in done.err


def test_files_that_are_not_this_chat_are_refused(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    file, other = tmp_path / "chat.jsonl", tmp_path / "other.jsonl"
    assert chat("--save", str(file), "-n", "2", turns=("A fox",)).status == 0
    assert file.stat().st_mode & 0o777 == 0o600
    template = chat("--open", str(file), "-m", checkpoints["chatml"], "-n", "2", turns=("Hi",))
    assert (template.status, f"{checkpoints['chatml']} continues it" in " ".join(template.err.split())) == (0, True)
    refused = chat("--save", str(file), turns=("Hi",))
    assert (refused.status, "exists already" in refused.err) == (2, True)
    other.write_text("no chat\n")
    assert chat("--open", str(other), turns=("Hi",)).status == 2


def test_half_a_line_is_dropped_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    assert chat("--save", str(file), "-n", "2", turns=("A fox",)).status == 0
    with file.open("a") as out:
        out.write('{"id": 2, "parent": 1, "role": "us')
    done = chat("--open", str(file), "-n", "2", turns=("More",))
    assert done.status == 0
    assert done.err == f"note: {file} ends in half a line, which is dropped: a write was cut off\n"
    assert messages(file)[0::2] == ["A fox", "More"]


def test_flags_of_trust_need_a_checkpoint_that_the_user_names(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    assert chat("--save", str(file), "-n", "2", turns=("A fox",)).status == 0
    done = chat("--open", str(file), "--trust-remote-code", turns=("More",))
    assert done.status == 2
    assert "--trust-remote-code would run code of 'builtin:stories', which only" in done.err
    assert chat("--open", str(file), "--trust-remote-code", "-m", "builtin:stories", turns=("More",)).status == 0
