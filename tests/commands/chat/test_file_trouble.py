"""A chat's file on a full disk, or beside other programs: it is complete, or not there."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genctl.commands.chat.log import ChatLog
from genctl.errors import OutputError, UsageError
from genctl.io import output, sessions, sink
from genctl.io.output import open_beside
from tests.cli.tool import genctl
from tests.commands.chat.test_log import contents, log, seen, turn
from tests.commands.chat.test_saved import chat
from tests.engines.server.stand_in import Failure, running

OLD = b"the old file\n"
ROOT = Path(__file__).parents[3]


class Disk:
    """A disk with room for `room` bytes. A write that does not fit writes as much as fits, as the system does."""

    def __init__(self, patch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        disk, unbuffered = self, output.unbuffered

        class Raw:
            def __init__(self, descriptor: int) -> None:
                self.raw: Any = unbuffered(descriptor)

            def write(self, data: memoryview) -> int:
                if disk.room <= 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                part = data[: disk.room]
                disk.room -= len(part)
                return int(self.raw.write(part))

            def close(self) -> None:
                self.raw.close()

        for module in (output, sessions):
            patch.setattr(module, "unbuffered", Raw)


def talk(one: ChatLog) -> None:
    turn(one, "Hello", "Hi")
    turn(one, "More", "No")


@pytest.mark.parametrize("how", ["new", "open"])
def test_a_full_disk_loses_nothing_that_was_said(how: str, tmp_path: Path) -> None:
    one = log(tmp_path / "whole")
    talk(one)
    one.close()
    for room in range(0, (tmp_path / "whole").stat().st_size, 17):
        folder = tmp_path / f"{how}{room}"
        folder.mkdir()
        path, before = folder / "chat.jsonl", list[str]()
        if how == "open":
            one = log(path)
            turn(one, "Hello", "Hi")
            one.close()
            before = contents(one)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, room)
            one = ChatLog.open(path) if how == "open" else log(path)
            try:
                talk(one)
                one.close()
            except OutputError:
                one.close(sync=False)
        if not path.exists():
            assert how == "new"
            assert list(folder.iterdir()) == []
        else:
            again = ChatLog.look(path)
            assert contents(again)[: len(before)] == before
            assert seen(again) == seen(one), "the chat that went on is the one in the file"


def test_there_may_be_room_again_for_the_next_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.jsonl"
    disk = Disk(monkeypatch, 10_000)
    one = log(path)
    turn(one, "Hello", "Hi")
    for room in (0, 60, 100):
        disk.room = room
        with pytest.raises(OutputError):
            turn(one, "More", "No")
        assert contents(one)[:2] == ["Hello", "Hi"]
    disk.room = 10_000
    turn(one, "Again", "Yes")
    one.close()
    again = ChatLog.look(path)
    assert seen(again) == seen(one)
    assert contents(again)[:2] + contents(again)[-2:] == ["Hello", "Hi", "Again", "Yes"]


@pytest.mark.parametrize("room", [0, 100, 900])
def test_a_full_disk_is_one_error(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    path = folder / "file.jsonl"
    with monkeypatch.context() as patch:
        Disk(patch, room)
        done = chat("--save", str(path), "-n", "30", turns=("One day", "More", "More"))
    assert done.status == 2
    assert done.err.count("error: ") == 1
    assert f"No space left on device ({path})" in done.err
    if room < 900:
        assert list(folder.iterdir()) == []
        return
    done = chat("--open", str(path), "-n", "30", turns=("More",))
    assert done.status == 0, done.err


# -- other programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["removed", "replaced"])
def test_a_file_that_is_taken_away_is_reported_and_can_be_saved_elsewhere(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, elsewhere = tmp_path / "chat.jsonl", tmp_path / "elsewhere.jsonl"
    for at_once in (True, False):
        one = log(path)
        turn(one, "Hello", "Hi")
        path.unlink()
        if what == "replaced":
            path.write_bytes(OLD)
        if at_once:
            with pytest.raises(OutputError, match=f"was {what} by another program"):
                one.close()
        else:
            monkeypatch.setattr(sink, "LOOK_S", 0.0)
            with pytest.raises(OutputError, match=f"was {what} by another program"):
                turn(one, "More", "No")
            one.save(elsewhere)
            turn(one, "Again", "Yes")
            one.close()
            assert contents(ChatLog.look(elsewhere)) == ["Hello", "Hi", "Again", "Yes"]
        assert (path.read_bytes() if path.exists() else b"") == (OLD if what == "replaced" else b"")
        path.unlink(missing_ok=True)


def test_two_chats_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    one = log(path)
    turn(one, "Hello", "Hi")
    for attempt in (lambda: ChatLog.open(path), lambda: open_beside(path, force=True)):
        with pytest.raises(UsageError, match=str(path)):
            attempt()
    with pytest.raises(OutputError, match="exists already"):
        open_beside(path)
    one.close()
    ChatLog.open(path).close()
    assert list(tmp_path.iterdir()) == [path]


def test_of_two_new_chats_of_one_name_the_first_has_it(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    one, other = log(path), log(path)
    beside = open_beside(path)
    other.new_file = lambda words: beside
    turn(one, "Hello", "Hi")
    with pytest.raises(OutputError, match="was made by another program"):
        turn(other, "Bye", "No")
    one.close()
    other.close()
    assert contents(ChatLog.look(path)) == ["Hello", "Hi"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_copy_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`/save`: if the copy does not fit, the chat continues in its own file."""
    path = tmp_path / "chat.jsonl"
    disk = Disk(monkeypatch, 10_000)
    one = log(path)
    turn(one, "Hello", "Hi")
    disk.room = 50
    with pytest.raises(OutputError, match="No space left"):
        one.save(tmp_path / "copy")
    assert list(tmp_path.iterdir()) == [path]
    disk.room = 10_000
    turn(one, "More", "No")
    one.save(tmp_path / "copy")
    with pytest.raises(OutputError, match="exists already"):
        one.save(tmp_path / "copy")
    one.close()
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_or_a_folder_that_may_not_be_written_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    chat("--save", str(path), "-n", "2", turns=("Hello",))
    path.chmod(0o400)
    assert "ermission denied" in chat("--open", str(path), turns=("More",)).err
    tmp_path.chmod(0o500)
    done = chat("--save", str(tmp_path / "new.jsonl"), turns=("Hello",))
    tmp_path.chmod(0o700)
    assert (done.status, done.err.count("error: ")) == (2, 1)


