"""The program as a process: closed pipes, libraries that print, and what a terminal shows before the text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyte
import pytest

from genctl.terminal import loading_line
from tests.tiny import checkpoint
from tests.warm import python

GENCTL = ["-m", "genctl"]
Terminal = Callable[..., Any]


@contextmanager
def fed_slowly(*options: str, folder: Path, env: dict[str, str]) -> Iterator[Callable[[str, str], dict[str, Any]]]:
    """A run that receives one row at a time: id and prompt -> its record. The pipe stays open."""
    command = [sys.executable, *GENCTL, "run", "-m", "builtin:stories", "--input-format", "jsonl", "--format", "jsonl"]
    process = subprocess.Popen(
        [*command, "-n", "4", *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, cwd=folder,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Timer(60, process.kill)  # it is waiting for more rows
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
    """They used to wait until there were `--batch-size` of them, an undecodable one until another was decoded."""
    with fed_slowly(*options.split(), folder=tmp_path, env=environment) as feed:
        for number, prompt in enumerate(("One day", TOO_LONG, TOO_LONG, "The old fox")):
            record = feed(f"row {number}", prompt)
            assert (record["id"], "error" in record) == (f"row {number}", prompt == TOO_LONG)


@pytest.mark.parametrize("size", ["8", "1"])
def test_strict_ends_at_a_row_of_a_slow_pipe_that_fails(size: str, tmp_path: Path, environment: dict[str, str]) -> None:
    """It used to wait for the next row, and with a batch also for the rows to be decoded."""
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


def test_a_real_terminal_shows_text_as_it_streams(terminal: Terminal) -> None:
    child = terminal(*GENCTL, "run", "Once upon a time", "--seed", "7", program=[sys.executable], encoding="utf-8")
    child.expect("there was")
    child.expect("tok/s")
    child.read()
    child.close()
    assert child.exitstatus == 0


def test_lines_about_a_run_fit_the_terminal_and_take_the_bar_away(terminal: Terminal) -> None:
    words = ("run", "-m", "builtin:numbers", "12", "1207", "-v", "--seed", "1234567890123456789")
    screen = pyte.Screen(60, 40)
    pyte.ByteStream(screen).feed(terminal(*GENCTL, *words, size=(40, 60), env={"COLUMNS": "60"}).read())
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert lines[0] == "note: runtime: native (t5)"  # where the bar was
    place = next(place for place, line in enumerate(lines) if line.startswith("2 prompts · "))
    assert len(lines) > place + 1
    assert re.search(r"\d+ prompt tokens", " ".join(lines[place:]))
    assert not any(line.startswith("·") or line.endswith("·") for line in lines[place:])  # not cut within an item


def test_piped_output_has_no_escape_codes(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*python(), *GENCTL, "run", "-m", "builtin:numbers", "7", "--scores", "--format", "text"],
        capture_output=True, env={**environment, "TERM": "xterm-256color"}, cwd=tmp_path, stdin=subprocess.DEVNULL,
        check=True,
    )  # fmt: skip
    assert done.stdout == b"seven\n"
    assert b"\x1b" not in done.stderr


# a library that prints while the model is loaded, in each possible way
LOUD = (
    "import logging, warnings; from genctl.commands import job; load = job.Job.load_engine\n"
    "def loud(*given, **named):\n"
    "    logging.getLogger('transformers.models.any').warning('a fast path is missing')\n"
    "    logging.getLogger('another.library').error('a kernel is missing')\n"
    "    warnings.warn('something will change')\n"
    "    return load(*given, **named)\n"
    "job.Job.load_engine = loud\n"
    "from genctl.__main__ import main; main()\n"
)


@pytest.mark.parametrize("command", [("run",), ("compare", "-p", "greedy", "-p", "beam5")])
def test_no_library_speaks_but_with_verbose(
    tmp_path: Path, environment: dict[str, str], command: tuple[str, ...]
) -> None:
    def err_of(*more: str) -> bytes:
        words = [*python(), "-c", LOUD, *command, "-m", "builtin:numbers", "12", *more]
        return subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, check=True, timeout=120).stderr

    assert err_of() == b""
    loud = err_of("-v")
    assert all(words in loud for words in (b"a fast path is missing", b"a kernel is missing", b"something will change"))


def test_a_model_without_its_fast_kernels_runs_in_silence(tmp_path: Path, environment: dict[str, str]) -> None:
    words = ("run", "-m", str(checkpoint("mamba", tmp_path / "mamba")), "-n", "3", "the cat")
    done = subprocess.run(
        [sys.executable, *GENCTL, *words], env=environment, cwd=tmp_path, capture_output=True, check=True, timeout=120
    )
    assert done.stderr == b""


RUN = ["run", "-m", "builtin:numbers", "12"]
LOADING = "loading builtin:numbers…".encode()


def screen_of(written: bytes, width: int = 80, height: int = 24) -> list[str]:
    screen = pyte.Screen(width, height)
    pyte.ByteStream(screen).feed(written)
    return [line.rstrip() for line in screen.display if line.strip()]


def test_it_is_there_before_torch_and_gone_at_the_end(terminal: Terminal) -> None:
    code = (  # prints when the import that loads torch begins
        "import builtins, os, sys; from genctl.__main__ import main; imported = builtins.__import__\n"
        "def heard(name, *rest, **named):\n"
        "    if name == 'genctl.engines.session' and name not in sys.modules and 'torch' not in sys.modules:\n"
        "        os.write(2, b'<torch>')\n"
        "    return imported(name, *rest, **named)\n"
        "builtins.__import__ = heard; main()\n"
    )
    written = terminal("-c", code, *RUN, program=[sys.executable]).read()
    assert 0 <= written.find(LOADING) < written.find(b"<torch>")
    lines = screen_of(written.replace(b"<torch>", b""))
    assert lines[:2] == ["12", "twelve"]
    assert re.search(r"loaded in \d+\.\d s, first token after \d+\.\d\d s", " ".join(lines[1:]))
    assert not any("loading" in line for line in lines)


@pytest.mark.parametrize("more", [("-q",), ("--dry",), ("--help",)])
def test_there_is_none_where_it_would_disturb(terminal: Terminal, more: tuple[str, ...]) -> None:
    assert LOADING not in terminal("-m", "genctl", *RUN, *more).read()


@pytest.mark.parametrize("more", [(), ("--inputs",)])
def test_it_is_gone_before_a_live_region_begins(terminal: Terminal, more: tuple[str, ...]) -> None:
    written = terminal("-m", "genctl", "inspect-cache", "Once", "--steps", "3", *more, size=(60, 80)).read()
    assert "reading 2 tokens…".encode() in written
    lines = screen_of(written, height=60)
    assert lines[0].startswith("── builtin:stories · Once · ")
    assert not any("reading" in line for line in lines)


def test_an_error_takes_its_place(terminal: Terminal) -> None:
    assert screen_of(terminal("-m", "genctl", "run", "-m", "./nowhere", "x").read())[0].startswith("error: ")


def test_a_name_that_cannot_be_printed_is_left_out() -> None:
    assert loading_line._model(["run", "-m", "a\x1b[2J"]) == ""
    assert loading_line._model(["run", "--model=gpt2", "x"]) == "gpt2"
    assert loading_line._model(["run", "x"]) == ""


def frames(child: Any, width: int) -> list[str]:
    """The first line of the screen after each piece of output, each once."""
    screen, seen = pyte.Screen(width, 24), [""]
    stream = pyte.ByteStream(screen)
    for piece in child.read().split(b"\r"):
        stream.feed(piece)
        if screen.display[0].rstrip() != seen[-1]:
            seen.append(screen.display[0].rstrip())
        stream.feed(b"\r")
    return seen


SLOW = (  # delays the run before the prompt is read
    "import time; from genctl.engines.session import Session; load = Session.load\n"
    "from genctl.models.libraries import without_panic_reports\n"  # descriptor 2 is a file meanwhile
    "def slow_load(*rest, **named):\n"
    "    with without_panic_reports(): time.sleep(1.2)\n"
    "    return load(*rest, **named)\n"
    "Session.load = slow_load\n"
    "from genctl.__main__ import main; main()\n"
)


@pytest.mark.parametrize("width", [60, 140])
def test_the_seconds_count_while_the_checkpoint_is_loaded(width: int, terminal: Terminal) -> None:
    seen = frames(terminal("-c", SLOW, "run", "One day a fox", "-n", "3", size=(24, width)), width)
    assert any(re.fullmatch(r"loading… [1-9]\d* s", line) for line in seen)
    assert any(re.fullmatch(r"reading \d tokens…( \d+ s)?", line) for line in seen)
    assert seen[-1].startswith("One day a fox")
    assert "·" not in seen[-1]
