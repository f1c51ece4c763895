"""A row names no file: its `params` are values. What names a file is refused by name, with the flag that may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import genctl as package
from genctl.errors import GenctlError
from tests.cli.tool import Done, genctl
from tests.engines.server.stand_in import running

SECRET = "hunter2 is the word"


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "token.txt"
    path.write_text(f"{SECRET}\n")
    return path


def run(*rows: dict[str, Any], model: tuple[str, ...] = ("-m", "builtin:numbers"), flags: tuple[str, ...] = ()) -> Done:
    stdin = "".join(f"{json.dumps(row)}\n" for row in rows)
    return genctl("run", *model, "-n", "4", "--format", "jsonl", "--input-format", "jsonl", *flags, stdin=stdin)


def refused(row: dict[str, Any], knob: str, flag: str) -> None:
    done = run(row, {"prompt": "12"})
    failed, fine = done.records
    assert f"{knob}: a row cannot name a file; use --{flag} " in failed["error"]["message"]
    assert "error" not in fine
    assert "hunter2" not in done.out + done.err


@pytest.mark.parametrize("knob", ["grammar", "json_schema", "assistant_model", "amateur_model"])
@pytest.mark.parametrize("name", ["{}", "token.txt", "./token.txt", "~/token.txt", "file://{}", "@{}", "../{}", " {}"])
def test_a_setting_of_a_row_that_names_a_file_is_refused(secret: Path, knob: str, name: str) -> None:
    flag = knob.replace("_", "-")
    refused({"prompt": "12", "params": {knob: name.format(secret)}}, knob, flag)


@pytest.mark.parametrize("knob", ["draft_corpus", "prompt_cache", "adapter", "tokenizer", "model", "offload_folder"])
def test_what_belongs_to_the_run_is_refused_with_its_flag(secret: Path, knob: str) -> None:
    done = run({"prompt": "12", "params": {knob: str(secret)}})
    assert f"; use --{knob.replace('_', '-')}" in done.records[0]["error"]["message"]
    assert "hunter2" not in done.out + done.err


def test_lists_requests_cells_and_messages_are_no_way_around(secret: Path) -> None:
    name = str(secret)
    refused({"prompt": "12", "params": {"processors": [{"use": "grammar", "grammar": name}]}}, "grammar", "grammar")
    refused({"custom_id": "a", "body": {"prompt": "12", "json_schema": name}}, "json_schema", "json-schema")
    refused({"body": {"prompt": "12", "grammar": name}}, "grammar", "grammar")
    table = f'prompt,params\n12,"{{""grammar"": ""{name}""}}"\n'
    done = genctl("run", "-m", "builtin:numbers", "--input-format", "csv", "--format", "jsonl", stdin=table)
    assert "grammar: a row cannot name a file" in done.records[0]["error"]["message"]
    for nested in ({"set": f"grammar={name}"}, {"preset": name}, {"params": {"grammar": name}}, {"grammar": [name]}):
        done = run({"prompt": "12", "params": nested})
        assert "error" in done.records[0]
        assert "hunter2" not in done.out + done.err


def test_the_text_of_a_grammar_is_never_taken_for_a_name(secret: Path) -> None:
    """Files that are called like a grammar or a schema are not opened, here or for a server."""
    texts = {"grammar": 'start: "12"', "json_schema": '{"type": "integer"}'}
    for text in texts.values():
        Path(text).write_text(SECRET)
    rows = [{"prompt": "12", "params": {knob: text}} for knob, text in texts.items()]
    done = run(*rows)
    assert [record["text"].isdigit() for record in done.records] == [True, True], done.err
    with running() as server:
        run(*rows, model=("--backend", server.url))
        assert server.rows
        assert "hunter2" not in json.dumps(server.rows)


def test_a_row_may_have_values_and_the_setting_of_its_run(secret: Path) -> None:
    grammar = secret.with_name("digits.lark")
    grammar.write_text('start: "34"')
    done = run({"prompt": "12", "params": {"grammar": str(grammar)}}, flags=("--grammar", str(grammar)))
    assert (done.status, done.records[0]["text"].strip()) == (0, "34")
    done = run({"prompt": "12", "params": {"grammar": str(secret)}}, flags=("--grammar", str(grammar)))
    assert "grammar: a row cannot name a file" in done.records[0]["error"]["message"], (
        "another file than that of the run"
    )
    rows = [
        {"prompt": "12", "params": {"grammar": 'root ::= "5" "6"'}},
        {"prompt": "12", "params": {"json_schema": {"type": "integer"}}},
        {"prompt": "12", "params": {"json_schema": "true"}},
        {"prompt": "12", "params": {"assistant_model": "builtin:numbers"}},
    ]
    done = run(*rows)
    assert (done.status, done.records[0]["text"].strip()) == (0, "56")


def test_rows_from_python_name_no_file_either(secret: Path) -> None:
    model = package.load("builtin:numbers")
    with pytest.raises(GenctlError, match="params of prompt 1: grammar: a row cannot name a file; use --grammar FILE"):
        model.generate({"prompt": "12", "params": {"grammar": str(secret)}})
