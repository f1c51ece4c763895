"""Signals in every phase: finished results are written, the terminal is restored, and the process ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect
import pytest

from genctl.process import stays_ignored
from genctl.terminal.interrupt import Interrupt
from tests.cli.tool import ROOT

GENCTL = ["-m", "genctl"]
STUCK = ["-m", "tests.cli.stuck"]
PATIENCE = 40  # seconds; a stuck pass takes 60
MAIN = "from genctl.__main__ import main; main()"
Start = Callable[..., Any]


def heard() -> None:
    """A shell makes background jobs ignore Ctrl-C, these tests included; child processes inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Start:
    @contextmanager
    def started(*words: str, stdin: int = subprocess.DEVNULL, before: Callable[[], None] = heard) -> Iterator[Any]:
        process = subprocess.Popen(
            [sys.executable, *words], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
            cwd=tmp_path, preexec_fn=before,
        )  # fmt: skip
        with process:
            try:
                yield process
            finally:
                process.kill()

    return started


def until(process: Any, word: bytes) -> None:
    assert any(word in line for line in process.stderr), f"it ended without saying {word!r}"


def ended(process: Any, word: bytes, number: int = signal.SIGINT) -> tuple[int, bytes, bytes]:
    """Status, output and errors of a process that gets a signal once it has printed `word`."""
    until(process, word)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_model_that_does_not_come_back_costs_no_row(
    tmp_path: Path, start: Start, number: signal.Signals, status: int
) -> None:
    rows = tmp_path / "rows.jsonl"
    given = [{"id": name, "prompt": name, "params": {"max_new_tokens": 2 if name == "b" else 30}} for name in "abc"]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in given))
    options = ["-i", str(rows), "--format", "jsonl", "--batch-size", "2", "--seed", "1"]
    with start(*STUCK, "9", "run", *options) as process:
        found, out, err = ended(process, b"stuck", number)
    assert found == status, err
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["id"] for record in records] == ["a", "b", "c"]
    assert [record["finish_reason"] for record in records] == ["interrupted", "length", "interrupted"]
    assert records[0]["text"]
    assert records[0]["usage"]["new_tokens"] == len(records[0]["token_ids"]) > records[2]["usage"]["new_tokens"] > 0
    assert records[0]["usage"]["prompt_tokens"] > 0
    assert err.count(b"interrupted\n") == (status == 130)
    assert b"Traceback" not in err


def test_with_resume_running_rows_are_left_to_the_next_run(
    tmp_path: Path, start: Start, environment: dict[str, str]
) -> None:
    rows, out, whole = tmp_path / "rows.txt", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    rows.write_text("".join(f"number {number}\n" for number in range(7)))
    settings = ["-i", str(rows), "--batch-size", "2", "--seed", "1", "--do-sample", "-n", "12"]
    with start(*STUCK, "30", "run", *settings, "-o", str(out), "--resume") as process:
        status, _, err = ended(process, b"stuck")
    assert status == 130, err
    assert b"rerun the same command to continue" in err
    assert b"interrupted" not in out.read_bytes()
    for extra in (["-o", str(out), "--resume"], ["-o", str(whole)]):
        subprocess.run([sys.executable, *GENCTL, "run", *settings, *extra], env=environment, cwd=tmp_path, check=True)
    assert out.read_bytes() == whole.read_bytes()


def test_a_signal_while_it_is_loading_leaves_no_file(tmp_path: Path, start: Start) -> None:
    code = (
        "import sys, time; from genctl.models import hub;"
        "hub.load = lambda *a, **k: (print('loading', file=sys.stderr, flush=True), time.sleep(60));"
    )
    for more in ([], ["--resume"]):
        with start("-c", code + MAIN, "run", "x", "-o", str(tmp_path / "out.jsonl"), *more) as process:
            assert ended(process, b"loading") == (130, b"", b"interrupted\n")
        assert list(tmp_path.iterdir()) == []


def test_a_signal_where_nothing_can_be_raised_prints_no_traceback(start: Start) -> None:
    """Python drops exceptions of a handler that runs in a finaliser; importing a module has such moments."""
    code = (
        "import sys, time; from genctl.models import hub\n"
        "class Last:\n"
        "    def __del__(self): print('loading', file=sys.stderr, flush=True); time.sleep(0.5)\n"
        "hub.load = lambda *a, **k: (Last() is None, time.sleep(60))\n"
    )
    with start("-c", code + MAIN, "run", "x") as process:
        assert ended(process, b"loading", signal.SIGTERM) == (143, b"", b"")


