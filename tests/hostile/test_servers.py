"""Answers of hostile servers."""

from __future__ import annotations

from random import Random

from tests.hostile import servers, targets


def test_no_answer_costs_more_than_its_row() -> None:
    found = {targets.REFUSED: 0, targets.ACCEPTED: 0}
    with servers.hostile() as target:
        for seed in range(12):
            found[targets.checked(target, servers.answer(Random(f"answers 1 {seed}")))] += 1
    assert found[targets.REFUSED] > 0


def test_an_honest_answer_is_accepted() -> None:
    """Or the test above would only ever see refusals."""
    body = b'{"choices": [{"index": 0, "text": " a b", "finish_reason": "stop"}]}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with servers.hostile() as target:
        assert target(head + body) == targets.ACCEPTED
