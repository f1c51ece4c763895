"""Trees as lines of a file: what does not fit together is refused, with the line; twice the tree is twice the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genctl.commands.tree_formats import DEEPEST, tree_lines
from genctl.errors import InputError
from genctl.pages.search_tree import TreeBuilder
from genctl.tree.saved import events_of
from tests.cli.tool import genctl
from tests.tree.shapes import OPENED, SHAPES, content, grown, step, teeth, tree
from tests.work import growth

# two branches of two tokens: 1, 2 and 3, 4
FOUR = [*step(grown(1, 0, 5), grown(2, 1, 6)), *step(grown(3, 0, 7), grown(4, 3, 8))]
WRONG: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a cursor below the tip": (
        [{"event": "at", "cursor": 2, "tip": 1}],
        "the cursor, node 2, is not on the branch of the tip, node 1",
    ),
    "a cursor on another branch": (
        [{"event": "at", "cursor": 2, "tip": 4}],
        "the cursor, node 2, is not on the branch",
    ),
    "a tip that is not there": ([{"event": "at", "cursor": 1, "tip": 9}], "the cursor, node 1, is not on the branch"),
    "a negative tip": ([{"event": "at", "cursor": 0, "tip": -1}], "tip: expected at least 0, got -1"),
    "settings that are none": ([{"event": "treestep", "line": "x", "settings": 1}], "settings: expected"),
    "a parent that comes later": ([grown(5, 6, 9)], "node 5 cannot stand after node 6"),
    "a parent that is the node": ([grown(5, 5, 9)], "node 5 cannot stand after node 5"),
    "a parent below 0": ([grown(5, -1, 9)], "parent: expected at least 0, got -1"),
    "a parent that is undone": ([{"event": "stepundone"}, grown(3, 4, 9)], "node 3 cannot stand after node 4"),
    "a node out of order": ([grown(7, 0, 9)], "node 7 follows node 4"),
    "a node that is there": ([grown(5, 0, 5)], "node 5 cannot stand after node 0"),
    "an id in quotes": ([grown(5, 1, "9")], "expected a whole number"),  # type: ignore[arg-type]
    "a node outside of a step": ([*[{"event": "stepundone"}] * 2, grown(1, 0, 9)], "node 1 is outside of a step"),
    "too much undone": ([{"event": "stepundone"}] * 3, "nothing is left to undo"),
    "two beginnings": ([OPENED], "a tree has one beginning"),
    "another kind": ([{"event": "tokennod", "node": 1}], "did you mean tokennode"),
}


def test_the_lines_before_are_a_tree() -> None:
    assert len(tree(FOUR)) == 4


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_together_is_refused(name: str) -> None:
    lines, words = WRONG[name]
    with pytest.raises(InputError) as caught:
        tree([*FOUR, *lines])
    assert words in caught.value.message
    assert f"is damaged at line {1 + len(FOUR) + len(lines)}:" in caught.value.message


def test_a_report_says_so_in_a_line_and_a_hint(tmp_path: Path) -> None:
    file = tmp_path / "tree.jsonl"
    file.write_bytes(b"".join(content([*FOUR, *WRONG["a cursor below the tip"][0]])))
    done = genctl("report", str(file))
    assert done.status == 2
    assert len(done.err.splitlines()) == 2
    assert "the cursor, node 2, is not on the branch of the tip, node 1" in done.err


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_is_read_and_becomes_events(shape: str) -> None:
    assert growth(lambda size: lambda: list(events_of(tree(SHAPES[shape](size)))), 100) < 2.6


def test_branches_within_branches_are_drawn_as_deep_as_they_are() -> None:
    """Neither calls nor indents grow with the depth of a tree."""

    def drawn(size: int) -> list[str]:
        builder = TreeBuilder("0")
        for event in events_of(tree(teeth(size))):
            builder.feed(event)
        return [line.plain for line in tree_lines(builder.tree())]

    deep = drawn(1200)
    assert len(deep) > 1200
    assert max(map(len, deep)) < 3 * DEEPEST + 200
