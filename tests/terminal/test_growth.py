"""Twice the recording, twice the work: many prompts at once, many ends, and rows that part early."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from genctl.commands.recording import read_recording
from genctl.commands.run.beam_picture import table
from genctl.commands.run.run_view import RunView
from genctl.commands.run.text_stream import StableTexts
from genctl.commands.tree_formats import tree_json, tree_lines
from genctl.events import Began, Ended, Event, Finished, Hypothesis, Row, Stepped, Token, to_json
from genctl.events.history import LaneHistory, StablePrefix, common_ancestor
from genctl.events.history import Path as Way
from genctl.pages.page import PageData, page
from genctl.pages.search_tree import SearchTree, SearchTrees
from genctl.tree.saved import events_of
from tests.terminal.streams import history
from tests.tree.shapes import SHAPES, tree
from tests.work import growth, lines

SIZE = 60
MOST = 2.6
TOKEN = (Token(1, -1.0, "a"),)


def lanes(size: int) -> list[Event]:
    """Prompts that are all at work before the first is done."""
    names = [str(number) for number in range(size)]
    done = Hypothesis((1,), -1.0, -1.0, "length", -1.0, 0, text="a")
    return [
        *(Began(name, "x", "greedy") for name in names),
        *(Stepped(name, 0, (Row(name, 0, TOKEN, -1.0, -1.0, 0),)) for name in names),
        *(Finished(name, (done,)) for name in names),
    ]


def ends(strategy: str, slots: bool = False) -> Callable[[int], list[Event]]:
    """Two rows that part at once, and one that ends at each step; scores fall, so that the first end is the best.

    It alone is a result: results have all their tokens, and a file of them is as long.
    """

    def made(size: int) -> list[Event]:
        events: list[Event] = [Began("0", "x", strategy)]
        results = []
        for at in range(size):
            slot = at if slots else None
            result = Hypothesis((7,), -float(at), -float(at), "eos", -float(at), slot)
            results.append(result)
            rows = tuple(Row("0", min(place, at), (Token(place, -1.0, "ab"[place]),), -1.0, -1.0, size + place if slots
                             else None) for place in (0, 1))  # fmt: skip
            events.append(Stepped("0", at, rows, (Ended("0", 0, (Token(7, -1.0, "."),), result),)))
        return [*events, Finished("0", (results[0],))]

    return made


def tree_events(shape: Callable[[int], Any]) -> Callable[[int], list[Event]]:
    return lambda size: list(events_of(tree(shape(size))))


RECORDINGS = {
    "lanes": lanes,
    "beam": ends("beam"),
    "diverse": ends("diverse-beam"),
    "sample": ends("sample", slots=True),
    "unknown": ends("explore"),
    **{name: tree_events(shape) for name, shape in SHAPES.items()},
}


def console() -> Console:
    return Console(file=io.StringIO(), width=80)


def fed(view: Any, events: list[Event]) -> Any:
    for event in events:
        view.feed(event)
    return view


def built(events: list[Event]) -> SearchTree:
    return next(iter(fed(SearchTrees(), events).take_all()))


USES: dict[str, Callable[[list[Event]], object]] = {
    "streamed": lambda events: fed(StableTexts(lambda text, dim: None), events),
    "shown": lambda events: fed(RunView(console(), console(), live=True, quiet=True), events),
    "shown as a search": lambda events: fed(RunView(console(), console(), quiet=True, beams=True), events),
    "a page": lambda events: page(fed(PageData(), events)),
    "drawn": lambda events: tree_lines(built(events)),
    "drawn in 80 columns": lambda events: tree_lines(built(events), 80),
    "as JSON": lambda events: tree_json(built(events)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", RECORDINGS)
def test_what_shows_a_recording(name: str, use: str) -> None:
    def make(size: int) -> Callable[[], object]:
        events = RECORDINGS[name](size)
        return lambda: USES[use](events)

    assert growth(make, SIZE) < MOST


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recording_is_read(name: str, tmp_path: Path) -> None:
    def make(size: int) -> Callable[[], object]:
        file = tmp_path / f"{size}"
        written = [json.dumps(to_json(event)) for event in RECORDINGS[name](size)]
        file.write_text("".join(f"{line}\n" for line in written))
        return lambda: read_recording(str(file))

    assert growth(make, SIZE) < MOST


def test_a_table_reads_the_texts_that_it_shows() -> None:
    def make(size: int) -> Callable[[], object]:
        lane = history(ends("beam")(size)[:-1])
        return lambda: table(lane, 4, 80)

    assert growth(make, 4 * SIZE) < MOST


def test_paths_meet_where_a_walk_says() -> None:
    import random

    draw = random.Random(3)
    row = Row("0", 0, TOKEN, -1.0, -1.0)
    ways = [Way()]
    for step in range(300):
        ways.append(Way(ways[draw.randrange(max(len(ways) - 6, 0), len(ways))], row, step))
    for _ in range(1000):
        a, b = draw.choice(ways), draw.choice(ways)
        ups = set(map(id, [*a.back(), ways[0]]))
        assert a.meet(b) is next(way for way in [*b.back(), ways[0]] if id(way) in ups)
    assert common_ancestor([]) is not None
    long, other = Way(), Way(Way(), row, 0)
    for step in range(10_000):
        long = Way(long, row, step)
    assert lines(lambda: long.meet(other)) < 400
    assert long.meet(other).parent is None  # two runs in one file


@pytest.mark.parametrize("name", ["beam", "diverse", "sample", "unknown"])
def test_what_is_certain_is_the_same_at_once_and_step_by_step(name: str) -> None:
    lane, step_by_step = LaneHistory("0"), StablePrefix()
    for event in RECORDINGS[name](30):
        lane = lane.after(event)
        assert step_by_step(lane) is StablePrefix()(lane)


def test_a_sequence_without_tokens_has_one_path() -> None:
    """Paths of which a file says nothing are not read again for each result."""
    empty = Hypothesis((), -1.0, -1.0, "eos", text="")
    steps = [Stepped("0", at, (Row("0", 0, TOKEN, -1.0, -1.0),)) for at in range(20)]
    lane = history([Began("0", "x", "beam"), *steps, Stepped("0", 20, (), (Ended("0", 0, TOKEN, empty),))])
    found = lane.paths_of([empty] * 5)
    assert [path is not None for path in found] == [True] + [False] * 4
