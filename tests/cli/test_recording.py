"""A recording (`--events`) is read back line by line, and every line is checked before anything is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genctl.commands.recording import read_recording
from genctl.events import to_json
from tests.cli.tool import genctl
from tests.terminal.beams import search

GOOD = json.dumps({"event": "began", "lane": "0", "prompt": "p", "strategy": "beam"})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nonsense\n", "line 2: not JSON: expected a value at column 1"),
        ("[1, 2]\n", "line 2: an event is a JSON object"),
        ('{"event": "danced", "lane": "0"}\n', "line 2: unknown event 'danced'"),
        ('{"event": "finish", "lane": "0"}\n', "line 2: unknown event 'finish'; did you mean finished?"),
        ('{"lane": "0"}\n', 'line 2: "event": expected the name of an event such as "began", got nothing'),
        ('{"event": "failed", "lane": "0"}\n', "line 2: code and message: expected here, but missing"),
        (
            '{"event": "prefilled", "lane": "0", "prompt_tokens": "x"}\n',
            "line 2: prompt_tokens: expected a whole number, got a string",
        ),
        (
            '{"event": "stepped", "lane": "0", "step": 0, "rows": [{"lane": "0", "parent": 3, "written": [],'
            ' "logprob": 0.0, "total": 0.0}]}\n',
            "line 2: lane '0': a row continues row 3",
        ),
        (f"{'[' * 100_000}\n", "line 2: nested too deeply"),
        ('{"event": "\udcff"}\n', "line 2: byte 12 is not UTF-8"),
        (
            '{"event": "finished", "lane": "0", "prompt_tokens": ' + "1" * 5000 + "}\n",
            "line 2: a number has too many digits",
        ),
        (f"{GOOD[:-5]}\n", "line 2: "),  # in the middle of a file it is no tear
    ],
)
def test_a_damaged_line_is_named_before_anything_is_shown(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{GOOD}\n{line}", errors="surrogateescape")
    done = genctl("report", str(path))
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"error: {path}, {why}")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_a_run_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    done = genctl("report", str(path))
    assert done.status == 2
    assert "holds no recorded run" in done.err


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    done = genctl("report", str(tmp_path / "gone"))
    assert (done.status, done.err) == (2, f"error: cannot read {tmp_path / 'gone'}: no such file\n")


def test_an_events_file_is_never_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    done = genctl("run", "One day", "-n", "2", "--events", str(tmp_path / "link"))
    assert done.status == 2
    assert "the output exists already" in done.err
    assert (tmp_path / "precious").read_text() == "mine"
    assert genctl("run", "One day", "-n", "2", "--events", "a\0b").status == 2


@pytest.mark.parametrize("cut", [20, 1])
def test_a_torn_recording_is_read_up_to_the_tear(cut: int, tmp_path: Path) -> None:
    lines = [json.dumps(to_json(event)).encode() + b"\n" for event in search()]
    torn, whole = tmp_path / "t.jsonl", tmp_path / "whole.jsonl"
    torn.write_bytes(b"".join(lines)[: -1 - cut])
    whole.write_bytes(b"".join(lines[:-1]))
    done = genctl("report", str(torn), "-q")
    assert f"note: {torn}, line {len(lines)}: the line is cut short: the recording was interrupted here" in done.err
    assert done.status == 0
    assert read_recording(str(torn), lambda note: None) == read_recording(str(whole))


def test_a_tear_within_a_character_is_a_tear(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_bytes(GOOD.encode() + b'\n{"event": "failed", "lane": "\xc3')
    assert "line 2: the line is cut short" in genctl("report", str(trace)).err


def test_a_recording_of_nothing_but_a_torn_line_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(GOOD[:-5])
    done = genctl("report", str(trace))
    assert (done.status, done.out) == (2, "")
    assert "line 1: the line is cut short" in done.err
