"""The rows of a run: how they share passes, and how they are taken: counted, beside decoding where they are slow."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from genctl.commands import job
from genctl.engines.protocol import Engine, JobPlan
from genctl.errors import count
from genctl.io.record_output import RecordOutput
from genctl.io.rows import BadRow, InputRow

if TYPE_CHECKING:
    from genctl.io.readers import InputScan

ROOM = 4096  # rows that are read ahead
AHEAD = 2  # times as many rows are read ahead where they are at hand, so that the longest begins first
MOMENT_S = 0.1  # that is waited for a row where there is nothing else to do
END = object()


@dataclass(frozen=True)
class Grouping:
    """How rows share passes. Where the numbers of a row depend on the rows beside it, groups are always the same."""

    width: int  # rows decoded at once
    span: int  # rows of a group, which is decoded to its end before the next begins
    threads: int | None  # that compute a step
    begun_with: int | None  # threads of the run that began the output
    invariant_by: str  # how a row gets the same numbers in any batch; "" if it does not
    shared: bool  # whether this process decides which rows are decoded together

    @classmethod
    def of(
        cls, engine: Engine, plan: JobPlan, output: RecordOutput, *, width: int, lone: bool, shared: bool
    ) -> Grouping:
        """That of a run of so many rows at once, for which the engine chooses its threads."""
        invariant_by = plan.batch_invariant_by if shared and not output.in_groups else ""
        recorded = None if invariant_by else output.threads
        threads = engine.use_threads(plan.rows * (1 if lone else width), recorded)
        span = job.SPAN * width if width > 1 and shared else 1
        return cls(width, span, threads, output.threads, invariant_by, shared)

    @property
    def numbers(self) -> dict[str, int | str]:
        """What the numbers of a row depend on, beside itself: how they are computed, or the rows of its group."""
        if self.invariant_by:
            return {"numbers": self.invariant_by}
        return {"width": self.width} if self.shared else {}

    @property
    def again(self) -> int:
        """Rows of a group, of which all are decoded again beside the first that is missing."""
        return 1 if self.invariant_by else self.span

    def ahead(self, *, at_hand: bool) -> int:
        """How many rows are read ahead: only where they are `at_hand` with --unordered, so that an interrupt leaves the
        beginning of the input, and never from a pipe or a keyboard, which would keep other rows waiting.
        """
        return AHEAD * self.width if at_hand and self.width > 1 else 0

    def changed(self, output: str | None) -> str:
        """A note if this run uses another number of threads than the run that began the output, else ""."""
        if self.invariant_by or None in (self.threads, self.begun_with) or self.threads == self.begun_with:
            return ""
        return (
            f"{output} was begun with {count(self.begun_with or 0, 'thread')}, and goes on with {self.threads}: the "
            "last digits of log-probabilities may differ from those of an uninterrupted run"
        )


def looked_over(path: str | None, format: str) -> InputScan | None:
    """What an input file has, where the number of its rows or its content is needed; None for another input."""
    if path in (None, "-"):
        return None
    from genctl.io.readers import scan

    assert path is not None
    return scan(path, format)


class RowSource:
    """The rows of the input, in their order. `taken` counts those that the run has read."""

    def __init__(self, rows: Iterator[InputRow | BadRow]) -> None:
        self._rows = rows
        self.taken = 0

    def first(self) -> InputRow | BadRow | None:
        """The first row, which is not taken yet; None if there is none."""
        row = next(self._rows, None)
        if row is not None:
            self._rows = itertools.chain([row], self._rows)
        return row

    def skip(self, output: RecordOutput) -> None:
        """Pass over the rows that need not be decoded, comparing them with what was read before."""
        if output.finished and output.compared:
            return
        until = output.done if output.finished else output.again
        while self.taken < until and (row := next(self._rows, None)) is not None:
            self.taken += 1
            output.consume(row)
        if output.finished:
            self.taken += next(self._rows, None) is not None
        if output.finished or self.taken < until:
            output.end_of_input(self.taken)

    def take(
        self, output: RecordOutput, ending: Callable[[], bool], idle: Callable[[], bool] | None = None
    ) -> Iterator[InputRow | BadRow | None]:
        """The rows, until the run is `ending`. With `idle` they are read by a thread, and None stands for one that is
        not there yet (see `RowQueue`).
        """
        rows: Iterator[InputRow | BadRow | None] = self._rows if idle is None else RowQueue(self._rows, idle)
        while not ending():
            try:
                row = next(rows)
            except StopIteration:
                return
            if row is not None and not ending():
                self.taken += 1
                output.consume(row)
            if not ending() or row is None:
                yield row


class RowQueue:
    """Rows read by a thread, so that nothing has to wait for a slow pipe.

    Iterates over rows; None where the next one is not there yet. Raises what reading raises.

    While `idle` returns true, a moment is waited for the next one.
    """

    def __init__(self, rows: Iterator[InputRow | BadRow], idle: Callable[[], bool] = lambda: False) -> None:
        self._idle = idle
        self._read: queue.Queue[object] = queue.Queue(ROOM)
        self._ended = False
        threading.Thread(target=self._fill, args=(rows,), name="rows", daemon=True).start()

    def _fill(self, rows: Iterator[InputRow | BadRow]) -> None:
        try:
            for row in rows:
                self._read.put(row)
        except BaseException as error:
            self._read.put(error)
        else:
            self._read.put(END)

    def __iter__(self) -> RowQueue:
        return self

    def __next__(self) -> InputRow | BadRow | None:
        if self._ended:
            raise StopIteration
        try:
            row = self._read.get(timeout=MOMENT_S) if self._idle() else self._read.get_nowait()
        except queue.Empty:
            return None
        if isinstance(row, (InputRow, BadRow)):
            return row
        self._ended = True
        if isinstance(row, BaseException):
            raise row
        raise StopIteration
