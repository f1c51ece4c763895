"""The program as a process: signals, closed pipes, exit statuses, and streaming on a real terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect
import pyte
import pytest

from tests.tiny import checkpoint
from tests.warm import python

GENCTL = ["-m", "genctl"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}


def test_an_interrupt_writes_what_there_is_and_exits_with_130(tmp_path: Path, environment: dict[str, str]) -> None:
    rows = tmp_path / "rows.txt"
    rows.write_text("Once upon a time\n" * 400)
    command = [
        sys.executable,
        *GENCTL,
        "run",
        "-i",
        str(rows),
        "--format",
        "jsonl",
        "--do-sample",
        "--seed",
        "1",
        "--batch-size",
        "4",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=tmp_path)
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert time.monotonic() - started < 30  # not the minutes that all rows would take
    records = [json.loads(line) for line in [first, *rest.splitlines()]]
    assert {record["finish_reason"] for record in records} >= {"interrupted"}
    assert len(records) < 400
    assert b"Traceback" not in err


def test_sigterm_exits_with_143(tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, *GENCTL, "run", "--format", "jsonl", "--batch-size", "1"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=tmp_path
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Once upon a time\n" * 400)
    process.stdin.close()
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.stdin = None
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err


@contextmanager
def fed_slowly(*options: str, folder: Path, env: dict[str, str]) -> Iterator[Callable[[str, str], dict[str, Any]]]:
    """A run to which one row is given at a time: id and prompt -> its record. The pipe stays open."""
    command = [sys.executable, *GENCTL, "run", "-m", "builtin:stories", "--input-format", "jsonl", "--format", "jsonl"]
    process = subprocess.Popen(
        [*command, "-n", "4", *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, cwd=folder,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Timer(60, process.kill)  # it waits for more rows
    late.start()

    def feed(id: str, prompt: str) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"id": id, "prompt": prompt}).encode() + b"\n")
        process.stdin.flush()
        record: dict[str, Any] = json.loads(process.stdout.readline())
        return record

    try:
        yield feed
        if "--strict" not in options:
            process.stdin.close()
        assert process.wait(60) == 1
    finally:
        late.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()


TOO_LONG = "too long " * 3000


@pytest.mark.parametrize("options", ["--batch-size 8", "--batch-size 1", "--no-pack --batch-size 1"])
def test_rows_of_a_slow_pipe_are_decoded_when_they_come(
    options: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Each waited until there were `--batch-size` of them, one that cannot be decoded until another was."""
    with fed_slowly(*options.split(), folder=tmp_path, env=environment) as feed:
        for number, prompt in enumerate(("One day", TOO_LONG, TOO_LONG, "The old fox")):
            record = feed(f"row {number}", prompt)
            assert (record["id"], "error" in record) == (f"row {number}", prompt == TOO_LONG)


@pytest.mark.parametrize("size", ["8", "1"])
def test_strict_ends_at_a_row_of_a_slow_pipe_that_fails(size: str, tmp_path: Path, environment: dict[str, str]) -> None:
    """It waited for the next row, with a batch also for those that are to be decoded."""
    with fed_slowly("--strict", "--batch-size", size, folder=tmp_path, env=environment) as feed:
        assert "error" not in feed("a", "One day")
        assert "error" not in feed("b", "The sea")
        assert "error" in feed("c", TOO_LONG)


def test_a_closed_pipe_ends_quietly(tmp_path: Path, environment: dict[str, str]) -> None:
    command = f'"{sys.executable}" -m genctl run --do-sample --seed 1 --batch-size 1 2>err | head -c 20; '
    command += "echo ${PIPESTATUS[2]} >status; cat err >&2"
    done = subprocess.run(
        ["bash", "-c", f"yes 'Once upon a time' | head -n 50 | {command}"],
        capture_output=True, env=environment, cwd=tmp_path, check=False, timeout=120,
    )  # fmt: skip
    assert len(done.stdout) == 20
    assert done.stderr == b""
    assert (tmp_path / "status").read_text() == "0\n"


