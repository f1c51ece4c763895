"""Rows from a pipe, read by a thread, so that nothing has to wait for a slow one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from genctl.io.rows import BadRow, InputRow

ROOM = 4096  # rows that are read ahead
MOMENT_S = 0.1  # that is waited for a row where there is nothing else to do
END = object()


class RowQueue:
    """Iterates over rows; None where the next one is not there yet. Raises what reading raises.

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
