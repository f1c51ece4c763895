"""The thread in which the model of `genctl explore` runs: one command after another, and looks between two tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

from genctl.errors import GenctlError
from genctl.tree.commands import COMMANDS
from genctl.tree.distribution import Distribution
from genctl.tree.explorer import Explorer
from genctl.tree.results import Result
from genctl.tree.token_tree import At


class Started(NamedTuple):
    """A command begins."""

    line: str


class LineDone(NamedTuple):
    """A command is done, or failed with an error."""

    line: str
    error: str


class Looked(NamedTuple):
    """What may follow the node that is looked at, or why that is not known."""

    node: int
    distribution: Distribution | None
    error: str = ""


Arrival: TypeAlias = Started | Result | LineDone | Looked


class ModelThread:
    """Does the commands of a tree. `arrived` is called in its thread when there is something for `arrivals`."""

    def __init__(self, explorer: Explorer, arrived: Callable[[], object]) -> None:
        self.explorer, self._arrived = explorer, arrived
        self.waiting: deque[str] = deque()  # commands, the one that runs first
        self.inbox: deque[Arrival] = deque()
        self.stopping = False
        self.executor = ThreadPoolExecutor(1, "model")
        self._look: int | None = None  # a node that is looked at

    def run(self, line: str, at: At | None = None) -> bool:
        """Do a command next; with `at`, from there. False while another one writes."""
        if any(kind_of(each) in ("write", "fork") for each in self.waiting):
            return False
        self.waiting.append(line)
        self.stopping = False
        self.executor.submit(self._do, line, at)
        return True

    def look(self, node: int) -> None:
        """Report the distribution after a node, at the next token if something runs. Replaces a look that waits."""
        self._look = node
        self.executor.submit(self._answer_look)

    def stop(self) -> None:
        """Stop what runs at its next token."""
        self.stopping = True
        self.explorer.pause()

    def shutdown(self) -> None:
        """Stop, and wait for the end of the thread."""
        self.stop()
        self.executor.shutdown(cancel_futures=True)

    def arrivals(self) -> Iterator[Arrival]:
        """What has arrived and is not taken in yet."""
        while self.inbox:
            yield self.inbox.popleft()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _do(self, line: str, at: At | None) -> None:
        self._post(Started(line))
        error = ""
        try:
            if at is not None:
                self.explorer.move(at.cursor, at.tip)
            for result in self.explorer.do(line):
                self._post(result)
                self._answer_look()
                if self.stopping:  # it may have come before the command began
                    self.explorer.pause()
        except Exception as failed:
            error = in_words(failed)
        self._post(LineDone(line, error))

    def _answer_look(self) -> None:
        node, self._look = self._look, None
        if node is None or node >= len(self.explorer.tree.nodes):
            return
        try:
            found = self.explorer.distribution(node)
            _ = found.rank(0), found.entropy, found.effects  # here, and not where keys are answered
            self._post(Looked(node, found))
        except Exception as failed:
            self._post(Looked(node, None, in_words(failed)))

    def _post(self, arrival: Arrival) -> None:
        is_first = not self.inbox
        self.inbox.append(arrival)
        if is_first:
            self._arrived()


def in_words(failed: Exception) -> str:
    """What failed, for the status line."""
    if isinstance(failed, GenctlError):
        return f"{failed.message}{f' ({failed.hint})' if failed.hint else ''}"
    return f"unexpected {type(failed).__name__}: {failed} (this is a bug)"


def kind_of(line: str) -> str:
    """The kind of a command, as its row has it."""
    name = line.split()[0]
    return COMMANDS[name].kind if name in COMMANDS else ""
