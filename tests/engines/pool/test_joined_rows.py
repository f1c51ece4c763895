"""Rows that join the batch of a worker: the same bytes and few passes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from genctl import events
from genctl.config.layers import Layer
from genctl.engines.pool.engine import _groups
from genctl.engines.pool.worker import DecodeWork, WorkQueue
from genctl.engines.protocol import Report, Request, Skipped
from genctl.engines.session import Session
from genctl.params import Runtime
from tests.cli.tool import genctl

PATIENCE = 60.0  # seconds


# -- a worker ----------------------------------------------------------------------------------------------------------


def requests(session: Session, *numbers: int) -> tuple[Request, ...]:
    resolved = session.resolve([Layer("test", {"max_new_tokens": 40, "min_new_tokens": 40})])
    return tuple(Request(f"row {n}", resolved, n, prompt_ids=(5, 6, 7 + n), place=n + 1, index=n) for n in numbers)


def finished(found: Any) -> dict[str, Any]:
    return {event.lane: event.hypotheses for event in found if isinstance(event, events.Finished)}


def test_rows_that_come_later_join_the_batch_and_have_the_same_numbers(gpt2: Path) -> None:
    """Four calls of two rows, the last three while the first is decoded, take few more passes than one of eight."""
    session = Session.load(Runtime(model=str(gpt2)))
    rows = requests(session, *range(8))
    alone = {}
    for row in rows:
        alone |= finished(session.stream([row]))
    joined, begun, came = WorkQueue(session), threading.Event(), threading.Event()

    def planned(tokens: int) -> None:
        begun.set()
        came.wait(PATIENCE)

    session.on_plan = planned
    before = session.done.passes
    calls = [joined.put(DecodeWork(rows[:2], Report(), 8, threads=1, joined=True))]
    assert begun.wait(PATIENCE)
    calls += [joined.put(DecodeWork(rows[2 * n : 2 * n + 2], Report(), 8, threads=1, joined=True)) for n in (1, 2, 3)]
    came.set()
    wait(calls, PATIENCE)
    parts = [finished(call.result().results) for call in calls]
    assert [sorted(part) for part in parts] == [
        [f"row {2 * n}", f"row {2 * n + 1}"] for n in range(4)
    ]  # drafts decide which ends first
    assert {lane: found for part in parts for lane, found in part.items()} == alone
    assert session.done.passes - before < 2 * 40


def test_a_batch_begins_again_after_its_last_row(gpt2: Path) -> None:
    session = Session.load(Runtime(model=str(gpt2)))
    joined = WorkQueue(session)
    for number in range(3):
        work = DecodeWork(requests(session, number), Report(steps=False), 2, threads=1, joined=True)
        assert [*finished(joined.put(work).result(PATIENCE).results)] == [f"row {number}"]


def test_an_error_of_the_thread_reaches_every_call_and_ends_nothing_else(gpt2: Path) -> None:
    session = Session.load(Runtime(model=str(gpt2)))
    joined, broken = WorkQueue(session), Exception("broken")
    rows = requests(session, 0, 1)

    def fails(tokens: int) -> None:
        raise broken

    session.on_plan = fails
    assert joined.put(DecodeWork(rows[:1], Report(), 2, joined=True)).exception(PATIENCE) is broken
    session.on_plan = lambda tokens: None
    assert [*finished(joined.put(DecodeWork(rows[1:], Report(), 2, joined=True)).result(PATIENCE).results)] == ["row 1"]


# -- the driver --------------------------------------------------------------------------------------------------------


def test_rows_of_a_slow_pipe_do_not_wait_for_others_of_their_group(gpt2: Path) -> None:
    session = Session.load(Runtime(model=str(gpt2)))
    rows = requests(session, 0, 1, 2, 3, 4)
    coming = [rows[0], None, None, rows[1], Skipped(2), rows[3], None, rows[4]]

    def spans(*, whole: bool) -> Iterator[tuple[int, int] | None]:
        for group in _groups(iter(coming), 4, lambda usable: DecodeWork(usable, Report(), 4), whole=whole):
            yield None if group is None else (len(group.work.requests), group.last)

    assert list(spans(whole=False)) == [(1, 0), None, (2, 3), None, (1, 4)]
    assert list(spans(whole=True)) == [None, None, (3, 3), None, (1, 4)]


@pytest.mark.usefixtures("workers_here")
def test_notes_say_rows_where_there_are_no_groups(llama: Path) -> None:
    arguments = ("run", "-m", str(llama), "-n", "3", "--set", "min_new_tokens=3", "--workers", "1", "-v")
    done = genctl(*arguments, stdin="One day\nThe sea\n")
    assert done.status == 0
    assert any(line.endswith(": 2 rows, 6 tokens") for line in done.err.splitlines()), done.err
    assert " group" not in done.err