def test_the_second_signal_ends_at_once(start: Start) -> None:
    """Handling the first one takes a minute."""
    code = (
        "import sys, time; from genctl.events.results import Collector;"
        "Collector.unfinished = lambda *a, **k: (print('saving', file=sys.stderr, flush=True), time.sleep(60));"
        "sys.argv[1:1] = ['3']; from tests.cli.stuck import main; main()"
    )
    with start("-c", code, "run", "x", "--format", "jsonl") as process:
        until(process, b"stuck")
        process.send_signal(signal.SIGINT)
        assert ended(process, b"saving")[:2] == (130, b"")


def test_a_reader_that_does_not_read_on_keeps_nobody_waiting(tmp_path: Path, start: Start) -> None:
    """The pipe is full and the program is writing to it when the signal comes."""
    rows = tmp_path / "rows.txt"
    rows.write_text("7\n" * 3000)
    words = ("run", "-m", "builtin:numbers", "-i", str(rows), "--format", "jsonl", "--scores", "-n", "2")
    with start(*GENCTL, *words) as process:
        process.stdout.read(1)
        os.set_blocking(process.stdout.fileno(), False)
        before = -1
        while (size := available(process.stdout.fileno())) != before or size < 60_000:
            before = size
            with pytest.raises(subprocess.TimeoutExpired):  # it does not end by itself
                process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 143


def available(descriptor: int) -> int:
    """The number of bytes waiting in a pipe."""
    import array
    import fcntl
    import termios

    found = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, found)
    return found[0]


def test_a_stopped_process_gives_the_cursor_back_and_goes_on(tmp_path: Path, environment: dict[str, str]) -> None:
    """Ctrl-Z and fg in a shell: without one, a process does not stop."""
    environment = {**environment, "TERM": "xterm-256color", "PS1": "$ ", "BASH_SILENCE_DEPRECATION_WARNING": "1"}
    shell = pexpect.spawn(
        "bash", ["--norc", "--noprofile", "-i"],
        env=environment, cwd=str(tmp_path), dimensions=(24, 80), timeout=PATIENCE, encoding="utf-8",
    )  # fmt: skip
    shell.sendline(
        f"'{sys.executable}' -m genctl run Once Upon The --do-sample --batch-size 3 --seed 1; echo st''atus $?"
    )
    shell.expect("prompt 2 · Upon")  # all three are drawn
    shell.sendcontrol("z")
    shell.expect("Stopped")
    before = shell.before
    assert "\x1b[?25l" not in before.rpartition("\x1b[?25h")[2]
    shell.sendline("fg; echo st''atus $?")
    shell.expect("seed 1")
    shell.expect("status 0")
    shell.sendline("exit")
    shell.expect(pexpect.EOF)
    shell.close()


def test_an_interrupt_on_a_terminal_leaves_the_text_and_the_cursor(terminal: Start) -> None:
    words = ("25", "run", "Once", "Upon", "--do-sample", "--batch-size", "2", "--seed", "1")
    child = terminal(*STUCK, *words, program=[sys.executable], encoding="utf-8")
    child.expect("stuck")
    child.kill(signal.SIGINT)
    assert "2 not finished" in (shown := child.read())
    child.close()
    assert child.exitstatus == 130
    assert "\x1b[?25h" in shown
    assert "\x1b[?25l" not in shown.rpartition("\x1b[?25h")[2]


# the handler is installed: before, Python's own would end the process with a traceback
BEGUN = (
    "import sys, time; from genctl import __main__ as program;"
    "handle = program._handle;"
    "program._handle = lambda one: (handle(one), print('begun', file=sys.stderr, flush=True));"
)


@pytest.mark.parametrize("command", ["run", "beam", "compare", "score", "inspect-cache", "report", "presets"])
def test_every_command_says_that_it_was_interrupted(tmp_path: Path, start: Start, command: str) -> None:
    """Each waits for standard input, which stays empty; `presets` for its own import."""
    report = ["-", "-o", str(tmp_path / "page.html")]
    lists = {"compare": ["-p", "greedy", "-p", "beam5"], "report": report, "presets": ["list"]}
    code = BEGUN
    if command == "presets":
        code += "from genctl.commands import app; app.Root.invoke = lambda *a: time.sleep(60);"
    with start("-c", code + MAIN, command, *lists.get(command, []), stdin=subprocess.PIPE) as process:
        until(process, b"begun")  # importing or already waiting: the message is the same
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130  # before its input ends
        assert process.stderr.read() == b"interrupted\n"


