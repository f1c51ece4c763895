"""Batches: rows that fail, where to stop, prompts that are too long, time limits, texts on a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tool import Done, genctl, ok
from tests.engines.server.stand_in import running
from tests.pages.pages import Parts
from tests.tiny import checkpoint

NUMBERS = ("-m", "builtin:numbers")


def lines(*given: Any) -> str:
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in given)


def batch(*arguments: str, stdin: str) -> Done:
    return genctl("run", *arguments, "--input-format", "jsonl", stdin=stdin)


BROKEN = lines(
    {"id": "a", "prompt": "5"}, {"id": "b", "prompt": "6"}, '{"prompt": ', {"id": "a", "prompt": "7"},
    {"id": "c", "prompt": "8", "params": {"temprature": 1}}, {"id": "d", "prompt_ids": [99999]},
    {"prompt_ids": [1], "id": "x"}, {"id": "y"}, {"prompt": "123", "params": {"max_new_tokens": 1}},
    {"id": "e", "prompt": "9"},
)  # fmt: skip


def test_every_kind_of_broken_row_is_an_error_row_with_its_line() -> None:
    done = batch(*NUMBERS, "--format", "jsonl", stdin=BROKEN)
    assert done.status == 1
    assert [record["id"] for record in done.records] == ["a", "b", "2", "a", "c", "d", "x", "y", "8", "e"]
    texts = [record.get("text") for record in done.records]
    assert (texts[:6], texts[7], texts[9]) == (["five", "six", None, None, None, None], None, "nine")
    assert (done.records[8]["finish_reason"], done.records[8]["usage"]["new_tokens"]) == ("length", 1)
    errors = [record["error"]["message"] for record in done.records if "error" in record]
    assert errors[0].startswith("line 3: not JSON")
    assert errors[1] == "line 4: the id 'a' is already used in line 1"
    assert "line 5: unknown key temprature; did you mean temperature?" in errors[2]
    assert "99999" in errors[3]
    assert "prompt" in errors[4]


def test_unordered_rows_begin_with_the_longest_of_a_file_and_in_turn_from_a_pipe(tmp_path: Path) -> None:
    """From a pipe nothing is read ahead: a row that has arrived does not wait for others to be sorted with."""
    given = lines(*({"id": str(new), "prompt": "One", "params": {"max_new_tokens": new}} for new in (1, 2, 9, 12)))
    (tmp_path / "in.jsonl").write_text(given)
    options = ("run", "-m", "builtin:stories", "--unordered", "--batch-size", "2", "--format", "jsonl")
    whole = genctl(*options, "-i", str(tmp_path / "in.jsonl"))
    piped = genctl(*options, "--input-format", "jsonl", stdin=given)
    assert [record["id"] for record in piped.records] == ["1", "2", "9", "12"]
    assert next(record["id"] for record in whole.records) == "9"
    assert sorted(record["text"] for record in whole.records) == sorted(record["text"] for record in piped.records)


def test_a_prompt_that_tokenises_to_nothing_is_an_error_row(tmp_path: Path) -> None:
    model = checkpoint("gpt2", tmp_path / "model")
    made = model / "tokenizer.json"
    strip = {"type": "Strip", "strip_left": True, "strip_right": True}
    made.write_text(json.dumps({**json.loads(made.read_text()), "normalizer": strip}))
    done = batch("-m", str(model), "--format", "jsonl", "-n", "2", stdin=lines({"prompt": "  "}, {"prompt": " x "}))
    assert (done.status, ["error" in record for record in done.records]) == (1, [True, False])
    assert done.records[0]["error"] == {"code": "input", "message": "the prompt tokenises to nothing"}


@pytest.mark.parametrize("format", ["jsonl", "text"])
@pytest.mark.parametrize("size", ["1", "16"])
def test_strict_stops_at_the_first_row_that_fails(format: str, size: str) -> None:
    done = batch(*NUMBERS, "--format", format, "--strict", "--batch-size", size, stdin=BROKEN)
    assert done.status == 1
    if format == "jsonl":
        assert [record["id"] for record in done.records] == ["a", "b", "2"]
        assert done.records[2]["error"]["message"].startswith("line 3: not JSON")
    else:
        assert done.out == "five\nsix\n"
    assert done.err.startswith("error: prompt 3: line 3: not JSON")
    assert done.err.endswith("--strict stops here, the 2 rows before it are written\n")
    assert len(done.err.splitlines()) == 1


def test_strict_lets_the_rows_before_the_failing_one_finish_and_drops_those_after_it() -> None:
    """The failing row is found while a longer one before it is being decoded and a shorter one after it is done."""
    stdin = lines(
        {"id": "long", "prompt": "777777"}, {"id": "bad", "prompt_ids": [99999]}, {"id": "short", "prompt": "1"}
    )
    done = batch(*NUMBERS, "--format", "jsonl", "--strict", "--batch-size", "3", stdin=stdin)
    assert [record["id"] for record in done.records] == ["long", "bad"]
    assert done.records[0]["finish_reason"] == "eos"
    assert done.status == 1


def test_strict_ends_with_the_first_row_of_the_input_that_fails_whichever_fails_last() -> None:
    """Three rows that fail at the same step, in one batch or in two."""
    nothing = {"params": {"suppress_tokens": list(range(200))}}
    stdin = lines({"id": "a", "prompt": "5"}, *({"id": f"bad {n}", "prompt": "6", **nothing} for n in range(3)))
    for size in ("4", "2"):
        done = batch(*NUMBERS, "--format", "jsonl", "--strict", "--batch-size", size, stdin=stdin)
        assert [record["id"] for record in done.records] == ["a", "bad 0"]
        assert done.status == 1


def test_strict_and_resume_leave_the_row_that_failed_to_the_next_run(tmp_path: Path) -> None:
    given, out, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    given.write_text(BROKEN)
    arguments = ("run", *NUMBERS, "-i", str(given), "--seed", "1", "--batch-size", "2")
    for _ in range(2):
        done = genctl(*arguments, "-o", str(out), "--resume", "--strict")
        assert done.status == 1
        assert "--strict stops here, the 2 rows before it are written" in done.err
        assert "2 rows are in" in done.err
        assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["a", "b"]
    assert genctl(*arguments, "-o", str(out), "--resume").status == 1
    assert genctl(*arguments, "-o", str(whole)).status == 1
    assert out.read_bytes() == whole.read_bytes()


def test_without_truncate_both_lengths_are_told(gpt2: Path) -> None:
    done = genctl("run", "-m", str(gpt2), "z" * 600, "--format", "jsonl")
    (record,) = done.records
    assert done.status == 1
    assert record["error"]["message"] == "the prompt has 600 tokens, but the model's context is 256"


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_truncate_keeps_the_other_end_and_says_so(gpt2: Path, side: str) -> None:
    ids = [10 + number % 200 for number in range(300)]
    keep = 256 - 6
    wanted = {"left": ids[-keep:], "right": ids[:keep], "middle": ids[: keep // 2] + ids[-keep // 2 :]}[side]
    common = ("-m", str(gpt2), "--format", "jsonl", "-n", "6", "--seed", "1")
    done = batch(*common, "--truncate", side, stdin=lines({"prompt_ids": ids}))
    (record,) = done.records
    assert done.status == 0
    assert record["truncated"] == 50
    assert record["usage"] == {"prompt_tokens": keep, "new_tokens": 6}
    assert record["finish_reason"] == "length"
    assert done.err == f"note: prompt 1: 50 tokens were taken from the prompt (--truncate {side})\n"
    (plain,) = batch(*common, stdin=lines({"prompt_ids": wanted})).records
    assert record["token_ids"] == plain["token_ids"]
    assert "truncated" not in plain


def test_truncate_leaves_a_prompt_that_fits_alone_and_a_row_may_ask_for_it(gpt2: Path) -> None:
    stdin = lines(
        {"prompt_ids": [20] * 249},
        {"prompt_ids": [20] * 251, "params": {"truncate": "right"}},
        {"prompt_ids": [20] * 257},
    )
    done = batch("-m", str(gpt2), "--format", "jsonl", "-n", "7", stdin=stdin)
    first, second, third = done.records
    assert "truncated" not in first
    assert second["truncated"] == 2
    assert "error" in third
    assert "--truncate right" in done.err


def test_truncate_keeps_half_of_the_context_for_the_prompt_however_many_tokens_are_wanted(gpt2: Path) -> None:
    done = batch("-m", str(gpt2), "--truncate", "left", "--format", "jsonl", stdin=lines({"prompt_ids": [20] * 300}))
    (record,) = done.records
    assert record["usage"]["prompt_tokens"] == 128
    assert record["truncated"] == 172


@pytest.mark.parametrize("more", [(), ("--num-beams", "3"), ("--do-sample", "--num-return-sequences", "2")])
def test_a_row_that_takes_too_long_ends_with_what_it_has(gpt2: Path, more: tuple[str, ...]) -> None:
    done = ok("run", "-m", str(gpt2), "hello", "-n", "30", "--row-timeout", "1e-9", "--format", "jsonl", *more)
    assert {record["finish_reason"] for record in done.records} == {"time"}
    assert {record["usage"]["new_tokens"] for record in done.records} == {1}


def test_a_row_may_have_a_limit_of_its_own_and_the_summary_says_which_it_was(gpt2: Path, tmp_path: Path) -> None:
    stdin = lines({"prompt": "a"}, {"prompt": "b", "params": {"row_timeout": 1e-9}})
    done = batch("-m", str(gpt2), "-n", "4", "--format", "jsonl", "--row-timeout", "1000", stdin=stdin)
    assert [record["usage"]["new_tokens"] for record in done.records] == [4, 1]
    assert batch("-m", str(gpt2), "--row-timeout", "0", stdin=stdin).status == 2
    preset = tmp_path / "own.toml"
    preset.write_text('[[stopping]]\nuse = "stop_strings"\nstop_strings = ["never"]\n')
    done = genctl("run", "-m", str(gpt2), "x", "-p", str(preset), "--row-timeout", "1e-9", "--format", "jsonl")
    assert done.records[0]["finish_reason"] == "time"
    done = genctl("run", "-m", str(gpt2), "x", "--row-timeout", "1e-9", terminal=True)
    assert "cut at row_timeout" in done.err


HOSTILE = "12\x1b]0;gone\x07"


@pytest.mark.parametrize("more", [(), ("-o", "-"), ("--stream",), ("--unordered",)])
def test_a_terminal_gets_escapes_shown_and_a_pipe_as_they_are(gpt2: Path, more: tuple[str, ...]) -> None:
    arguments = ("run", "-m", str(gpt2), HOSTILE, "--echo", "-n", "2", *more)
    shown = ok(*arguments, terminal=True)
    assert "\x1b]" not in shown.out
    assert "␛]0;gone␇" in shown.out
    assert HOSTILE in genctl(*arguments, stdin="").out


def test_the_name_of_the_output_says_its_format(tmp_path: Path) -> None:
    for name, first in (("a.jsonl", "{"), ("a.json", "["), ("a.tsv", "id\t"), ("a.txt", "seven"), ("a.v2", "seven")):
        path = tmp_path / name
        assert genctl("run", *NUMBERS, "7", "-o", str(path)).status == 0
        assert path.read_text().startswith(first)
    for name in ("out.csv", "out.CSV", "out.xlsx", "out.html", "out.parquet"):
        done = genctl("run", *NUMBERS, "7", "-o", str(tmp_path / name))
        assert done.status == 2
        assert f"{name}: {name[4:].lower()} is not a format of this command" in done.err
        assert not (tmp_path / name).exists()
    for command in (("score", "hello"), ("compare", "-p", "greedy", "-p", "beam5", "-n", "2", "hello")):
        assert genctl(*command, "-o", str(tmp_path / f"{command[0]}.jsonl")).status == 0
        assert (tmp_path / f"{command[0]}.jsonl").read_text().startswith('{"schema"')
    done = genctl("inspect-cache", "hello", "-o", str(tmp_path / "out.jsonl"))
    assert (done.status, "jsonl is not a format of this command\nhint: --format json or --format tsv" in done.err) == (
        2,
        True,
    )
    path = tmp_path / "b.csv"
    assert genctl("run", *NUMBERS, "7", "-o", str(path), "--format", "text").status == 0
    assert path.read_text() == "seven\n"


ROWS: list[dict[str, Any]] = [
    {"label": "a", "prompt": "One day", "by": {"x": [1, None]}},
    {"id": "q", "text": "The fox", "label": "b"},
    {"label": "c", "prompt": 7, "by": 3},
    {"prompt": "Hi"},
]
COLUMNS: list[Any] = [{"label": "a", "by": {"x": [1, None]}}, {"label": "b"}, {"label": "c", "by": 3}, None]
SHORT = ("-n", "2", "--seed", "1", "--format", "jsonl")
CSV = 'id,question,label\nx,One day,"a\nb"\ny,The fox,\n'


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def inputs(records: list[dict[str, Any]]) -> list[Any]:
    return [record.get("input") for record in records]


@pytest.mark.parametrize("command", [("run",), ("run", "--do-sample", "--batch-size", "4"), ("beam",), ("chat",)])
def test_records_and_error_records_have_the_columns(command: tuple[str, ...], rows: Path) -> None:
    done = genctl(*command, "-i", str(rows), *SHORT)
    assert (done.status, inputs(done.records)) == (1, COLUMNS)
    for record in (done.records[0], done.records[2]):
        assert list(record["input"]) == ["label", "by"], "in the order of the row, whether it fails or not"
    assert [record["id"] for record in done.records] == ["0", "q", "2", "3"]
    assert ["error" in record for record in done.records] == [False, False, True, False]


def test_compare_and_score_have_them(rows: Path, tmp_path: Path) -> None:
    rows.write_text(json.dumps(ROWS[0]) + "\n")
    pair = ("--strategy", "a:", "--strategy", "b:num_beams=2")
    done = genctl("compare", *pair, "-i", str(rows), *SHORT, "--template", "{prompt}!")
    assert inputs(done.records) == [{**COLUMNS[0], "prompt": "One day"}] * 2
    path = tmp_path / "texts.csv"
    path.write_text("text,context,label\nday,One,a\n,x,b\n")
    done = genctl("score", "-i", str(path), "--format", "jsonl")
    assert (done.status, inputs(done.records)) == (1, [{"label": "a"}, {"label": "b"}])
    assert done.records[0]["context"] == "One"


def test_a_server_and_its_failures_have_them(rows: Path) -> None:
    with running() as server:
        done = genctl("run", "--backend", server.url, "-i", str(rows), "--format", "jsonl")
    assert inputs(done.records) == COLUMNS


def test_a_template_reads_columns_and_they_stay(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(CSV)
    done = genctl("run", "-i", str(path), "--template", "{question} {label}", *SHORT)
    assert [(record["id"], record["prompt"]) for record in done.records] == [("x", "One day a\nb"), ("y", "The fox ")]
    assert inputs(done.records) == [{"question": "One day", "label": "a\nb"}, {"question": "The fox", "label": ""}]


def test_a_record_is_a_row_again_and_a_template_finds_the_columns_of_its_row(tmp_path: Path, rows: Path) -> None:
    first = genctl("run", "-i", str(rows), *SHORT)
    (tmp_path / "first.jsonl").write_text(first.out)
    again = genctl("run", "-i", str(tmp_path / "first.jsonl"), *SHORT)
    assert [record.get("text") for record in again.records] == [record.get("text") for record in first.records]
    rest = {key: value for key, value in first.records[0].items() if key not in ("id", "prompt")}
    assert again.records[0]["input"] == rest
    graded = genctl("run", "-i", str(tmp_path / "first.jsonl"), "--template", "{prompt}{text} {label}", *SHORT)
    assert graded.records[0]["prompt"] == f"One day{first.records[0]['text']} a"
    assert "no field 'label'" in graded.records[3]["error"]["message"]


def test_events_and_pages_have_them(rows: Path, tmp_path: Path) -> None:
    events, page = tmp_path / "events.jsonl", tmp_path / "page.html"
    genctl("run", "-i", str(rows), *SHORT, "--events", str(events), "--report", str(page))
    began = [event for event in map(json.loads, events.read_text().splitlines()) if event["event"] == "began"]
    assert inputs(began) == [COLUMNS[0], COLUMNS[1], None]
    listed = [lane.get("input") for lane in Parts(page.read_text()).data["lanes"] if lane["lane"] in ("0", "q")]
    assert listed == COLUMNS[:2]
    again = tmp_path / "again.html"
    assert genctl("report", str(events), "-o", str(again)).status == 0
    assert inputs(Parts(again.read_text()).data["lanes"])[:2] == COLUMNS[:2]
