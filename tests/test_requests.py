"""Groups of requests: where they end, and that nothing is read before its group is due."""

from __future__ import annotations

from collections.abc import Iterator

from genctl.config.layers import resolve
from genctl.engines.protocol import Request, Skipped, grouped

BASE = resolve([])


def request(index: int) -> Request:
    return Request(str(index), BASE, 0, prompt="a", index=index)


def indexes(groups: Iterator[Iterator[Request]]) -> list[list[int]]:
    return [[each.index for each in group] for group in groups]


def test_a_row_has_the_same_neighbours_wherever_a_run_begins() -> None:
    rows = [request(index) for index in range(10)]
    assert indexes(grouped(rows, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert indexes(grouped(rows[6:], 4)) == [[6, 7], [8, 9]]


def test_a_row_without_a_request_has_a_place_in_its_group() -> None:
    rows = [Skipped(index) if index in (0, 3, 4, 5, 6, 7) else request(index) for index in range(10)]
    assert indexes(grouped(rows, 4)) == [[1, 2], [], [8, 9]]


def test_rows_that_are_not_there_yet_are_passed_over() -> None:
    assert indexes(grouped([None, request(0), None, request(1), None, request(2)], 2)) == [[0, 1], [2]]


def test_no_row_of_the_next_group_is_read_before_a_group_is_done() -> None:
    """Even where its last row is no request: a pipe may give the next one much later."""
    read = []

    def rows() -> Iterator[Request | Skipped]:
        for index in range(6):
            read.append(index)
            yield Skipped(index) if index == 2 else request(index)

    groups = grouped(rows(), 3)
    assert [each.index for each in next(groups)] == [0, 1]
    assert read == [0, 1, 2]
    assert [each.index for each in next(groups)] == [3, 4, 5]
