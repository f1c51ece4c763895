"""`--events` replaces a file only with `--force`, as `--output` does."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.cli.tool import genctl

COMMANDS = {
    "run": ("run", "-m", "builtin:numbers", "12"),
    "beam": ("beam", "-m", "builtin:numbers", "12"),
    "compare": ("compare", "--strategy", "a:", "--strategy", "b:num_beams=2", "-m", "builtin:numbers", "12"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_existing_file_is_refused_and_replaced_with_force(command: str) -> None:
    file = Path("run.jsonl")
    file.write_text("mine")
    done = genctl(*COMMANDS[command], "--events", "run.jsonl", "-o", "out.txt")
    assert (done.status, done.err) == (
        2,
        "error: the output exists already: run.jsonl\nhint: --force replaces it\n",
    )
    assert file.read_text() == "mine"
    assert not Path("out.txt").exists()  # nothing is left that would block the next run
    assert genctl(*COMMANDS[command], "--events", "run.jsonl", "--force").status == 0
    events = file.read_text()
    assert genctl(*COMMANDS[command], "--events", "new.jsonl").status == 0
    assert Path("new.jsonl").read_text().count("\n") == events.count("\n") > 3
    assert sorted(path.name for path in Path().iterdir()) == ["new.jsonl", "run.jsonl"]  # no part is left
    assert genctl("report", "run.jsonl").status == 0


def test_force_is_for_both_files() -> None:
    for name in ("out.txt", "run.jsonl"):
        Path(name).write_text("old")
    both = ("-o", "out.txt", "--events", "run.jsonl")
    done = genctl(*COMMANDS["run"], *both, "--report", "new.html")
    assert (done.status, done.err) == (
        2,
        "error: the output exists already: out.txt\nhint: --force replaces it\n",
    )
    assert sorted(path.name for path in Path().iterdir()) == ["out.txt", "run.jsonl"]
    assert genctl(*COMMANDS["run"], *both, "--force").status == 0
    assert Path("out.txt").read_text() == "twelve\n"
    assert '"finished"' in Path("run.jsonl").read_text()
    for command, more in (("run", ""), ("beam", ""), ("compare", "")):
        assert f"{more}--events file, but there is neither" in genctl(*COMMANDS[command], "--force").err


def test_one_file_cannot_be_both() -> None:
    for command in COMMANDS:
        done = genctl(*COMMANDS[command], "-o", "x", "--events", "x", "--force")
        assert (done.status, done.err) == (2, "error: --events x: --output names the same file\n")


def test_streams_devices_and_pipes_are_written_to() -> None:
    assert genctl(*COMMANDS["run"], "--events", "/dev/null").out == "twelve\n"
    assert genctl(*COMMANDS["run"], "--events", "/dev/null", "-o", "/dev/null").status == 0
    done = genctl(*COMMANDS["run"], "--events", "-", "-o", "out.txt")
    assert done.status == 0
    assert done.out.splitlines()[-1].startswith('{"event": "finished"')
    assert not Path("-").exists()
    os.mkfifo("pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_text()))
    reader.start()
    assert genctl(*COMMANDS["run"], "--events", "pipe").status == 0
    reader.join()
    assert read == [done.out] or read[0].count("\n") == done.out.count("\n")


def test_a_run_that_cannot_begin_leaves_the_old_recording() -> None:
    Path("run.jsonl").write_text("mine")
    done = genctl("run", "-m", "./no/such/folder", "x", "--events", "run.jsonl", "--force")
    assert done.status == 3
    assert Path("run.jsonl").read_text() == "mine"
    assert genctl("run", "-m", "./no/such/folder", "x", "--events", "new.jsonl").status == 3
    assert [path.name for path in Path().iterdir()] == ["run.jsonl"]


def test_a_resumed_job_refuses_to_record() -> None:
    Path("in.txt").write_text("12\n")
    done = genctl(*COMMANDS["run"][:-1], "-i", "in.txt", "-o", "o.txt", "--resume", "--events", "e.jsonl")
    assert done.status == 2
    assert "--events records one run from its beginning" in done.err
    assert not Path("e.jsonl").exists()


def test_a_report_of_results_names_what_they_are() -> None:
    Path("results.jsonl").write_text(genctl(*COMMANDS["run"], "--format", "jsonl").out)
    done = genctl("report", "results.jsonl")
    assert done.status == 2
    hint = "genctl run --events FILE writes what a report needs"
    assert f"results.jsonl holds results, not the events of a run\nhint: {hint}" in done.err
