"""Files, devices and standard output: never half a record, never the old file lost."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from genctl.commands.recording import PageFile
from genctl.errors import OutputError, UsageError
from genctl.io.output import reopen
from genctl.io.resumable import Journal
from genctl.io.sink import Sink
from genctl.io.writers import open_output


def write_all(sink: Sink, lines: Sequence[str]) -> None:
    for line in lines:
        sink.write(line.encode())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_a_file_is_made_and_never_overwritten_without_force(path: Path) -> None:
    old = os.umask(0o027)
    try:
        sink = open_output(path, io.BytesIO())
    finally:
        os.umask(old)
    sink.write(b"one\n")
    assert path.read_bytes() == b"one\n"
    sink.close()
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(OutputError, match=r"^the output exists already: .*out\.jsonl$") as caught:
        open_output(path, io.BytesIO())
    assert caught.value.hint == "--force replaces it"
    assert path.read_bytes() == b"one\n"


def test_force_replaces_only_at_close(path: Path) -> None:
    path.write_bytes(b"old\n")
    path.chmod(0o600)
    sink = open_output(path, io.BytesIO(), force=True)
    sink.write(b"new\n")
    assert path.read_bytes() == b"old\n"
    sink.close()
    sink.close()
    assert path.read_bytes() == b"new\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_links_are_refused_or_replaced_never_followed(path: Path) -> None:
    victim = path.with_name("victim")
    for content in (b"precious", None):  # a link to a file, and one to nothing
        victim.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        if content is not None:
            victim.write_bytes(content)
        path.symlink_to(victim)
        with pytest.raises(OutputError, match="exists already"):
            open_output(path, io.BytesIO())
        sink = open_output(path, io.BytesIO(), force=True)
        sink.write(b"new\n")
        sink.close()
        assert not path.is_symlink()
        assert path.read_bytes() == b"new\n"
        assert (victim.read_bytes() if victim.exists() else None) == content


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("folder", "it is a folder"),
        ("missing/out", "there is no folder .*missing"),
        ("file/out", "Not a directory"),
        ("a\0b", "embedded null byte"),
        ("n" * 300, "File name too long"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_file_that_cannot_be_made_is_one_line(tmp_path: Path, name: str, wanted: str, force: bool) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=f"^the output could not be written: {wanted}") as caught:
        open_output(f"{tmp_path}/{name}", io.BytesIO(), force=force)
    assert caught.value.message.isprintable()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder of the Linux kernel")
def test_a_folder_that_takes_no_files_is_not_called_missing() -> None:
    with pytest.raises(OutputError, match=r"^the output .*: no file can be made in /proc \(/proc/out.jsonl\)$"):
        open_output("/proc/out.jsonl", io.BytesIO())


def test_a_file_that_is_made_at_once_and_does_not_fit_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of --report: an empty part of it stayed, and an old file was named that never was."""

    class Page(PageFile):
        def content(self) -> bytes:
            return b"<html>"

    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("genctl.io.output.unbuffered", lambda number: Tearing(os.fdopen(number, "wb", 0), 0, full))
    with pytest.raises(OutputError, match="No space left on device") as caught, Page(str(path), force=False):
        pass
    assert caught.value.hint == ""
    assert list(path.parent.iterdir()) == []


def test_a_long_name_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250)
    path.touch()
    sink = open_output(path, None, force=True)
    sink.write(b"x\n")
    sink.close()
    assert path.read_bytes() == b"x\n"


def test_devices_are_written_to_and_not_replaced() -> None:
    for force in (False, True):
        sink = open_output("/dev/null", io.BytesIO(), force=force)
        sink.write(b"x\n")
        sink.close()
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("force", [False, True])
def test_the_name_of_standard_output_is_standard_output(path: Path, force: bool) -> None:
    with path.open("wb") as stdout:
        stdout.write(b"before\n")
        sink = open_output(f"/dev/fd/{stdout.fileno()}", stdout, force=force)
        sink.write(b"one\n")
        sink.close()
    assert path.read_bytes() == b"before\none\n"


def test_a_file_behind_another_open_stream_is_appended_to(path: Path) -> None:
    with path.open("wb", buffering=0) as other:
        other.write(b"before\n")
        sink = open_output(f"/dev/fd/{other.fileno()}", io.BytesIO(), force=True)
        sink.write(b"one\n")
        sink.close()
    assert path.read_bytes() == b"before\none\n"


@pytest.mark.parametrize("path_name", [None, "-"])
def test_standard_output_is_left_open(path_name: str | None) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), "ascii")
    stdout.write("before ")
    sink = open_output(path_name, stdout)
    sink.write("é\n".encode())
    sink.close()
    assert not stdout.buffer.closed
    assert stdout.buffer.getvalue() == b"before \xc3\xa9\n"
    with pytest.raises(OutputError, match="standard output is closed"):
        open_output(path_name, None)


class Tearing:
    """The real file, until the disk is full in the middle of record `fatal`."""

    def __init__(self, raw: Any, fatal: int, error: BaseException) -> None:
        self.raw, self.left, self.error = raw, fatal, error

    def write(self, data: memoryview, /) -> int:
        self.left -= 1
        if self.left == -1:
            return int(self.raw.write(data[:3]))
        if self.left == -2:
            raise self.error
        return int(self.raw.write(data))

    def close(self) -> None:
        self.raw.close()


