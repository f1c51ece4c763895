"""A sign of life: on a terminal at once, in a pipe never."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pexpect
import pyte
import pytest

from genctl.terminal import loading_line
from tests.warm import python

ROOT = Path(__file__).parents[2]
RUN = ["run", "-m", "builtin:numbers", "12"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return {**plain, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path), "TERM": "xterm-256color"}


def test_it_is_there_before_torch_and_gone_at_the_end(tmp_path: Path, environment: dict[str, str]) -> None:
    code = (  # says when the import of what brings torch begins
        "import builtins, os, sys; from genctl.__main__ import main; imported = builtins.__import__\n"
        "def heard(name, *rest, **named):\n"
        "    if name == 'genctl.engines.session' and name not in sys.modules and 'torch' not in sys.modules:\n"
        "        os.write(2, b'<torch>')\n"
        "    return imported(name, *rest, **named)\n"
        "builtins.__import__ = heard; main()\n"
    )
    child = pexpect.spawn(
        sys.executable, ["-c", code, *RUN], env=environment, cwd=str(tmp_path), dimensions=(24, 80), timeout=90
    )
    written = child.read()
    assert 0 <= written.find("loading builtin:numbers…".encode()) < written.find(b"<torch>")
    screen = pyte.Screen(80, 24)
    pyte.ByteStream(screen).feed(written.replace(b"<torch>", b""))
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert lines[:2] == ["12", "twelve"]
    assert re.search(r"loaded in \d+\.\d s, first token after \d+\.\d\d s", " ".join(lines[1:]))
    assert not any("loading" in line for line in lines)


@pytest.mark.parametrize("more", [("-q",), ("--dry",), ("--help",)])
def test_there_is_none_where_it_would_disturb(
    tmp_path: Path, environment: dict[str, str], more: tuple[str, ...]
) -> None:
    program, *rest = python()
    child = pexpect.spawn(program, [*rest, "-m", "genctl", *RUN, *more], env=environment, cwd=str(tmp_path), timeout=90)
    assert "loading builtin:numbers…".encode() not in child.read()


def test_there_is_none_in_a_pipe(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*python(), "-m", "genctl", *RUN], env=environment, cwd=tmp_path, capture_output=True, check=True
    )
    assert (done.stdout, done.stderr) == (b"twelve\n", b"")


@pytest.mark.parametrize(
    "words", [("inspect-cache", "Once", "--steps", "3"), ("inspect-cache", "Once", "--steps", "3", "--inputs")]
)
def test_it_is_gone_before_a_live_region_begins(
    tmp_path: Path, environment: dict[str, str], words: tuple[str, ...]
) -> None:
    program, *rest = python()
    child = pexpect.spawn(
        program, [*rest, "-m", "genctl", *words],
        env=environment, cwd=str(tmp_path), dimensions=(60, 80), timeout=90,
    )  # fmt: skip
    written = child.read()
    assert "reading 2 tokens…".encode() in written
    screen = pyte.Screen(80, 60)
    pyte.ByteStream(screen).feed(written)
    assert screen.display[0].startswith("── builtin:stories · Once · ")
    assert not any("reading" in line for line in screen.display)


def test_an_error_takes_its_place(tmp_path: Path, environment: dict[str, str]) -> None:
    program, *rest = python()
    child = pexpect.spawn(
        program, [*rest, "-m", "genctl", "run", "-m", "./nowhere", "x"],
        env=environment, cwd=str(tmp_path), dimensions=(24, 80), timeout=90,
    )  # fmt: skip
    screen = pyte.Screen(80, 24)
    pyte.ByteStream(screen).feed(child.read())
    assert screen.display[0].startswith("error: ")


def test_a_name_that_cannot_be_printed_is_left_out() -> None:
    assert loading_line._model(["run", "-m", "a\x1b[2J"]) == ""
    assert loading_line._model(["run", "--model=gpt2", "x"]) == "gpt2"
    assert loading_line._model(["run", "x"]) == ""


def frames(child: pexpect.spawn, width: int) -> list[str]:
    """The first line of the screen after each piece of output, each once."""
    screen, seen = pyte.Screen(width, 24), [""]
    stream = pyte.ByteStream(screen)
    for piece in child.read().split(b"\r"):
        stream.feed(piece)
        if screen.display[0].rstrip() != seen[-1]:
            seen.append(screen.display[0].rstrip())
        stream.feed(b"\r")
    return seen


SLOW = (  # holds the run up before the prompt is read
    "import time; from genctl.engines.session import Session; load = Session.load\n"
    "from genctl.models.libraries import without_panic_reports\n"  # descriptor 2 is a file meanwhile
    "def slow_load(*rest, **named):\n"
    "    with without_panic_reports(): time.sleep(1.6)\n"
    "    return load(*rest, **named)\n"
    "Session.load = slow_load\n"
    "from genctl.__main__ import main; main()\n"
)


@pytest.mark.parametrize("width", [60, 140])
def test_the_seconds_count_while_the_checkpoint_is_loaded(
    width: int, tmp_path: Path, environment: dict[str, str]
) -> None:
    program, *rest = python()
    child = pexpect.spawn(
        program, [*rest, "-c", SLOW, "run", "One day a fox", "-n", "3"],
        env=environment, cwd=str(tmp_path), dimensions=(24, width), timeout=90,
    )  # fmt: skip
    seen = frames(child, width)
    assert any(re.fullmatch(r"loading… [1-9]\d* s", line) for line in seen)
    assert any(re.fullmatch(r"reading \d tokens…( \d+ s)?", line) for line in seen)
    assert seen[-1].startswith("One day a fox")
    assert "·" not in seen[-1]
