"""`--template` makes prompts; standard input inside a prompt (`{stdin}`) and as the prompts (`-`); notes on inputs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from genctl.errors import UsageError
from genctl.io import template
from genctl.io.readers import open_prompts
from genctl.io.rows import RefusedRow
from tests.cli.tool import genctl

JSON_NOTE = "note: standard input is read as JSON lines; --input-format lines makes each line a prompt\n"
JSON_HINT = "hint: the first line looks like a JSON row but is read as a prompt; --input-format jsonl reads rows\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{prompt}", "a {b}"),
        ("Say: {prompt}!", "Say: a {b}!"),
        ("{{{prompt}}}", "{a {b}}"),
        ('{{"x": {n}}} {n}', '{"x": 3} 3'),
        ("{two words}: {list}", 'yes: ["é"]'),
        ("}}{{{prompt}", "}{a {b}"),
        ("{prompt!r}", None),
    ],
)
def test_fields_are_filled_and_double_braces_are_single(text: str, expected: str | None) -> None:
    values = {"prompt": "a {b}", "n": 3, "two words": "yes", "list": ["é"]}
    made = template.parse(text)
    if expected is None:
        with pytest.raises(RefusedRow, match=r"no field 'prompt!r' \(did you mean prompt\?\)"):
            made.fill(values)
    else:
        assert made.fill(values) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "{ at character 1"),
        ("a {prompt", "{ at character 3"),
        ("prompt}", "} at character 7"),
        ("{}", "{ at character 1"),
        ('{"a": {prompt}}', "{ at character 1"),
        ("{a\nb}", "{ at character 1"),
        ("no field {{prompt}}", "there is no field"),
        ("", "there is no field"),
    ],
)
def test_a_brace_out_of_place_ends_the_run_at_once(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        template.parse(text)
    assert sentence in caught.value.message
    for more in (("x",), ("--dry",)):
        done = genctl("run", "-m", "./no/such/folder", "--template", text, *more)
        assert done.status == 2
        assert sentence in done.err


def prompts(*arguments: str, stdin: str | None = None, status: int = 0) -> list[str]:
    done = genctl("run", "-m", "builtin:numbers", "-n", "2", "--format", "jsonl", *arguments, stdin=stdin)
    assert done.status == status, done.err
    return [record.get("prompt") or record["error"]["message"] for record in done.records]


def test_each_way_of_giving_prompts() -> None:
    assert prompts("--template", "1{prompt}", "2", "3") == ["12", "13"]
    assert prompts("--template", "1{prompt}", stdin="2\n3\n") == ["12", "13"]
    assert prompts("--template", "1{prompt}4", "--input-format", "text", stdin="2\n3\n") == ["12\n3\n4"]
    Path("rows.jsonl").write_text('{"a": "1", "b": 2, "unused": null}\n{"id": "x", "b": "3", "a": "4"}\n')
    assert prompts("--template", "{a}{b}", "-i", "rows.jsonl") == ["12", "43"]
    Path("t.txt").write_text("1{prompt}\n")
    assert prompts("--template", "@t.txt", "2") == ["12"]


def test_the_text_is_that_of_the_prompt_in_full() -> None:
    made = genctl("run", "-m", "builtin:numbers", "--template", "1{prompt}", "2").out
    assert made == genctl("run", "-m", "builtin:numbers", "12").out == "twelve\n"


def test_an_unknown_field_is_an_error_row() -> None:
    rows = [{"id": "a", "title": "1", "body": "2"}, {"id": "b", "titel": "1"}, {"messages": [], "title": "1"}]
    stdin = "".join(
        json.dumps(row) + "\n" for row in [*rows, {"title": None}, {"title": ""}, {"params": 3, "title": "7"}]
    )
    assert prompts("--template", "{title}", "--input-format", "jsonl", stdin=stdin, status=1) == [
        "1",
        "line 2: template: no field 'title' (did you mean titel?)",
        "line 3: template: it makes a prompt, but the row has messages",
        "line 4: template: the field 'title' is null",
        "line 5: prompt: empty prompt",
        "line 6: params: expected an object, got an integer",
    ]
    assert prompts("--template", "{body}", "x", status=1) == ["argument 1: template: no field 'body'"]


def test_other_commands_have_it_too() -> None:
    score = genctl("score", "--template", "1{prompt}", "--format", "jsonl", "2")
    assert score.records[0]["text"] == "12"
    assert genctl("score", "--template", "{a}{b}", "--format", "jsonl", "--input-format", "jsonl",
                  stdin='{"a": "1", "b": "2"}\n').records[0]["text"] == "12"  # fmt: skip
    runs = ("--strategy", "a:", "--strategy", "b:num_beams=2")
    compare = genctl("compare", *runs, "-n", "2", "--template", "1{prompt}", "--format", "jsonl", "2")
    assert compare.records[0]["prompt"] == "12"
    inspected = genctl("inspect-cache", "-m", "builtin:numbers", "--template", "1{prompt}", "--format", "json", "2")
    assert (inspected.status, json.loads(inspected.out)["prompt"]) == (0, "12")
    assert "--plan decodes nothing" in genctl("inspect-cache", "--plan", "--template", "{prompt}").err


def test_a_template_file_that_cannot_be_read() -> None:
    done = genctl("run", "--template", "@none.txt", "x")
    assert (done.status, "cannot read none.txt" in done.err) == (2, True)
    Path("latin.txt").write_bytes(b"\xe4{prompt}")
    assert "cannot read latin.txt: not UTF-8 text (byte 1)" in genctl("run", "--template", "@latin.txt", "x").err


def err_of(stdin: str, *more: str, command: tuple[str, ...] = ("run", "-m", "builtin:numbers", "-n", "1")) -> str:
    return genctl(*command, *more, stdin=stdin).err


def test_json_lines_on_standard_input_are_rows() -> None:
    row = '{"prompt": "1"}\n'
    assert err_of(row) == JSON_NOTE
    assert err_of("\ufeff" + row * 9) == JSON_NOTE  # once
    assert err_of(row, command=("score",)) == JSON_NOTE
    assert err_of(row, "--quiet") == ""
    assert err_of('{"n": "1"}\n', "--template", "{n}") == JSON_NOTE
    for usual in ('{"name": "1"}\n', "{prompt}\n", "3\n" + row, '["prompt"]\n'):
        assert err_of(usual) == "", usual
    for format in ("lines", "jsonl"):  # the format was given
        assert err_of(row, "--input-format", format) == ""
    done = genctl("run", "-m", "builtin:numbers", "--format", "jsonl", stdin='{"id": "a", "prompt_ids": [5]}\n3\n')
    assert [record["id"] for record in done.records] == ["a", "1"]
    assert "line 2: " in done.records[1]["error"]["message"]


def test_rows_of_json_in_a_file_that_are_read_as_lines_are_noticed() -> None:
    Path("rows.txt").write_text('{"prompt": "1"}\n' * 9)
    assert genctl("run", "-m", "builtin:numbers", "-n", "1", "-i", "rows.txt").err == JSON_HINT


def test_an_empty_input_says_so() -> None:
    done = genctl("run", "-m", "builtin:numbers", stdin="")
    assert (done.status, done.out, done.err) == (0, "", "note: no prompts: stdin is empty\n")
    assert err_of("\n\n") == "note: no prompts: stdin is empty\n"
    assert err_of("", "--quiet") == ""
    Path("none.jsonl").write_text("")
    assert genctl("run", "-m", "builtin:numbers", "-i", "none.jsonl").err == "note: no prompts: none.jsonl is empty\n"


NUMBERS = ("-m", "builtin:numbers")


def test_stdin_is_read_into_prompts_into_templates_and_as_the_prompts(tmp_path: Path) -> None:
    assert prompts("1{stdin}", "2{stdin}3", stdin="12\n") == ["112\n", "212\n3"]
    assert prompts("1{stdin}", stdin="\ufeff5") == ["15"]
    assert prompts("--template", "{prompt}:{stdin}", "7", "8", stdin="5") == ["7:5", "8:5"]
    (tmp_path / "rows.txt").write_text("1\n2\n")
    assert prompts("--template", "{prompt}{stdin}", "-i", str(tmp_path / "rows.txt"), stdin="5") == ["15", "25"]
    assert prompts("-", stdin="1\n2\n") == ["1", "2"]
    assert prompts("-", "--input-format", "text", stdin="1\n2") == ["1\n2"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-", "5"], "- as a prompt reads prompts from standard input, but another prompt is given"),
        (["-", "-i", "rows"],
         "- as a prompt reads prompts from standard input, but prompts are also given with --input"),
        (["--template", "{stdin} {prompt}"], "but the prompts are read from there, too"),
        (["--template", "{stdin}", "5"], "{stdin} is its only field, so all prompts would be equal"),
    ],
)  # fmt: skip
def test_two_uses_of_standard_input_are_refused(arguments: list[str], sentence: str) -> None:
    done = genctl("run", *NUMBERS, *arguments, stdin="1\n")
    assert (done.status, done.out) == (2, "")
    assert sentence in done.err


def test_stdin_in_a_prompt_needs_a_pipe() -> None:
    done = genctl("run", *NUMBERS, "{stdin}")
    assert done.status == 2
    assert done.err.startswith("error: {stdin} stands for standard input, which is a terminal")


@pytest.mark.parametrize("content", [b"1\xff", b"1" * (16 * 2**20 + 1)])
def test_what_cannot_be_a_text_is_refused(content: bytes) -> None:
    done = genctl("run", *NUMBERS, "{stdin}", stdin=content)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: {stdin}: standard input is ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(("early", "late", "count"), [(b"text\n", b"", 1), (b"", b"text\n", 1), (b"", b"", 0)])
def test_a_pipe_that_nobody_reads_is_noted_once_and_left_as_it_is(early: bytes, late: bytes, count: int) -> None:
    notes: list[str] = []
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "wb", buffering=0) as writer:
        writer.write(early)
        found = open_prompts(["5"], None, reader, stdin_is_terminal=False, report=notes.append)
        assert found is not None
        assert not late or notes == []
        writer.write(late)
        found.close()
        found.close()
        assert len(notes) == count
        for note in notes:
            assert note.startswith("note: standard input is not read")
            assert "{stdin}" in note
            assert "- as the prompt" in note
        assert not count or reader.read1(9) == b"text\n"


def test_the_rest_of_a_loops_file_is_no_reason_for_a_note(tmp_path: Path) -> None:
    notes: list[str] = []
    (tmp_path / "lines").write_text("a\nb\n")
    with (tmp_path / "lines").open("rb") as file:
        found = open_prompts(["5"], None, file, stdin_is_terminal=False, report=notes.append)
        assert found is not None
        found.close()
    assert notes == []
