"""The state of a row is that of its parent plus its new tokens: by hand, and against a brute-force replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.config.layers import resolve
from genctl.engines.protocol import Request, Skipped, grouped
from genctl.errors import InputError
from genctl.events import Began, Ended, Event, Finished, Hypothesis, Prefilled, Row, Stepped, Token, advance
from genctl.events.results import Collector
from genctl.pages.search_tree import Node, TreeBuilder
from genctl.terminal.run_history import RunHistory


def row(parent: int, *ids: int, lane: str = "0") -> Row:
    return Row(lane, parent, tuple(Token(id, -1.0, f"<{id}>") for id in ids), -1.0, -1.0)


def ended(parent: int, *ids: int, lane: str = "0") -> Ended:
    return Ended(lane, parent, row(0, *ids).written, Hypothesis(ids, -1.0, -1.0, "eos"))


class States:
    """The token ids of one lane's rows."""

    def __init__(self) -> None:
        self.live: list[list[int]] = [[]]

    def step(self, event: Stepped) -> tuple[list[list[int]], list[list[int]]]:
        self.live, ended = advance(self.live, event, lambda ids, row: [*ids, *(token.id for token in row.written)])
        return self.live, ended


def test_a_row_that_ended_is_not_continued() -> None:
    found = States()
    found.step(Stepped("0", 0, (row(0, 1),), (ended(0, 2),)))
    with pytest.raises(InputError, match="lane '0': a row continues row 1, but there are 1 before step 1"):
        found.step(Stepped("0", 1, (row(1, 3),)))


@pytest.mark.parametrize("parent", [-1, 1, 7])
@pytest.mark.parametrize("last", [False, True])
def test_a_row_that_continues_no_row_is_refused_and_changes_nothing(parent: int, last: bool) -> None:
    found = States()
    found.step(Stepped("0", 0, (row(0, 1),)))
    event = Stepped("0", 1, (), (ended(parent, 2),)) if last else Stepped("0", 1, (row(parent, 2),))
    with pytest.raises(InputError, match=f"continues row {parent},"):
        found.step(event)
    assert found.live == [[1]]


@dataclass(frozen=True)
class Replayed:
    """A row by brute force: all its tokens, and the row that it continued at each step."""

    ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


@dataclass
class Forest:
    """A run of several lanes with interleaved steps, and the full rows and ended rows of each step."""

    stream: list[Event] = field(default_factory=list)
    truth: list[tuple[list[Replayed], list[Replayed]]] = field(default_factory=list)  # of each Stepped


@st.composite
def forests(draw: st.DrawFn, ids: Sequence[int]) -> Forest:
    """Rows that fork, move, die and end, in groups or alone, a few tokens at a time."""
    made = Forest()
    lanes = {name: [Replayed()] for name in "abc"[: draw(st.integers(1, 3))]}
    steps = dict.fromkeys(lanes, 0)
    for name in lanes:
        made.stream += [Began(name, "p", "beam", settings={"num_return_sequences": 100}), Prefilled(name, 1)]
    for name in draw(st.lists(st.sampled_from(sorted(lanes)), max_size=14)):
        before = lanes[name]
        if not before:
            continue
        parents = st.integers(0, len(before) - 1)
        still = draw(st.booleans())  # every row goes on as it is, as in greedy search and sampling
        chosen = list(range(len(before))) if still else draw(st.lists(parents, max_size=4))
        over = draw(st.lists(parents, max_size=2))
        live: list[Replayed] = []
        gone: list[Replayed] = []
        rows, ends = [], []
        for parent in (*chosen, *over):
            written = tuple(draw(st.lists(st.sampled_from(ids), min_size=0, max_size=3)))
            found = Replayed(before[parent].ids + written, (*before[parent].parents, parent))
            tokens = tuple(Token(id, -1.0) for id in written)
            if len(live) < len(chosen):
                live.append(found)
                rows.append(Row(name, parent, tokens, -1.0, -1.0))
            else:
                gone.append(found)
                hypothesis = Hypothesis(found.ids, -1.0, -1.0, "eos", slot=len(made.stream) * 10 + len(gone))
                ends.append(Ended(name, parent, tokens, hypothesis))
        made.stream.append(Stepped(name, steps[name], tuple(rows), tuple(ends)))
        made.truth.append((live, gone))
        lanes[name], steps[name] = live, steps[name] + 1
    for name in lanes:
        told = [one.hypothesis for e in made.stream if isinstance(e, Stepped) and e.lane == name for one in e.ended]
        made.stream.append(Finished(name, tuple(told)))
    return made


