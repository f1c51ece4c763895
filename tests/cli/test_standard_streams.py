"""Standard streams that the caller closed, or that are full: results fail with a message, diagnostics silently."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genctl.commands.job import Job
from tests.cli.tool import genctl
from tests.warm import python

BAD = "error: the output could not be written: Bad file descriptor (stdout)\n"
FULL = "error: the output could not be written: No space left on device (stdout)\n"
SHORT = 'run "One day" -n 3'


def shell(command: str, environment: dict[str, str], cwd: Path, *, fresh: bool = False) -> tuple[int, str, str]:
    """Status, output and errors of `genctl COMMAND` in a shell, which may redirect and pipe; `fresh`: a new Python."""
    program = shlex.join([sys.executable] if fresh else python())
    done = subprocess.run(
        ["bash", "-c", f"{program} -m genctl {command}; exit ${{PIPESTATUS[0]}}"],
        env=environment, cwd=cwd, capture_output=True, stdin=subprocess.DEVNULL, check=False, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize("command", ["--version", "--help", "presets list", "run x --dry", SHORT])
def test_a_closed_standard_output_is_an_error_in_words(
    command: str, environment: dict[str, str], tmp_path: Path
) -> None:
    assert shell(f"{command} >&-", environment, tmp_path, fresh=True) == (2, "", BAD)


@pytest.mark.parametrize("command", ["--help", "presets list"])
def test_a_full_disk_behind_standard_output_is_told_as_such(
    command: str, environment: dict[str, str], tmp_path: Path
) -> None:
    assert shell(f"{command} >/dev/full", environment, tmp_path) == (2, "", FULL)


@pytest.mark.parametrize("closed", ["2>&-", "<&-", "2>/dev/full", "<&- 2>&-"])
def test_what_is_not_needed_is_not_missed(closed: str, environment: dict[str, str], tmp_path: Path) -> None:
    assert shell(f"{SHORT} --scores {closed} | cat", environment, tmp_path)[:2] == (0, ", a curious\n")


def test_what_is_closed_or_full_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    assert shell("run x -m ./missing 2>&-", environment, tmp_path) == (3, "", "")
    assert shell(f"{SHORT} >&- 2>&-", environment, tmp_path) == (2, "", "")
    status, out, err = shell("run -i - <&-", environment, tmp_path)
    assert (status, out) == (2, "")
    assert err == "error: cannot read standard input: it is closed\n"
    status, _, err = shell(f"{SHORT} --events /dev/full", environment, tmp_path)
    assert (status, err) == (2, "error: the output could not be written: No space left on device (/dev/full)\n")


def test_a_file_does_not_become_a_stream_that_was_closed(environment: dict[str, str], tmp_path: Path) -> None:
    """The first file that is opened gets the lowest free descriptor: 0, 1 or 2, if they are closed."""
    command = f"{SHORT} --scores -v -o out.txt --events events.jsonl <&- >&- 2>&-"
    assert shell(command, environment, tmp_path, fresh=True) == (0, "", "")
    assert (tmp_path / "out.txt").read_text() == ", a curious\n"
    assert all(line.startswith('{"event":') for line in (tmp_path / "events.jsonl").read_text().splitlines())


@pytest.mark.parametrize("command", ["--version", "run --help", "presets list"])
def test_a_reader_that_leaves_is_no_error(command: str, environment: dict[str, str], tmp_path: Path) -> None:
    assert shell(f"{command} | true", environment, tmp_path) == (0, "", "")


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_the_program_from_its_first_line_on(
    name: str, status: int, environment: dict[str, str], tmp_path: Path
) -> None:
    """The slowest import is that of the command line itself; SIGHUP used to have no handler before that."""
    code = (
        "import builtins, sys, time; from genctl.__main__ import main; imported = builtins.__import__\n"
        "def slow(name, *rest):\n"
        "    if name == 'genctl.commands.app':\n"
        "        print('importing', flush=True); time.sleep(60)\n"
        "    return imported(name, *rest)\n"
        "builtins.__import__ = slow; main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", "x", "-o", "out.txt"],
        env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(getattr(signal, name), signal.SIG_DFL),  # a shell or nohup may ignore it
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        started = time.monotonic()
        process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (status, b"", b"interrupted\n" if status == 130 else b"")
    assert time.monotonic() - started < 10
    assert list(tmp_path.iterdir()) == []


def test_a_signal_after_the_last_line_changes_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    """The interpreter takes a while to shut down; a signal then used to kill a process that had done its work."""
    code = (
        "import atexit, os, signal; from genctl.__main__ import main\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM)); main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], env=environment, cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0
    assert b"Usage" in done.stdout


def test_a_hangup_writes_what_there_is_and_nohup_is_heeded(environment: dict[str, str], tmp_path: Path) -> None:
    for handler, expected in ((signal.SIG_DFL, 129), (signal.SIG_IGN, 0)):
        process = subprocess.Popen(
            [sys.executable, "-m", "genctl", "run", "--format", "jsonl", "--batch-size", "1", "-n", "4"],
            env=environment, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda handler=handler: signal.signal(signal.SIGHUP, handler),  # type: ignore[misc]
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"One day\n")
        process.stdin.flush()
        first = process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        rest, err = process.communicate(b"One day\n" * 40, timeout=60)
        assert process.returncode == expected, err
        assert first.startswith(b"{")
        assert expected or rest.count(b"\n") == 40


ROWS = '{"prompt": 3}\n{"prompt": "12"}\n'
COMMANDS = {
    "run": ("run", "-m", "builtin:numbers"),
    "beam": ("beam", "-m", "builtin:numbers"),
    "chat": ("chat", "-m", "builtin:stories", "-n", "2"),
    "compare": ("compare", "-m", "builtin:numbers", "--strategy", "a:", "--strategy", "b:num_beams=2"),
    "score": ("score", "-m", "builtin:stories"),
    "inspect-cache": ("inspect-cache", "-m", "builtin:numbers", "--steps", "1"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_status_is_that_of_the_signal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes while the last results are written."""
    words = (*COMMANDS[name], "--input-format", "jsonl")
    assert genctl(*words, stdin=ROWS).status == 1, "a row fails"
    before = Job.outputs
    for number in (130, 143):

        def outputs(job: Any, number: int = number) -> AbstractContextManager[ExitStack]:
            job.messages.close = lambda: setattr(job.interrupt, "status", number)  # the last thing before the status
            return before(job)

        monkeypatch.setattr(Job, "outputs", outputs)
        assert genctl(*words, stdin=ROWS).status == number


@pytest.mark.parametrize(("status", "failed"), [(0, True), (130, False)])
def test_an_engine_that_is_interrupted_has_not_failed(status: int, failed: bool) -> None:
    """Ray's logs are kept after a failure, and not after a signal."""
    told: dict[str, bool] = {}
    loaded = SimpleNamespace(close=lambda **how: told.update(how))
    job: Any = SimpleNamespace(loaded=loaded, interrupt=SimpleNamespace(status=status))
    Job.close_engine(job, failed=True)
    assert told == {"hurried": bool(status), "failed": failed}
