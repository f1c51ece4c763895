"""`--template` makes prompts; remarks on an input that is empty or looks like JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genctl.errors import UsageError
from genctl.io import template
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


def test_resume_notices_another_template() -> None:
    Path("in.txt").write_text("2\n3\n")
    Path("t.txt").write_text("1{prompt}")
    command = ("run", "-m", "builtin:numbers", "-i", "in.txt", "-o", "out.txt", "--seed", "1", "--resume")
    assert genctl(*command, "--template", "@t.txt").status == 0
    assert Path("out.txt").read_text() == "twelve\nthirteen\n"
    assert "nothing to do" in genctl(*command, "--template", "1{prompt}").err
    Path("t.txt").write_text("2{prompt}")
    done = genctl(*command, "--template", "@t.txt")
    assert done.status == 2
    assert "--template 1{prompt} → 2{prompt}" in done.err
    assert "--template 1{prompt} → unset" in genctl(*command).err
    assert Path("out.txt").read_text() == "twelve\nthirteen\n"


def test_a_template_file_that_cannot_be_read() -> None:
    done = genctl("run", "--template", "@none.txt", "x")
    assert (done.status, "cannot read none.txt" in done.err) == (2, True)
    Path("latin.txt").write_bytes(b"\xe4{prompt}")
    assert "cannot read latin.txt: not UTF-8 text (byte 1)" in genctl("run", "--template", "@latin.txt", "x").err


# -- remarks on the input ----------------------------------------------------------------------------------------------


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
    for format in ("lines", "jsonl"):  # somebody has said what it is
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
