"""Columns of a data set stay: what a row has beside its prompt is `input` of its records, wherever they are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tool import genctl
from tests.engines.server.stand_in import running
from tests.pages.pages import Parts

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


def test_compare_has_them_in_each_run(rows: Path) -> None:
    rows.write_text(json.dumps(ROWS[0]) + "\n")
    pair = ("--strategy", "a:", "--strategy", "b:num_beams=2")
    done = genctl("compare", *pair, "-i", str(rows), *SHORT, "--template", "{prompt}!")
    assert inputs(done.records) == [{**COLUMNS[0], "prompt": "One day"}] * 2


def test_score_has_them(tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    path.write_text("text,context,label\nday,One,a\n,x,b\n")
    done = genctl("score", "-i", str(path), "--format", "jsonl")
    assert (done.status, inputs(done.records)) == (1, [{"label": "a"}, {"label": "b"}])
    assert done.records[0]["context"] == "One"


def test_parity_reads_tables_and_rows_with_columns(rows: Path, tmp_path: Path) -> None:
    path = tmp_path / "texts.tsv"
    path.write_text("text\tlabel\nOne day a fox\tx\n")
    pair = ("builtin:stories", "builtin:stories@batch_size=1")
    assert genctl("parity", *pair, "--texts", str(path)).status == 0
    rows.write_text(json.dumps(ROWS[0]) + "\n")
    assert genctl("parity", *pair, "-i", str(rows), "-n", "2").status == 0


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


def test_resume_goes_on_and_notices_another_column(tmp_path: Path) -> None:
    path, out = tmp_path / "rows.csv", tmp_path / "out.jsonl"
    path.write_text(CSV)
    command = ("run", "-i", str(path), "-o", str(out), "--resume", "--template", "{question}", *SHORT)
    assert genctl(*command).status == 0
    whole = out.read_bytes()
    assert "nothing to do" in genctl(*command).err
    journal = out.with_name("out.jsonl.journal")
    lines = journal.read_text().splitlines()
    mark = json.loads(lines[1])
    assert (mark["rows"], mark["bytes"]) == (0, 0)
    journal.write_text("\n".join(lines[:2]) + "\n")  # as a kill before the first row leaves it
    assert genctl(*command).status == 0
    assert out.read_bytes() == whole
    path.write_text(CSV.replace('"a\nb"', "c"))
    done = genctl(*command)
    assert (done.status, "the input has changed: row 1 is not what was read" in done.err) == (2, True), done.err
    assert out.read_bytes() == whole


def test_a_misspelt_key_is_a_warning_which_quiet_leaves_out(rows: Path) -> None:
    rows.write_text('{"prompt": "a"}\n' + '{"prompt": "a", "promt": "b"}\n' * 2)
    done = genctl("run", "-i", str(rows), *SHORT)
    assert done.err == f"warning: {rows}, line 2: 'promt' is read as a column of your own; is prompt meant?\n"
    assert genctl("run", "-i", str(rows), "-q", *SHORT).err == ""


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


def test_tsv_has_no_column_more(rows: Path) -> None:
    head, first, *_ = genctl("run", "-i", str(rows), "-n", "2", "--format", "tsv").out.splitlines()
    assert head.split("\t")[-1] == "error"
    assert len(first.split("\t")) == len(head.split("\t"))
