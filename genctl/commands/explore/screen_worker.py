"""The thread in which the model runs: one command at a time, stopped at the next token; looks between its tokens.

It knows no widgets. What happens is told as values to a function, which may be called from this thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from genctl.commands.explore.screen_source import NodeLook, TreeSource
from genctl.errors import GenctlError


@dataclass(frozen=True)
class CommandBegan:
    """A command begins."""

    line: str


@dataclass(frozen=True)
class CommandDone:
    """The last command that was given is done, or one of them failed."""

    line: str
    error: str = ""
    hint: str = ""
    stopped: bool = False


@dataclass(frozen=True)
class DiffersAt:
    """Whether two models or presets would write different tokens after some nodes."""

    nodes: dict[int, bool]


class ModelThread:
    """Runs commands. `submit`, `look`, `compare`, `stop` and `close` may be called from any thread."""

    def __init__(self, source: TreeSource, tell: Callable[[object], object]) -> None:
        self.source, self.tell = source, tell
        self.running = ""  # the command
        self._lines: deque[str] = deque()
        self._wanted: int | None = None
        self._unknown: deque[int] = deque()
        self._stop = self._closing = self._idle = False
        self._turn = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a command runs or waits."""
        with self._turn:
            return bool(self.running or self._lines)

    @property
    def idle(self) -> bool:
        """Whether everything is answered."""
        with self._turn:
            return self._idle and not (self._lines or self._wanted is not None or self._unknown)

    def submit(self, lines: Sequence[str]) -> bool:
        """Run commands, one after another, up to the first that fails. False if one runs already."""
        with self._turn:
            if self.running or self._lines or self._closing:
                return False
            self._lines.extend(lines)
            self._stop = False
            self._turn.notify()
            return True

    def look(self, node: int) -> None:
        """Look at a node. Of several looks that wait, the last counts."""
        with self._turn:
            self._wanted = node
            self._turn.notify()

    def compare(self, nodes: Sequence[int]) -> None:
        """Find out after which of these nodes two models differ, while there is nothing else to do."""
        with self._turn:
            self._unknown = deque(nodes)
            self._turn.notify()

    def stop(self) -> None:
        """Stop what runs at the next token."""
        with self._turn:
            self._stop = True
        self.source.pause()

    def close(self, seconds: float | None = None) -> bool:
        """Stop, and wait for the thread to end. False if it did not in time."""
        with self._turn:
            self._stop = self._closing = True
            self._lines.clear()
            self._turn.notify()
        self.source.pause()
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._turn:
                while not (self._closing or self._lines or self._wanted is not None or self._unknown):
                    self._idle = True
                    self._turn.wait()
                self._idle = False
                if self._closing:
                    return
                line = self._lines.popleft() if self._lines else ""
                self.running = line
            if line:
                self._run(line)
            elif not self._answer_look():
                self._compare_some()

    def _run(self, line: str) -> None:
        self.tell(CommandBegan(line))
        done = CommandDone(line)
        try:
            for result in self.source.do(line):
                self.tell(result)
                self._answer_look()
                if self._stop:  # it may have come before the command began
                    self.source.pause()
        except GenctlError as error:
            done = CommandDone(line, error.message, error.hint)
        except MemoryError:
            done = CommandDone(line, "not enough memory", "shorter branches or a smaller --memory need less")
        except Exception as error:
            done = CommandDone(line, f"unexpected {type(error).__name__}: {error}", "this is a bug")
        with self._turn:
            if done.error or self._stop:
                self._lines.clear()
            last = not self._lines
            self.running = ""
            stopped = self._stop
        if last:
            self.tell(CommandDone(line, done.error, done.hint, stopped))

    def _answer_look(self) -> bool:
        with self._turn:
            node, self._wanted = self._wanted, None
        if node is None:
            return False
        try:
            look = self.source.look(node)
        except GenctlError as error:
            look = NodeLook(node, -1, error=error.message)
        except Exception as error:
            look = NodeLook(node, -1, error=f"unexpected {type(error).__name__}: {error}")
        self.tell(look)
        return True

    def _compare_some(self) -> None:
        found: dict[int, bool] = {}
        while True:
            with self._turn:
                urgent = self._closing or self._lines or self._wanted is not None
                node = None if urgent or not self._unknown else self._unknown.popleft()
            if node is None:
                break
            try:
                found[node] = self.source.differs(node)
            except GenctlError:
                found[node] = False
            if len(found) == 16:
                self.tell(DiffersAt(found))
                found = {}
        if found:
            self.tell(DiffersAt(found))
