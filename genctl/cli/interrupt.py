"""SIGINT and SIGTERM: the first asks the loop to stop, the second ends at once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any


class Interrupt:
    """While decoding, a signal becomes a reason that the loop asks for; before that it raises SystemExit.

    Use as a context manager. `status` is what the process should exit with: 130 after SIGINT, 143 after SIGTERM.
    """

    def __init__(self) -> None:
        self.status = 0
        self.gentle = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._take)
            except ValueError:  # not the main thread: somebody else looks after signals
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> str:
        """The reason for every live row to end now, or an empty string."""
        return "interrupted" if self.status else ""

    def _take(self, number: int, frame: FrameType | None) -> None:
        again, self.status = bool(self.status), 128 + number
        if again:
            os._exit(self.status)
        if not self.gentle:
            raise SystemExit(self.status)
