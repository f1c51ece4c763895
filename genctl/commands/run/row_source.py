"""The rows of a run: counted as they are taken, and read beside decoding where they come slowly."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator

from genctl.io.record_output import RecordOutput
from genctl.io.rows import BadRow, InputRow

ROOM = 4096  # rows that are read ahead
MOMENT_S = 0.1  # that is waited for a row where there is nothing else to do
END = object()


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
