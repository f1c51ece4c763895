"""Rows from a pipe: the available ones, None while there is none, and the error that ends the reading."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from genctl.commands.run.row_source import read_beside
from genctl.errors import InputError
from genctl.io.rows import BadRow, InputRow

FIRST, SECOND = InputRow("0", 0, "one"), BadRow("1", 1, "line 2", "input", "line 2: not JSON")
PATIENCE = 10.0  # seconds


def until_there(rows: Iterator[InputRow | BadRow | None]) -> InputRow | BadRow | None:
    """The next row, by polling."""
    pause = threading.Event()
    for _ in range(1000):
        row = next(rows)
        if row is not None:
            return row
        pause.wait(PATIENCE / 1000)
    return None


def test_a_slow_row_is_not_waited_for() -> None:
    come = threading.Event()

    def slow() -> Iterator[InputRow | BadRow]:
        yield FIRST
        come.wait(PATIENCE)
        yield SECOND

    rows = read_beside(slow())
    assert until_there(rows) == FIRST
    assert [next(rows) for _ in range(3)] == [None] * 3
    come.set()
    assert until_there(rows) == SECOND
    with pytest.raises(StopIteration):
        until_there(rows)
    assert list(rows) == []


def test_an_error_of_reading_is_raised_after_the_rows_before_it() -> None:
    def broken() -> Iterator[InputRow | BadRow]:
        yield FIRST
        raise InputError("the input cannot be read")

    rows = read_beside(broken())
    assert until_there(rows) == FIRST
    with pytest.raises(InputError, match="the input cannot be read"):
        until_there(rows)
