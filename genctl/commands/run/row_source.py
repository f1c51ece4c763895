"""The input rows of a run: counted as they are read, and read in a thread if they arrive slowly."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from genctl.commands.job import Row
from genctl.io.record_output import RecordOutput

ROOM = 4096  # rows that are read ahead
MOMENT_S = 0.1  # wait for a row if there is nothing else to do


class RowSource:
    """The rows of the input, in order. `taken` counts those that the run has read."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows = rows
        self.taken = 0

    def skip(self, output: RecordOutput) -> None:
        """Skip the rows that need not be decoded, comparing them with the input of the earlier run."""
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
    ) -> Iterator[Row | None]:
        """The rows, until the run is `ending`. With `idle` they are read by a thread, and None stands for a row that
        has not arrived yet (see `read_beside`).
        """
        rows: Iterator[Row | None] = self._rows if idle is None else read_beside(self._rows, idle)
        while not ending():
            try:
                row = next(rows)
            except StopIteration:
                return
            if row is None:
                yield None
            elif not ending():
                self.taken += 1
                output.consume(row)
                yield row


def read_beside(rows: Iterator[Row], idle: Callable[[], bool] = lambda: False) -> Iterator[Row | None]:
    """Rows read by a thread, so that nothing has to wait for a slow pipe; None if the next one has not arrived yet.

    While `idle` returns true, wait `MOMENT_S` for the next one first. Exceptions of the reader are raised here.
    """
    read: queue.Queue[Row | BaseException | None] = queue.Queue(ROOM)

    def fill() -> None:
        try:
            for row in rows:
                read.put(row)
            read.put(None)
        except BaseException as error:
            read.put(error)

    threading.Thread(target=fill, name="rows", daemon=True).start()
    while True:
        try:
            row = read.get(timeout=MOMENT_S) if idle() else read.get_nowait()
        except queue.Empty:
            yield None
            continue
        if row is None:
            return
        if isinstance(row, BaseException):
            raise row
        yield row
