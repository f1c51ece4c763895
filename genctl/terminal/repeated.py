"""Equal errors of many rows: the first is a line, and the others are a number at the end."""

from __future__ import annotations

import re
from collections.abc import Callable

_PLACE = re.compile(r",? ?\b(line|record|argument) \d+(?=:)")  # where in the input: no difference between two errors


class RepeatedErrors:
    """Prints an error once. Errors with the same message are counted, and `close` prints how many there were."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._more: dict[str, int] = {}

    def is_new(self, message: str) -> bool:
        """Whether this is the first error with its message, apart from its place in the input. Counts the others."""
        key = _PLACE.sub("", message).removeprefix(": ")
        self._more[key] = self._more.get(key, -1) + 1
        return self._more[key] == 0

    def close(self) -> None:
        """Say how many more there were of each message. A second call says nothing."""
        several = len(self._more) > 1
        for message, more in self._more.items():
            if more:
                self._say(f"error: {more:,} more like it" + (f": {message}" if several else ""))
        self._more.clear()
