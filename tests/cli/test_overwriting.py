"""Every command that may replace a file: the old one stays until the new one is whole, whatever goes wrong."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from pathlib import Path

import pytest

from genctl.io import output
from tests.cli.tool import Done, genctl, ok
from tests.io.disk import Disk

OLD = b"the old file, which is worth something\n"
TINY = ("-m", "builtin:numbers")
STORIES = ("-m", "builtin:stories")
EXPLORE = ("explore", *STORIES, "Hi", "--expand", "mass=0.5,depth=1")
# a quick command with its arguments -> the options that name a file that --force replaces
CASES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("run", *TINY, "12"): ("output", "events", "report"),
    ("beam", *TINY, "12"): ("output", "events", "report"),
    ("chat", *STORIES, "-n", "2", "--format", "jsonl"): ("output",),
    ("score", *STORIES, "A fox"): ("output", "report"),
    ("tokens", *TINY, "12"): ("output",),
    ("compare", *TINY, "--strategy", "a:", "--strategy", "b:num_beams=2", "12"): (
        "output", "events", "report",
    ),
    ("parity", "builtin:stories", "builtin:stories@batch_size=2", "-n", "2"): ("output", "report"),
    ("parity", "builtin:stories", "-n", "2"): ("save",),
    ("audit", "trace", *STORIES): ("output", "report"),
    EXPLORE: ("output", "report"),
    ("inspect-cache", *TINY, "12", "--steps", "1"): ("output", "save_cache", "report"),
    ("report", "recorded"): ("output",),
}  # fmt: skip
SINGLE = [(words, name) for words, names in CASES.items() for name in names]
NAMES = [f"{words[0]} --{name}" for words, name in SINGLE]
SUFFIXES = {"report": ".html", "save": ".saved", "save_cache": ".cache"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the old file; the inputs are beside it."""
    monkeypatch.chdir(tmp_path)
    ok("run", *TINY, "12", "--events", "recorded")
    written = {"prompt": "Once upon a time", "completion_ids": [14, 437], "logprobs": [-1.75236e-05, -1.01009107]}
    Path("trace").write_text(json.dumps(written))
    made = tmp_path / "disk"
    made.mkdir()
    return made


def done(words: tuple[str, ...], name: str, path: Path, *more: str) -> Done:
    stdin = "12\n" if words[0] in ("chat", "parity") else None
    return genctl(*words, f"--{name.replace('_', '-')}", str(path), "--force", *more, stdin=stdin)


class Full:
    """A file on a disk that is full."""

    def __init__(self, descriptor: int) -> None:
        self.raw = os.fdopen(descriptor, "wb", buffering=0)

    def write(self, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self.raw.close()


@pytest.mark.parametrize(("words", "name"), SINGLE, ids=NAMES)
def test_the_old_file_stays_until_the_new_one_is_whole(
    words: tuple[str, ...], name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / f"file{SUFFIXES.get(name, '')}"
    path.write_bytes(OLD)

    def untouched() -> bool:
        return path.read_bytes() == OLD and list(folder.iterdir()) == [path]

    with path.open("rb") as other:  # another run is writing it
        fcntl.flock(other, fcntl.LOCK_EX)
        refused = done(words, name, path)
    assert (refused.status, refused.err.splitlines()[-1]) == (2, f"error: {path} is locked by another genctl process")
    assert untouched()
    with monkeypatch.context() as patch:
        patch.setattr(output, "unbuffered", Full)
        failed = done(words, name, path)
    assert failed.status == 2
    assert failed.err.count("error: ") == 1
    assert f"No space left on device ({path})" in failed.err
    assert untouched()
    if "-m" in words:
        assert done(words, name, path, "-m", "./no/such/model").status == 3
        path.write_bytes(OLD)
    disk = Disk(folder)
    with disk.recording():
        ended = done(words, name, path)
    assert ended.status == 0, ended.err
    assert {files.get(path.name) for files in disk.crashes} == {OLD, path.read_bytes()}
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("words", [EXPLORE, ("chat",)])
def test_a_tree_or_a_chat_is_never_replaced(words: tuple[str, ...], folder: Path) -> None:
    path = folder / "tree.jsonl"
    path.write_bytes(OLD)
    refused = genctl(*words, "--save", str(path), stdin="")
    assert (refused.status, path.read_bytes()) == (2, OLD)
    assert "exists already" in refused.err


COMMANDS = {
    "run": ("run", "-m", "builtin:numbers", "12"),
    "beam": ("beam", "-m", "builtin:numbers", "12"),
    "compare": ("compare", "--strategy", "a:", "--strategy", "b:num_beams=2", "-m", "builtin:numbers", "12"),
}


def test_force_is_for_both_files() -> None:
    for name in ("out.txt", "run.jsonl"):
        Path(name).write_text("old")
    both = ("-o", "out.txt", "--events", "run.jsonl")
    done = genctl(*COMMANDS["run"], *both, "--report", "new.html")
    assert (done.status, done.err) == (2, "error: the output exists already: out.txt\nhint: --force replaces it\n")
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
    done = ok(*COMMANDS["run"], "--events", "-", "-o", "out.txt")
    assert done.out.splitlines()[-1].startswith('{"event": "finished"')
    assert not Path("-").exists()
    os.mkfifo("pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_text()))
    reader.start()
    assert genctl(*COMMANDS["run"], "--events", "pipe").status == 0
    reader.join()
    assert read == [done.out] or read[0].count("\n") == done.out.count("\n")


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
