"""The full screen in a real pseudo-terminal: drawn, resized, left, ended by signals, without colours, refused."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pyte
import pytest

from genctl.tree.saved import read_tree
from tests.warm import python

ROOT = Path(__file__).parents[3]
SECONDS = 120  # on a busy machine
LEFT = b"\x1b[?1049l"  # the alternate screen is left
COLOURS = re.compile(rb"\x1b\[[0-9;]*[34]8;[25];")


class Terminal:
    """A command in a terminal. `program` may be a warm Python, to which neither signals nor new sizes come."""

    def __init__(self, words: list[str], size: tuple[int, int], program: list[str], **environment: str) -> None:
        inherited = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
        inherited |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        self.screen = pyte.Screen(*size)
        self.stream = pyte.ByteStream(self.screen)
        self.sent = b""  # everything that the command wrote
        self.child = pexpect.spawn(
            program[0],
            [*program[1:], "-m", "genctl", "explore", *words],
            dimensions=(size[1], size[0]),
            env=inherited | environment,
            timeout=SECONDS,
            echo=False,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup may ignore it here
        )

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def until(self, shown: Callable[[str], bool] | str) -> str:
        """Read until the screen shows something."""
        fits = shown if callable(shown) else lambda text: shown in text
        while not fits(self.text):
            self._read()
        return self.text

    def _read(self) -> None:
        part = self.child.read_nonblocking(1 << 14, timeout=SECONDS)
        self.sent += part
        # pyte takes the end of a private sequence such as CSI > 4 ; 1 m for a style
        self.stream.feed(re.sub(rb"\x1b\[[<>=?][0-9;]*[mu]", b"", part))

    def press(self, *keys: str) -> None:
        for key in keys:
            self.child.send(key)

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self.child.setwinsize(rows, columns)

    def end(self) -> int:
        """Read to the end. Returns the exit status."""
        try:
            while True:
                self._read()
        except pexpect.EOF:
            self.child.close()
        status = self.child.exitstatus
        assert status is not None, self.child.signalstatus
        return int(status)


@contextmanager
def terminal(
    *words: str, size: tuple[int, int] = (100, 30), program: Sequence[str] = (sys.executable,), **environment: str
) -> Iterator[Terminal]:
    opened = Terminal(list(words), size, list(program), **environment)
    try:
        yield opened
    finally:
        opened.child.close(force=True)


def test_a_walk_through_the_screen_a_resize_and_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "tree.jsonl"
    with terminal("Once upon a time", "--save", str(path), "-n", "8") as shown:
        shown.until("no tokens yet")
        assert "next token" in shown.text
        shown.press(" ")
        shown.until("generate: done")
        shown.press("\x1b[D", "\x1b[D")
        shown.until(lambda text: "▸    1" in text)
        shown.resize(60, 30)
        shown.until(lambda text: text.count("╭") == 3 and max(map(len, text.split("\n"))) <= 60 and "╮╭" not in text)
        assert "Once upon a time" in shown.text
        shown.resize(140, 30)
        shown.until(lambda text: "╮╭" in text)
        shown.press("q")
        assert shown.end() == 0
        after = shown.sent.rpartition(LEFT)[2]
        assert b"saved: genctl explore --open" in after
        assert b"\x1b[?25h" in shown.sent[-400:]  # the cursor is shown again
        assert COLOURS.search(shown.sent)
    assert len(read_tree(path)) == 8


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_restores_the_terminal(number: signal.Signals, status: int, tmp_path: Path) -> None:
    with terminal("Once upon a time", "--save", str(tmp_path / "t")) as shown:
        shown.until("no tokens yet")
        shown.press(" ")
        shown.until(" there was")
        shown.child.kill(number)
        assert shown.end() == status
        assert LEFT in shown.sent
        assert b"--open" in shown.sent.rpartition(LEFT)[2]
        assert b"Traceback" not in shown.sent
    assert len(read_tree(tmp_path / "t")) > 0


def test_a_killed_screen_keeps_what_was_written_and_opens_again(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with terminal("Once upon a time", "--seed", "5", "-n", "60", "--do-sample", "--save", str(path)) as shown:
        shown.until("no tokens yet")
        shown.press("3")
        while not path.exists() or len(path.read_bytes().split(b'"event": "tokennode"')) < 8:
            shown._read()
        shown.child.kill(signal.SIGKILL)
    cut = len(read_tree(path))
    assert cut >= 7
    with terminal("--open", str(path), program=python()) as shown:
        shown.until("tree: probability")
        shown.press("u")
        shown.until("no tokens yet")
        shown.press("q")
        assert shown.end() == 0
    assert len(read_tree(path)) == 0


def test_without_colour_nothing_has_one(tmp_path: Path) -> None:
    arguments = ("Once upon a time", "--save", str(tmp_path / "t"), "-n", "4")
    with terminal(*arguments, program=python(), NO_COLOR="1") as shown:
        shown.until("no tokens yet")
        shown.press(" ")
        shown.until(lambda text: re.search("Once upon a time,[₀-₉]", text) is not None)  # tenths, behind the tokens
        shown.until("generate: done")
        shown.press("q")
        assert shown.end() == 0
        assert not COLOURS.search(shown.sent)
        assert not re.search(rb"\x1b\[(?:[0-9]+;)*[349][0-7](?:;[0-9]+)*m", shown.sent)


def test_a_dumb_terminal_is_refused_with_what_does_the_same(tmp_path: Path) -> None:
    with terminal("Once upon a time", program=python(), TERM="dumb") as shown:
        assert shown.end() == 2
        said = " ".join(shown.sent.decode().split())
        assert "error: TERM=dumb" in said
        assert "--expand mass=0.9,depth=6" in said
        assert LEFT not in shown.sent


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
    with terminal() as shown:
        shown.child.close(force=True)
        environment = {**os.environ, "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
        code = CRASH.format(root=str(ROOT))
        shown.child = pexpect.spawn(
            sys.executable,
            ["-c", code, str(tmp_path / "t.jsonl")],
            dimensions=(30, 100),
            env=environment,
            timeout=SECONDS,
        )
        shown.until("no tokens yet")
        shown.press("u")
        assert shown.end() == 0
        after = shown.sent.rpartition(LEFT)[2].decode()
        assert "the screen failed: ZeroDivisionError: planted" in after
        assert "saved: genctl explore --open" in after
        assert "Traceback" not in after
