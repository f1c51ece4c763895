"""A person at a terminal: types lines to `genctl chat` and reads the screen."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pexpect
import pyte

from tests.warm import python

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0


class _Screen(pyte.Screen):
    """A screen that answers queries, as terminals do (such as for the cursor's position)."""

    send: Callable[[str], object]

    def write_process_input(self, data: str) -> None:
        self.send(data)


class Talk:
    """A chat at its first prompt, or another command, in a terminal of `width` columns.

    `program` is a new Python process: a warm one receives neither signals nor new window sizes.
    """

    def __init__(
        self,
        state: Path,
        *arguments: str,
        command: str = "chat",
        width: int = 80,
        height: int = 60,
        term: str = "xterm-256color",
        program: Sequence[str] = (),
        **more: str,
    ) -> None:
        ours = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
        plain = {name: value for name, value in os.environ.items() if name not in ours}
        environment = {**plain, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(state), "TERM": term}
        first, *rest = program or python()
        self.child = pexpect.spawn(
            first, [*rest, "-m", "genctl", command, *arguments], env={**environment, "HF_HUB_OFFLINE": "1", **more},
            cwd=str(state.parent), dimensions=(height, width), timeout=PATIENCE_S,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup may ignore it here
        )  # fmt: skip
        self.command, self.raw = command, b""
        self.screen = _Screen(width, height)
        self.screen.send = self.child.send
        self.stream = pyte.ByteStream(self.screen)

    def __enter__(self) -> Talk:
        return self.at_prompt() if self.command == "chat" else self

    def __exit__(self, *_: object) -> None:
        self.child.close(force=True)

    # -- typing --------------------------------------------------------------------------------------------------------

    def say(self, line: str) -> list[str]:
        """Type a line, wait for the next prompt, and return the lines between."""
        before = self.lines
        self.child.send(f"{line}\r")
        self.wait(lambda: self.lines[: len(before)] != before or len(self.lines) > len(before))
        self.at_prompt()
        return self.lines[len(before) :][:-1]

    def press(self, *keys: str) -> None:
        for each in keys:
            self.child.send(each)

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self.child.setwinsize(rows, columns)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def lines(self) -> list[str]:
        """The lines down to the last one that is not empty."""
        lines = [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def text(self) -> str:
        """The screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def until(self, shown: str) -> None:
        """Read until the screen shows a text."""
        self.wait(lambda: shown in self.text)

    def wait(self, done: Callable[[], Any]) -> None:
        """Read until something holds. Raises TimeoutError with the screen."""
        until = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > until:
                raise TimeoutError("\n".join(self.lines))
            self.read()

    def read(self) -> None:
        """Read the output so far."""
        try:
            data = self.child.read_nonblocking(65536, timeout=0.05)
        except pexpect.TIMEOUT:
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        self.raw += data
        # pyte mistakes the end of a private sequence such as CSI > 4 ; 1 m for a style
        self.stream.feed(re.sub(rb"\x1b\[[<>=?][0-9;]*[mu]", b"", data))

    def at_prompt(self) -> Talk:
        """Wait for an empty prompt."""
        self.wait(lambda: self.screen.display[self.screen.cursor.y].rstrip() == ">" and self.screen.cursor.x == 2)
        return self

    def end(self) -> int:
        """Wait for the program's end. Returns the exit status."""
        try:
            while True:
                self._take(self.child.read_nonblocking(65536, timeout=PATIENCE_S))
        except pexpect.EOF:
            pass
        self.child.close()
        status = self.child.exitstatus
        assert status is not None, self.child.signalstatus
        return int(status)