def test_a_signal_while_torch_is_imported_ends_the_run_with_its_status() -> None:
    """An exception in Python code that torch's C++ code calls would abort the process (134)."""
    code = (
        "import os, signal, sys, types\n"
        "from genctl.terminal.interrupt import Interrupt\n"
        "here = compile('import os, signal; os.kill(os.getpid(), signal.SIGTERM)', '/x/torch/distributed.py', 'exec')\n"
        "loader = compile('exec(here)', '<frozen importlib._bootstrap>', 'exec')\n"
        "with Interrupt():\n"
        "    try:\n"
        "        exec(loader)\n"
        "    except BaseException:\n"
        "        os._exit(134)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False, timeout=60)
    assert done.returncode == 143, done.stderr


def test_a_library_that_raises_a_status_of_its_own_does_not_change_ours() -> None:
    """Ray turns the SystemExit of a handler into SystemExit(1)."""

    def in_a_library() -> None:
        with Interrupt():
            try:
                signal.raise_signal(signal.SIGTERM)
            except SystemExit:
                raise SystemExit(1) from None

    with pytest.raises(SystemExit) as ended:
        in_a_library()
    assert ended.value.code == 128 + signal.SIGTERM


def test_a_signal_at_any_line_of_the_first_imports_ends_with_its_status(environment: dict[str, str]) -> None:
    """One during the import of `loading_line`, whose line the handler erases, used to end with a traceback, and 1."""
    code = (
        "import os, signal, sys\n"
        "from genctl import __main__ as program\n"
        "handle, last = program._handle, 0\n"
        "def begun(one):\n"
        "    handle(one)\n"
        "    sys.settrace(lambda frame, kind, more: line if frame.f_code.co_name == '<module>' else None)\n"
        "def line(frame, kind, more):\n"
        "    global last\n"
        "    last -= kind == 'line' and 'genctl' in frame.f_code.co_filename\n"
        "    if last < 0:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return line\n"
        "program._handle, sys.argv[1:] = begun, ['presets', 'list']\n"
        "ends = set()\n"
        "for number in range(0, 150, 2):\n"
        "    last, child = number, os.fork()\n"
        "    if not child:\n"
        "        program.main()\n"
        "    ends.add(os.waitpid(child, 0)[1])\n"
        "print({os.waitstatus_to_exitcode(end) for end in ends})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, check=False, preexec_fn=heard
    )
    assert done.stdout == b"{130}\n", done.stderr
    assert set(done.stderr.splitlines()) == {b"interrupted"}


@pytest.mark.parametrize("moment", [b"begun", b"stuck"], ids=["importing", "decoding"])
def test_a_background_job_without_a_terminal_is_not_interrupted(start: Start, moment: bytes) -> None:
    """A script's `genctl run … &`: Ctrl-C is for the foreground job. SIGINT used to end it with 130, or with -2."""
    code = BEGUN + MAIN
    if moment == b"stuck":  # the model returns in time
        code = "import sys; from tests.cli import stuck; stuck.SECONDS = 0.3; sys.argv[1:1] = ['1']; stuck.main()"
    ignored = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    with start("-c", code, "run", "x", "-n", "2", before=ignored) as process:
        status, out, err = ended(process, moment)
    assert (status, err.replace(b"begun\n", b"")) == (0, b"")  # it is printed again at the end
    assert out


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGTERM"])
@pytest.mark.parametrize("terminal", [True, False])
def test_what_stays_ignored(name: str, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    number = getattr(signal, name)
    monkeypatch.setattr(os, "isatty", lambda descriptor: terminal and descriptor == 0)
    before = signal.getsignal(number)
    try:
        signal.signal(number, signal.SIG_DFL)
        assert not stays_ignored(number)
        signal.signal(number, signal.SIG_IGN)
        assert stays_ignored(number) == (not terminal or name != "SIGINT")
        with Interrupt():
            heeded = signal.getsignal(number) is not signal.SIG_IGN
        assert heeded == (name == "SIGTERM" or (name == "SIGINT" and terminal))
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
