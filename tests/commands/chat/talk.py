"""A person at a terminal: types lines to `genctl chat` and reads the screen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pyte

from tests.warm import python

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0


class _Screen(pyte.Screen):
    """A screen that answers questions, as terminals do (where is the cursor?)."""

    send: Callable[[str], object]

    def write_process_input(self, data: str) -> None:
        self.send(data)


class Talk:
    """A chat, or another command, in a terminal of `width` columns."""

    def __init__(
        self,
        state: Path,
        *arguments: str,
        command: str = "chat",
        width: int = 80,
        height: int = 60,
        term: str = "xterm-256color",
        **more: str,
    ) -> None:
        ours = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
        plain = {name: value for name, value in os.environ.items() if name not in ours}
        environment = {**plain, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(state), "TERM": term, **more}
        program, *rest = python()
        self.child = pexpect.spawn(
            program, [*rest, "-m", "genctl", command, *arguments],
            env=environment, cwd=str(state.parent), dimensions=(height, width), timeout=PATIENCE_S,
        )  # fmt: skip
        self.raw = b""
        self.screen = _Screen(width, height)
        self.screen.send = self.child.send
        self.stream = pyte.ByteStream(self.screen)

    def __enter__(self) -> Talk:
        return self

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

    def press(self, keys: str) -> None:
        self.child.send(keys)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def lines(self) -> list[str]:
        """The lines down to the last one that has something on it."""
        lines = [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def wait(self, done: Callable[[], Any]) -> None:
        """Read until something holds. Raises TimeoutError with the screen."""
        until = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > until:
                raise TimeoutError("\n".join(self.lines))
            self.read()

    def read(self) -> None:
        """Take in what was written meanwhile."""
        try:
            data = self.child.read_nonblocking(65536, timeout=0.05)
        except pexpect.TIMEOUT:
            return
        self.raw += data
        self.stream.feed(data)

    def at_prompt(self) -> Talk:
        """Wait for an empty prompt."""
        self.wait(lambda: self.screen.display[self.screen.cursor.y].rstrip() == ">" and self.screen.cursor.x == 2)
        return self

    def end(self) -> int:
        """Wait for the end; the exit status."""
        try:
            while True:
                data = self.child.read_nonblocking(65536, timeout=PATIENCE_S)
                self.raw += data
                self.stream.feed(data)
        except pexpect.EOF:
            pass
        self.child.close()
        status = self.child.exitstatus
        assert status is not None, self.child.signalstatus
        return int(status)
