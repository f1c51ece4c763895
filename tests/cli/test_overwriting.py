"""Every command that may replace a file: the old one stays until the new one is whole, whatever goes wrong."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from genctl.commands.app import COMMANDS
from genctl.io import output
from tests.cli.tool import Done, genctl
from tests.io.disk import Disk

OLD = b"the old file, which is worth something\n"
TINY = ("-m", "builtin:numbers")
STORIES = ("-m", "builtin:stories")
EXPLORE = ("explore", *STORIES, "Hi", "--expand", "mass=0.5,depth=1")
# a command with arguments that are done in a moment -> the options that name a file which --force replaces
CASES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("run", *TINY, "12"): ("output", "events", "report"),
    ("beam", *TINY, "12"): ("output", "events", "report"),
    ("chat", *TINY, "-n", "2", "--format", "jsonl"): ("output", "save"),
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
    done = genctl("run", *TINY, "12", "--events", "recorded")
    assert done.status == 0, done.err
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


@pytest.mark.parametrize("empty", ["", "\n"])
def test_no_input_leaves_the_old_chat(empty: str, folder: Path) -> None:
    path = folder / "chat.jsonl"
    path.write_bytes(OLD)
    genctl("chat", *TINY, "--save", str(path), "--force", stdin=empty)
    assert path.read_bytes() == OLD
    assert list(folder.iterdir()) == [path]


def test_a_tree_is_never_replaced(folder: Path) -> None:
    path = folder / "tree.jsonl"
    path.write_bytes(OLD)
    refused = genctl(*EXPLORE, "--save", str(path))
    assert (refused.status, path.read_bytes()) == (2, OLD)
    assert "exists already" in refused.err


WRITTEN = {"output", "events", "trace", "report", "save", "save_cache"}


def tables() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the table of its options."""
    for name, (where, _) in COMMANDS.items():
        module, _, variable = where.partition(":")
        target = getattr(import_module(module), variable)
        if not isinstance(target, typer.Typer):
            yield (name,), target.options


def test_every_file_that_force_replaces_is_tried_above() -> None:
    tried = {((words[0],), name) for words, name in SINGLE}
    for words, table in tables():
        options = {field.name: field.metadata for field in dataclasses.fields(table)}
        if "help" not in options.get("force", {}):
            continue
        names = {name for name, row in options.items() if "help" in row and row.get("metavar") == "FILE"}
        wanted = {name for name in names & WRITTEN if (words, name) != (("explore",), "save")}
        assert wanted == {name for which, name in tried if which == words}, words