# -- signals ---------------------------------------------------------------------------------------------------------


def event(word: str) -> bytes:
    """An event of a streaming server with one word."""
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": word}}]}).encode() + b"\n\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_in_the_middle_of_an_answer_loses_no_turn(number: signal.Signals, tmp_path: Path) -> None:
    """The answer so far is saved, except by SIGKILL."""
    path = tmp_path / "chat.jsonl"

    def endless(write: Callable[[bytes], object]) -> None:
        write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        write(event(" one") + event(" two"))
        sent.touch()
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)

    sent = tmp_path / "sent"
    with running(fault=lambda server, body: Failure(raw=endless) if body.get("stream") else None) as server:
        command = [sys.executable, "-m", "genctl", "chat", "--backend", server.url, "--save", str(path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path)}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
            cwd=tmp_path,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(b"Hello\n")
        process.stdin.flush()
        until = time.monotonic() + 60
        while not sent.exists() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.5)  # until the client has read the words
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), err
        server.fault = lambda stand_in, body: None
        done = genctl("chat", "--backend", server.url, "--open", str(path), stdin="More\n")
    assert done.status == 0, done.err
    everything = " one two three four five six"
    first = everything if number == signal.SIGKILL else " one two"
    assert contents(ChatLog.look(path)) == ["Hello", first, "More", everything]
