"""The work of a call, counted instead of timed: the lines of Python that it runs, in loops and comprehensions too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines(call: Callable[[], object]) -> int:
    """The number of lines that `call` runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def growth(make: Callable[[int], Callable[[], object]], size: int) -> float:
    """How many times the work grows when an input doubles. `make` gives the call for an input of a size."""
    make(2 * size)()  # one-time work, cached afterwards, does not count
    small = lines(make(size))
    return lines(make(2 * size)) / small
