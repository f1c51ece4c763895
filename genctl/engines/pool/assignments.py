"""Groups of rows that workers have, and the workers as the driver knows them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WorkGroup:
    """Rows that are worked on together: what a worker is given, and its rows in the input."""

    work: Any
    rows: int
    first: int
    last: int


@dataclass(frozen=True)
class GroupResult:
    """A group with its result, or with why there is none."""

    group: WorkGroup
    value: Any
    worker: int
    lost: str = ""


@dataclass
class Assignment:
    """A group that a worker has."""

    number: int
    group: WorkGroup
    alone: bool
    deaths: int = 0  # of workers that had it
    why: str = ""  # its worker died, if that is known


@dataclass(eq=False)
class WorkerHandle:
    """A worker, as the driver knows it."""

    number: int  # from 1
    actor: Any
    node: str = ""
    ready: bool = False  # it has loaded the checkpoint, and did not die since
    gone: bool = False  # it died and cannot be started again
    assignments: dict[Any, Assignment] = field(default_factory=dict)  # by the reference of their result
    suspects: deque[Assignment] = field(default_factory=deque)  # it died with them
    groups: int = 0
    rows: int = 0
    tokens: int = 0
    process: int = 0
    reported: int = 0  # tokens of that process
    current: tuple[int, int] = (-1, 0)  # its group, and the rows of it that are done
    deaths: int = 0  # groups that Ray gave up
    asked: float = 0.0  # when it was asked for a report

    def count(self, process: int, tokens: int) -> None:
        """Take in the tokens of a process since it began. Older numbers may come late."""
        if process != self.process:
            self.process, self.reported = process, 0
        self.tokens += max(tokens - self.reported, 0)
        self.reported = max(tokens, self.reported)

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"worker {self.number}" + (f" on {self.node}" if self.node else "")