SETTINGS = settings(max_examples=150, deadline=None, derandomize=True)


def steps_of(stream: Sequence[Event]) -> list[Stepped]:
    return [event for event in stream if isinstance(event, Stepped)]


@SETTINGS
@given(made=forests(range(6)))
def test_states_are_those_of_a_replay(made: Forest) -> None:
    found = {name: States() for name in "abc"}
    for event in steps_of(made.stream):
        live, gone = made.truth.pop(0)
        assert found[event.lane].step(event) == ([list(one.ids) for one in live], [list(one.ids) for one in gone])


@SETTINGS
@given(made=forests(range(6)))
def test_results_partial_results_story_and_tree_tell_the_same_rows(made: Forest) -> None:
    collector, history = Collector(), RunHistory()
    trees = {name: TreeBuilder(name) for name in "abc"}
    latest: dict[str, list[Replayed]] = {}
    over: dict[str, list[Replayed]] = {}
    truth = iter(made.truth)
    for event in made.stream:
        if isinstance(event, Finished):
            check_partial(collector, event.lane, latest, over)
            lane = history.lanes[event.lane]
            assert [one.ids for one in lane.rows] == [one.ids for one in latest.get(event.lane, [Replayed()])]
            assert [leaf.ids for leaf in lane.ended] == [one.ids for one in over.get(event.lane, [])]
            result = collector.feed(event)
            assert result is not None
            told = [(tuple(token.id for token in one.tokens), one.parents) for one in result.sequences]
            assert told == [(one.ids, one.parents) for one in over.get(event.lane, [])]
        else:
            assert collector.feed(event) is None
        history.feed(event)
        if isinstance(event, Stepped):
            trees[event.lane].feed(event)
            latest[event.lane], gone = next(truth)
            over.setdefault(event.lane, []).extend(gone)
            assert branches(trees[event.lane]) >= {one.ids for one in (*latest[event.lane], *over[event.lane])}
            assert trees[event.lane].size == len(trees[event.lane].tree().nodes)
    assert collector.unfinished() == []


def branches(builder: TreeBuilder) -> set[tuple[int, ...]]:
    """The ids from the root to each node of the tree."""
    found: dict[Node, tuple[int, ...]] = {}
    for node in builder.tree().nodes:
        before = found[node.parent] if node.parent is not None else ()
        found[node] = before if node.token is None else (*before, node.token.id)
    return set(found.values())


def check_partial(
    collector: Collector, lane: str, latest: dict[str, list[Replayed]], over: dict[str, list[Replayed]]
) -> None:
    """Every row of the lane is a partial result, up to the number of returned sequences, which is all here."""
    expected = sorted((one.ids, one.parents) for one in (*latest.get(lane, []), *over.get(lane, [])))
    found = [result for result in collector.unfinished() if result.lane == lane]
    told = [(tuple(token.id for token in one.tokens), one.parents) for result in found for one in result.sequences]
    assert sorted(told) == expected


BASE = resolve([])


def request(index: int) -> Request:
    return Request(str(index), BASE, 0, prompt="a", index=index)


def indexes(groups: Iterator[Iterator[Request]]) -> list[list[int]]:
    return [[each.index for each in group] for group in groups]


def test_groups_have_the_same_rows_wherever_a_run_begins() -> None:
    rows = [request(index) for index in range(10)]
    assert indexes(grouped(rows, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert indexes(grouped(rows[6:], 4)) == [[6, 7], [8, 9]]
    rows = [Skipped(index) if index in (0, 3, 4, 5, 6, 7) else request(index) for index in range(10)]
    assert indexes(grouped(rows, 4)) == [[1, 2], [], [8, 9]]
    assert indexes(grouped([None, request(0), None, request(1), None, request(2)], 2)) == [[0, 1], [2]]


def test_no_row_of_the_next_group_is_read_before_a_group_is_done() -> None:
    """Even if its last row is not a request: a pipe may deliver the next one much later."""
    read = []

    def rows() -> Iterator[Request | Skipped]:
        for index in range(6):
            read.append(index)
            yield Skipped(index) if index == 2 else request(index)

    groups = grouped(rows(), 3)
    assert [each.index for each in next(groups)] == [0, 1]
    assert read == [0, 1, 2]
    assert [each.index for each in next(groups)] == [3, 4, 5]