def test_a_real_terminal_shows_text_as_it_streams(tmp_path: Path, environment: dict[str, str]) -> None:
    environment = {**environment, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    child = pexpect.spawn(
        sys.executable, [*GENCTL, "run", "Once upon a time", "--seed", "7"],
        env=environment, cwd=str(tmp_path), dimensions=(24, 80), timeout=90, encoding="utf-8",
    )  # fmt: skip
    child.expect("there was")
    child.expect("tok/s")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_lines_about_a_run_fit_the_terminal_and_take_the_bar_away(tmp_path: Path, environment: dict[str, str]) -> None:
    program, *rest = python()
    options = ["run", "-m", "builtin:numbers", "12", "1207"]
    child = pexpect.spawn(
        program, [*rest, *GENCTL, *options, "-v", "--seed", "1234567890123456789"],
        env={**environment, "TERM": "xterm-256color", "COLUMNS": "60"},
        cwd=str(tmp_path), dimensions=(40, 60), timeout=90,
    )  # fmt: skip
    screen = pyte.Screen(60, 40)
    pyte.ByteStream(screen).feed(child.read())
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert lines[0] == "note: runtime: native (t5)"  # where the bar was
    place = next(place for place, line in enumerate(lines) if line.startswith("2 prompts · "))
    assert len(lines) > place + 1
    assert re.search(r"\d+ prompt tokens", " ".join(lines[place:]))
    assert not any(line.startswith("·") or line.endswith("·") for line in lines[place:])  # not cut within an item


def test_a_dumb_terminal_is_as_wide_as_it_is(tmp_path: Path, environment: dict[str, str]) -> None:
    environment = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
    child = pexpect.spawn(
        python()[0], [*python()[1:], *GENCTL, "inspect-cache", "12", "-m", "builtin:numbers", "--steps", "2"],
        env={**environment, "TERM": "dumb"}, cwd=str(tmp_path), dimensions=(40, 60), timeout=90, encoding="utf-8",
    )  # fmt: skip
    lines = child.read().splitlines()
    assert len(lines[0]) == 60  # a rule over the whole page
    assert all(len(line) <= 60 for line in lines)


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_escape_codes_where_they_are_not_wanted(
    variables: dict[str, str], tmp_path: Path, environment: dict[str, str]
) -> None:
    environment = {**environment, "TERM": "xterm-256color", **variables}
    child = pexpect.spawn(
        python()[0], [*python()[1:], *GENCTL, "run", "-m", "builtin:numbers", "7", "8", "--scores"],
        env=environment, cwd=str(tmp_path), dimensions=(40, 80), timeout=90, encoding="utf-8",
    )  # fmt: skip
    text = child.read()
    assert "seven" in text
    assert "\x1b[3" not in text  # colours
    if variables.get("TERM") == "dumb":
        assert "\x1b" not in text


def test_piped_output_has_no_escape_codes(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*python(), *GENCTL, "run", "-m", "builtin:numbers", "7", "--scores", "--format", "text"],
        capture_output=True, env={**environment, "TERM": "xterm-256color"}, cwd=tmp_path, stdin=subprocess.DEVNULL,
        check=True,
    )  # fmt: skip
    assert done.stdout == b"seven\n"
    assert b"\x1b" not in done.stderr


def test_a_hub_id_works_from_the_local_cache(tmp_path: Path, environment: dict[str, str]) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "home" / "hub" / "models--gpt2"
    checkpoint("gpt2", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    environment = {**environment, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [
        *python(),
        *GENCTL,
        "run",
        "--model",
        "gpt2",
        "--do-sample",
        "--seed",
        "1",
        "-n",
        "8",
        "--format",
        "jsonl",
        "hello",
    ]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["model"], record["strategy"]) == ("gpt2", "sample")
    assert len(record["token_ids"]) <= 8
