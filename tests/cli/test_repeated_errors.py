"""Many rows that fail alike are one line and a number."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.tool import genctl

BAD = json.dumps({"prompt": 7})


@pytest.mark.parametrize(
    "command", [("run",), ("compare", "-p", "greedy", "-p", "beam5"), ("score",)], ids=lambda it: it[0]
)
def test_equal_errors_are_one_line_and_a_number(command: tuple[str, ...]) -> None:
    done = genctl(*command, "--input-format", "jsonl", stdin=f"{BAD}\n" * 200)
    first, more, *rest = done.err.splitlines()
    assert first.startswith("error: ")
    assert "line 1: prompt: expected a string" in first
    assert more == "error: 199 more like it"
    assert not [line for line in rest if line.startswith("error:")]
    assert done.status == 1


def test_different_errors_are_counted_apart() -> None:
    empty = json.dumps({"prompt": ""})
    done = genctl("run", "--input-format", "jsonl", stdin="\n".join([BAD, empty, BAD, empty, BAD, "{}"]))
    lines = done.err.splitlines()
    assert [line.split(":")[1] for line in lines[:3]] == [" prompt 1", " prompt 2", " prompt 6"]
    assert lines[3].startswith("error: 2 more like it: prompt: expected a string")
    assert lines[4] == "error: 1 more like it: prompt: empty prompt"
    assert len(lines) == 5


def test_on_a_terminal_too(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi", "params": {"num_beams": 0}}\n' * 5)
    done = genctl("run", "-i", str(tmp_path / "rows.jsonl"), terminal=True)
    assert done.err.count("num_beams") == 1
    assert "error: 4 more like it" in done.err


def test_records_keep_every_error() -> None:
    done = genctl("run", "--input-format", "jsonl", "--format", "jsonl", stdin=f"{BAD}\n" * 3)
    assert [record["error"]["code"] for record in done.records] == ["input"] * 3


def test_a_prompt_beyond_the_context_gets_its_hint_wherever_it_is_said() -> None:
    words, hint = ("a " * 600,), "hint: --truncate left keeps its end (right its beginning, middle both)\n"
    compare = ("compare", "-p", "greedy", "-p", "beam5")
    for command in (("run",), ("beam",), compare, ("inspect-cache",)):
        for terminal in (False, True):
            done = genctl(*command, *words, terminal=terminal, color="never")
            assert done.status == 1, (command, done.err)
            assert re.search(r"the prompt has \d+ tokens, but the model's\s+context is 512", done.err), (
                command,
                done.err,
            )
            assert done.err.count("hint: --truncate left") == 1, (command, terminal, done.err)
    [record] = genctl("run", *words, "--format", "jsonl").records
    assert list(record["error"]) == ["code", "message"]
    assert record["error"]["message"].endswith("but the model's context is 512")
    assert hint in genctl("run", *words).err
