"""The full screen in a real pseudo-terminal: drawn, resized, closed, ended by signals, without colours, refused."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pexpect
import pytest

from tests.commands.chat.talk import ROOT, Talk
from tests.tree.trees import read_tree

NEW = (sys.executable,)
LEFT = b"\x1b[?1049l"  # the alternate screen is left
COLOURS = re.compile(rb"\x1b\[[0-9;]*[34]8;[25];")


def explore(folder: Path, *words: str, program: Sequence[str] = (), **environment: str) -> Talk:
    return Talk(folder / "state", *words, command="explore", width=100, height=30, program=program, **environment)


def test_a_walk_through_the_screen_a_resize_and_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "tree.jsonl"
    with explore(tmp_path, "Once upon a time", "--save", str(path), "-n", "8", program=NEW) as shown:
        shown.until("no tokens yet")
        assert "next token" in shown.text
        shown.press(" ")
        shown.until("generate: done")
        shown.press("\x1b[D", "\x1b[D")
        shown.wait(lambda: "▸    1" in shown.text)
        shown.resize(60, 30)
        shown.wait(lambda: shown.text.count("╭") == 3 and "╮╭" not in shown.text and len(shown.screen.display[0]) == 60)
        assert "Once upon a time" in shown.text
        shown.resize(140, 30)
        shown.wait(lambda: "╮╭" in shown.text)
        shown.press("q")
        assert shown.end() == 0
        after = shown.raw.rpartition(LEFT)[2]
        assert b"saved: genctl explore --open" in after
        assert b"\x1b[?25h" in shown.raw[-400:]  # the cursor is shown again
        assert COLOURS.search(shown.raw)
    assert len(read_tree(path)) == 8


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_restores_the_terminal(number: signal.Signals, status: int, tmp_path: Path) -> None:
    with explore(tmp_path, "Once upon a time", "--save", str(tmp_path / "t"), program=NEW) as shown:
        shown.until("no tokens yet")
        shown.press(" ")
        shown.until(" there was")
        shown.child.kill(number)
        assert shown.end() == status
        assert LEFT in shown.raw
        assert b"--open" in shown.raw.rpartition(LEFT)[2]
        assert b"Traceback" not in shown.raw
    assert len(read_tree(tmp_path / "t")) > 0


def test_a_killed_screen_keeps_what_was_written_and_opens_again(tmp_path: Path) -> None:
    path = tmp_path / "t"
    begin = ("Once upon a time", "--seed", "5", "-n", "60", "--do-sample", "--save", str(path))
    with explore(tmp_path, *begin, program=NEW) as shown:
        shown.until("no tokens yet")
        shown.press("3")
        while not path.exists() or len(path.read_bytes().split(b'"event": "tokennode"')) < 8:
            shown.read()
        shown.child.kill(signal.SIGKILL)
    cut = len(read_tree(path))
    assert cut >= 7
    with explore(tmp_path, "--open", str(path)) as shown:
        shown.until("tree: probability")
        shown.press("u")
        shown.until("no tokens yet")
        shown.press("q")
        assert shown.end() == 0
    assert len(read_tree(path)) == 0


def test_without_colour_nothing_has_one(tmp_path: Path) -> None:
    arguments = ("Once upon a time", "--save", str(tmp_path / "t"), "-n", "4")
    with explore(tmp_path, *arguments, NO_COLOR="1") as shown:
        shown.until("no tokens yet")
        shown.press(" ")
        shown.wait(lambda: re.search("Once upon a time,[₀-₉]", shown.text))  # tenths, after the tokens
        shown.until("generate: done")
        shown.press("q")
        assert shown.end() == 0
        assert not COLOURS.search(shown.raw)
        assert not re.search(rb"\x1b\[(?:[0-9]+;)*[349][0-7](?:;[0-9]+)*m", shown.raw)


def test_a_dumb_terminal_is_refused_with_what_does_the_same(tmp_path: Path) -> None:
    with explore(tmp_path, "Once upon a time", TERM="dumb") as shown:
        assert shown.end() == 2
        said = " ".join(shown.raw.decode().split())
        assert "error: TERM=dumb" in said
        assert "--expand mass=0.9,depth=6" in said
        assert LEFT not in shown.raw


CRASH = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from genctl.commands.explore import screen
from genctl.commands.app import _explained
from tests.tree.trees import explorer
def fail(self, *command):
    raise ZeroDivisionError("planted")
screen.ExploreApp.action_run = fail
try:
    screen.run_screen(explorer(Path(sys.argv[1])))
except Exception as error:
    print(_explained(error)[0])
"""


def test_a_failure_of_the_screen_restores_the_terminal_and_shows_no_traceback(tmp_path: Path) -> None:
    with explore(tmp_path) as shown:
        shown.child.close(force=True)
        environment = {**os.environ, "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
        code = CRASH.format(root=str(ROOT))
        shown.child = pexpect.spawn(
            sys.executable, ["-c", code, str(tmp_path / "t.jsonl")], dimensions=(30, 100), env=environment
        )
        shown.until("no tokens yet")
        shown.press("u")
        assert shown.end() == 0
        after = shown.raw.rpartition(LEFT)[2].decode()
        assert "the screen failed: ZeroDivisionError: planted" in after
        assert "saved: genctl explore --open" in after
        assert "Traceback" not in after
