"""Workers write what one process writes, whatever their number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tool import Done, genctl

pytestmark = pytest.mark.usefixtures("workers_here")
SETTINGS = ("--seed", "7", "--batch-size", "2")


def run(model: Path, rows: Path, out: Path, *more: str, command: str = "run") -> Done:
    return genctl(command, "-m", str(model), "-i", str(rows), "-o", str(out), *SETTINGS, *more, stdin="")


def without_times(path: Path) -> list[Any]:
    """The events of a file, without times, which differ between runs."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for event in found:
        for name in ("seconds", "first_token_s"):
            event.pop(name, None)
    return found


@pytest.mark.parametrize("counts", ["14", "2"])
def test_one_two_and_four_workers_write_what_no_worker_writes(
    counts: str, llama: Path, rows: Path, tmp_path: Path
) -> None:
    alone = run(llama, rows, tmp_path / "alone.jsonl")
    expected = (tmp_path / "alone.jsonl").read_bytes()
    records = [json.loads(line) for line in expected.splitlines()]
    assert len(records) > 40
    assert sum("error" in record for record in records) == 10
    for workers in counts:
        out = tmp_path / f"{workers}.jsonl"
        done = run(llama, rows, out, "--workers", workers, "--resume")
        assert (done.status, done.out, done.err) == (alone.status, "", alone.err) == (1, "", "")
        assert out.read_bytes() == expected
        mark = json.loads((tmp_path / f"{workers}.jsonl.journal").read_text().splitlines()[-1])
        assert mark["rows"] == 40
        assert mark["done"]


def test_scores_and_events_are_the_same(llama: Path, rows: Path, tmp_path: Path) -> None:
    for name, more in (("alone", ()), ("workers", ("--workers", "2"))):
        events = tmp_path / f"{name}.events"
        done = run(
            llama, rows, tmp_path / f"{name}.jsonl", "--no-draft", "--top-logprobs", "2", "--events", str(events), *more
        )
        assert done.status == 1
    assert (tmp_path / "alone.jsonl").read_bytes() == (tmp_path / "workers.jsonl").read_bytes()
    alone, workers = without_times(tmp_path / "alone.events"), without_times(tmp_path / "workers.events")
    assert any(event["event"] == "stepped" for event in alone)
    assert sorted(map(json.dumps, workers)) == sorted(map(json.dumps, alone))


def test_rows_may_come_from_a_pipe(llama: Path, rows: Path, tmp_path: Path) -> None:
    arguments = ("run", "-m", str(llama), "--input-format", "jsonl", "--format", "jsonl", *SETTINGS)
    alone = genctl(*arguments, stdin=rows.read_bytes())
    done = genctl(*arguments, "--workers", "2", stdin=rows.read_bytes())
    assert (done.status, done.raw) == (alone.status, alone.raw)
    assert done.raw.count(b"\n") > 40


def test_strict_stops_at_the_same_row(llama: Path, rows: Path, tmp_path: Path) -> None:
    alone = run(llama, rows, tmp_path / "alone.jsonl", "--strict")
    done = run(llama, rows, tmp_path / "workers.jsonl", "--strict", "--workers", "2")
    assert (done.status, done.err) == (alone.status, alone.err)
    assert "row 4: " in done.err
    assert (tmp_path / "workers.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()


def test_trees_of_beams_are_the_same(llama: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One day\nThe sea\nA fox\n")
    arguments = ("-n", "6", "--tree-format", "json", "--fail-on", "length")
    alone = run(llama, prompts, tmp_path / "alone", *arguments, command="beam")
    done = run(llama, prompts, tmp_path / "two", *arguments, "--workers", "2", command="beam")
    assert (done.status, done.err) == (alone.status, alone.err)
    assert done.status == 4
    assert (tmp_path / "two").read_bytes() == (tmp_path / "alone").read_bytes() != b""


def test_scores_of_texts_are_the_same(llama: Path, rows: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"The little fox {number} went out.\n" for number in range(9)) + "\n" + "long " * 400)
    arguments = ("score", "-m", str(llama), "-i", str(texts), "--format", "jsonl", "--scores", "--batch-size", "1")
    alone, done = genctl(*arguments, stdin=""), genctl(*arguments, "--workers", "2", stdin="")
    assert (done.status, done.raw, done.err) == (alone.status, alone.raw, alone.err)
    assert [("error" in record) for record in done.records] == [False] * 9 + [True, True]
