"""Folding events: what a history says is what the events said, whatever came before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.errors import InputError
from genctl.events import (
    Began,
    Ended,
    Event,
    Failed,
    Hypothesis,
    Row,
    Stepped,
    Token,
    Trace,
)
from genctl.events.history import Path
from genctl.terminal.run_history import RunHistory, touched
from tests.terminal.streams import STORY, lane, woven


def tell(events: list[Event]) -> RunHistory:
    history = RunHistory()
    for event in events:
        history.feed(event)
    return history


@st.composite
def searches(draw: st.DrawFn) -> tuple[list[Event], dict[str, list[list[int]]]]:
    """Random searches on up to three lanes, and the ids of each live row, kept the naive way."""
    events: list[Event] = []
    live: dict[str, list[list[int]]] = {}
    for name in draw(st.lists(st.sampled_from("abc"), unique=True, min_size=1)):
        events.append(Began(name, f"prompt {name}", "beam", seed=3))
        live[name] = [[]]
    for step in range(draw(st.integers(0, 12))):
        name = draw(st.sampled_from(sorted(live)))
        if not live[name]:
            continue
        rows, after, ended = [], [], []
        for _ in range(draw(st.integers(0, 4))):
            parent = draw(st.integers(0, len(live[name]) - 1))
            ids = draw(st.lists(st.integers(0, 9), max_size=3))
            tokens = tuple(Token(one, -0.5, "xyz"[: one % 4]) for one in ids)
            after.append(live[name][parent] + ids)
            if draw(st.booleans()):
                rows.append(Row(name, parent, tokens, -0.5, -0.25))
            else:
                whole = Hypothesis(tuple(after.pop()), -1.0, -1.0, "eos")
                ended.append(Ended(name, parent, tokens, whole))
        live[name] = after
        events.append(Stepped(name, step, tuple(rows), tuple(ended), len(rows), len(ended)))
    return events, live


@given(searches())
@settings(max_examples=150, deadline=None)
def test_live_rows_hold_exactly_what_was_written_along_their_path(
    case: tuple[list[Event], dict[str, list[list[int]]]],
) -> None:
    events, live = case
    history = tell(events)
    for name, rows in live.items():
        lane_history = history.lanes[name]
        assert [list(row.ids) for row in lane_history.rows] == rows
        for row in lane_history.rows:
            assert len(row.parents) == lane_history.steps
            whole = "".join(token.text for token in row.tokens())
            assert row.text() == whole
            assert row.chars == len(whole)
            assert row.length == len(row.ids)
            for start in range(len(whole) + 1):
                assert row.text(start) == whole[start:]
            for last in range(row.length + 2):
                assert row.tokens(last) == row.tokens()[max(0, row.length - last) :]
        for leaf in lane_history.ended:
            assert leaf.ids == leaf.hypothesis.tokens
            assert lane_history.paths_of([leaf.hypothesis]) != [None]
    assert history.tokens == sum(one.written for one in history.lanes.values())
    assert history.totals.drafted == sum(one.drafted for one in history.lanes.values())
    steps = [event for event in events if isinstance(event, Stepped)]
    assert sum(one.steps for one in history.lanes.values()) == len(steps)
    written = sum(len(row.written) for event in steps for row in event.rows)
    written += sum(len(ended.written) for event in steps for ended in event.ended)
    assert history.tokens == written


def test_a_very_long_path_is_read_without_recursion() -> None:
    path = Path()
    for step in range(20_000):
        path = Path(path, Row("0", 0, (Token(step, -1.0, "a"),), -1.0, -1.0), step)
    assert path.ids == tuple(range(20_000))
    assert len(path.text()) == 20_000
    assert path.parents == (0,) * 20_000


@pytest.mark.parametrize("parent", [1, -1, 99])
def test_a_row_that_continues_no_row_is_refused(parent: int) -> None:
    history = tell([Began("0", "p", "sample")])
    with pytest.raises(InputError, match=f"continues row {parent}, but there are 1 before step 0"):
        history.feed(Stepped("0", 0, (Row("0", parent, (), 0.0, 0.0),)))
    with pytest.raises(InputError, match="lane '0'"):
        history.feed(Ended("0", parent, (), Hypothesis((), 0.0, 0.0, "eos")))


def test_totals_add_up_over_lanes_and_survive_forgetting_them() -> None:
    streams = woven(
        lane("0", [STORY[:4], STORY[:6]], seed=7), lane("1", [STORY[:5]], seed=8), iter([Failed("2", "input", "empty")])
    )
    history = RunHistory()
    for event in streams:
        history.feed(event)
    for name in ("0", "1", "2"):
        history.forget(name)
    assert history.lanes == {}
    totals = history.totals
    assert (totals.lanes, totals.finished, totals.failed, totals.sequences) == (3, 2, 1, 3)
    assert (totals.tokens, totals.prompt_tokens, totals.seed) == (15, 10, 7)
    assert totals.stops == {("eos", ""): 2, ("length", ""): 1}
    assert totals.seconds == pytest.approx(0.25)


def test_a_processor_is_tallied_per_token_and_its_time_once_per_step() -> None:
    def traced(moved: float, removed: int, changed: bool) -> Token:
        return Token(1, -1.0, "x", trace=(Trace("top_k", removed, moved, changed, 0.5, 0.6, 0.25),))

    rows = (Row("0", 0, (traced(0.2, 10, True),), -1.0, -1.0, 0), Row("0", 0, (traced(0.0, 0, False),), -1.0, -1.0, 1))
    history = tell([Stepped("0", 0, rows), Stepped("0", 1, (Row("0", 0, (traced(0.1, 5, False),), -1.0, -1.0, 0),))])
    tally = history.tallies["top_k"]
    assert (tally.steps, tally.touched, tally.removed, tally.changed) == (3, 2, 15, 1)
    assert tally.moved == pytest.approx(0.3)
    assert tally.seconds == pytest.approx(0.5)
    assert not touched(Trace("x", 0, 1e-12, False, 0.5, 0.5))
    assert touched(Trace("x", 0, 1e-6, False, 0.5, 0.5))


def test_hypotheses_cut_by_an_interruption_are_found_among_the_live_rows() -> None:
    history = tell([Stepped("0", 0, (Row("0", 0, (Token(5, -1.0, "a"),), -1.0, -1.0),))])
    found = history.lanes["0"].paths_of([Hypothesis((5,), -1.0, -1.0, "interrupted")])[0]
    assert found is history.lanes["0"].rows[0]
    assert history.lanes["0"].paths_of([Hypothesis((6,), -1.0, -1.0, "interrupted")]) == [None]
