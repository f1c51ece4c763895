"""Twice the tree, twice the work: of whatever shape, in all that walks over it. Lines of Python count, not seconds."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from genctl.commands.recording import read_recording
from genctl.commands.run.run_view import RunView
from genctl.commands.run.text_stream import StableTexts
from genctl.commands.tree_formats import DEEPEST, tree_json, tree_lines
from genctl.events import Event, Finished
from genctl.pages.page import PageData, page
from genctl.pages.search_tree import SearchTree, TreeBuilder
from genctl.tree import as_events
from genctl.tree.as_events import events_of, left_out
from tests.cli.tool import genctl
from tests.tree.shapes import SHAPES, comb, content, teeth, tree
from tests.work import growth

SIZE = 100
MOST = 2.6  # times, where an input doubles: what has a constant part grows by less than 2, what sorts by a little more


@pytest.fixture(autouse=True)
def few_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(as_events, "MOST", 0)  # results are what twice the nodes of a tree have room for


def console() -> Console:
    return Console(file=io.StringIO(), width=80)


def fed(view: Any, events: list[Event]) -> None:
    for event in events:
        view.feed(event)


def paged(events: list[Event]) -> None:
    data = PageData()
    fed(data, events)
    page(data)


def built(events: list[Event]) -> SearchTree:
    builder = TreeBuilder("0")
    fed(builder, events)
    return builder.tree()


USES: dict[str, Callable[[list[Event]], object]] = {
    "streamed": lambda events: fed(StableTexts(lambda text, dim: None), events),
    "shown": lambda events: fed(RunView(console(), console(), live=True, quiet=True), events),
    "a page": paged,
    "drawn": lambda events: tree_lines(built(events)),
    "drawn in 80 columns": lambda events: tree_lines(built(events), 80),
    "as JSON": lambda events: tree_json(built(events)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_is_read_and_becomes_events(shape: str) -> None:
    assert growth(lambda size: lambda: list(events_of(tree(SHAPES[shape](size)))), SIZE) < MOST


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_shows_a_tree(shape: str, use: str) -> None:
    def make(size: int) -> Callable[[], object]:
        events = list(events_of(tree(SHAPES[shape](size))))
        return lambda: USES[use](events)

    assert growth(make, SIZE) < MOST


def test_the_memory_of_a_comb_is_that_of_its_nodes() -> None:
    def peak(size: int) -> int:
        whole = tree(comb(size))
        tracemalloc.start()
        paged(list(events_of(whole)))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(50)
    assert peak(800) < 2.6 * peak(400)


def test_branches_without_room_among_the_results_are_counted(tmp_path: Path) -> None:
    whole = tree(comb(50))
    events = list(events_of(whole))
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.hypotheses[0].length == whole.depths[whole.tip]  # the current branch comes first
    assert sum(one.length for one in finished.hypotheses) <= 2 * len(whole.nodes)
    assert len(finished.hypotheses) + int(left_out(whole).split()[0]) == len(whole.leaves)
    shown = built(events)
    states = [node.state for node in shown.nodes]
    assert states.count("returned") + states.count("finished") == len(whole.leaves)
    file = tmp_path / "tree.jsonl"
    file.write_bytes(b"".join(content(comb(50))))
    notes: list[str] = []
    assert read_recording(str(file), note=notes.append) == events
    assert notes == [f"{file}: {left_out(whole)}"]
    done = genctl("report", str(file), "-o", str(tmp_path / "page.html"))
    assert done.err.splitlines()[0] == f"note: {notes[0]}"


def test_branches_within_branches_are_drawn_as_deep_as_they_are() -> None:
    """Neither calls nor indents grow with the depth of a tree."""
    drawn = [line.plain for line in tree_lines(built(list(events_of(tree(teeth(3000))))))]
    assert len(drawn) > 3000
    assert max(map(len, drawn)) < 3 * DEEPEST + 200