def torn(path: Path, fatal: int, error: BaseException, force: bool) -> Sink:
    sink = open_output(path, io.BytesIO(), force=force)
    sink._raw = Tearing(sink._raw, fatal, error)
    return sink


@pytest.mark.parametrize("fatal", [0, 1, 2])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("finish", [Sink.close, Sink.abandon])
def test_a_full_disk_leaves_whole_records_and_the_old_file(
    path: Path, fatal: int, force: bool, finish: Callable[[Sink], None]
) -> None:
    if force:
        path.write_bytes(b"old\n")
    sink = torn(path, fatal, OSError(errno.ENOSPC, "No space left on device"), force)
    with pytest.raises(OutputError, match=r"No space left on device \(.*out.jsonl\)$") as caught:
        write_all(sink, [f"record {number}\n" for number in range(4)])
    finish(sink)
    whole = b"".join(f"record {number}\n".encode() for number in range(fatal))
    found = {file: file.read_bytes() for file in path.parent.iterdir()}
    if force:
        assert found.pop(path) == b"old\n"
        assert [str(part) in caught.value.hint for part in found] == [True] * bool(fatal)
    assert ("is as it was" in caught.value.hint) == force
    assert list(found.values()) == ([whole] if fatal else [])


@pytest.mark.parametrize("force", [False, True])
def test_a_signal_in_the_middle_of_a_record_leaves_it_whole_once(path: Path, force: bool) -> None:
    if force:
        path.write_bytes(b"old\n")
    sink = torn(path, 1, KeyboardInterrupt(), force)
    sink.write(b"record 0\n")
    with pytest.raises(KeyboardInterrupt):
        sink.write(b"record 1\n")
    sink.close()
    assert path.read_bytes() == b"record 0\nrecord 1\n"


def test_an_abandoned_file_goes_only_if_it_is_empty_and_ours(path: Path) -> None:
    open_output(path, None).abandon()
    assert not path.exists()
    sink = open_output(path, None)
    path.unlink()
    path.write_bytes(b"")  # somebody else's
    sink.abandon()
    assert path.exists()


def test_a_folder_that_vanished_is_an_output_error_at_close() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inner" / "out"
        path.parent.mkdir()
        path.write_bytes(b"old\n")
        sink = open_output(path, None, force=True)
        for file in path.parent.iterdir():
            file.unlink()
        path.parent.rmdir()
        with pytest.raises(OutputError, match="No such file or directory"):
            sink.close()


def test_two_runs_never_write_one_path(path: Path) -> None:
    """Whoever comes second is refused, with or without --force; the file of the first is whole."""
    first = open_output(path, None)
    for force in (False, True):
        with pytest.raises((OutputError, UsageError)):
            open_output(path, None, force=force)
    with pytest.raises(UsageError, match=r"out\.jsonl is locked by another genctl process$"):
        reopen(path, 0)
    first.write(b"first\n")
    first.close()
    second = open_output(path, None, force=True)  # replaces it at the end, and holds it until then
    for attempt in (lambda: open_output(path, None, force=True), lambda: reopen(path, 0)):
        with pytest.raises(UsageError, match="is locked by another genctl process"):
            attempt()
    second.write(b"second\n")
    second.close()
    assert path.read_bytes() == b"second\n"
    open_output(path, None, force=True).abandon()
    assert list(path.parent.iterdir()) == [path]


def test_a_run_with_a_journal_is_respected_before_it_has_an_output(path: Path) -> None:
    journal = Journal(path)
    for force in (False, True):
        for attempt in (path, journal.path):
            with pytest.raises((UsageError, OutputError)) as caught:
                open_output(attempt, None, force=force)
            assert force is False or "is locked by another genctl process" in caught.value.message
    journal.close()
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("what", ["removed", "replaced", "changed"])
@pytest.mark.parametrize("end", ["close", "write", "sync"])
def test_a_file_that_another_program_takes_away_ends_the_run(
    path: Path, what: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genctl.io.sink.LOOK_S", 0.0)
    sink = open_output(path, None)
    sink.write(b"ours\n")
    if what == "changed":
        path.write_bytes(b"theirs, which is longer\n")
    else:
        path.unlink()
    if what == "replaced":
        path.write_bytes(b"theirs, which is longer\n")
    for _ in range(2):
        with pytest.raises(OutputError, match=f"{what} by another program while this run was writing it"):
            sink.write(b"more\n") if end == "write" else getattr(sink, end)()
        if end == "close":
            break
    sink.abandon()
    left = path.read_bytes() if path.exists() else b""
    assert left == (b"" if what == "removed" else b"theirs, which is longer\n")


@pytest.mark.parametrize("before", [None, b"old\n"])
def test_a_file_that_came_while_another_was_made_is_not_overwritten(path: Path, before: bytes | None) -> None:
    if before is not None:
        path.write_bytes(before)
    sink = open_output(path, None, force=before is not None, at_once=True)
    sink.write(b"ours\n")
    path.unlink(missing_ok=True)
    path.write_bytes(b"theirs\n")
    with pytest.raises(OutputError, match="by another program during this run") as caught:
        sink.close()
    assert path.read_bytes() == b"theirs\n"
    part = next(file for file in path.parent.iterdir() if file != path)
    assert part.read_bytes() == b"ours\n"
    assert str(part) in caught.value.hint
