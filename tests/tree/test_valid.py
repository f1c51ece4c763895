"""A file of a tree that was edited: what does not fit together is refused when it is read, with the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genctl.errors import InputError
from tests.cli.tool import genctl
from tests.tree.shapes import content, grown, step, tree

# two branches of two tokens: 1, 2 and 3, 4; the second is undone
FOUR = [*step(grown(1, 0, 5), grown(2, 1, 6)), *step(grown(3, 0, 7), grown(4, 3, 8)), {"event": "undone"}]
BEGUN = {"event": "begun", "line": "generate", "step": True}


def settled(**changed: Any) -> dict[str, Any]:
    return {"event": "settled", **changed}


WRONG: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a cursor below the tip": (
        [settled(cursor=2, tip=1)],
        "the cursor, node 2, is not on the branch of the tip, node 1",
    ),
    "a cursor on another branch": (
        [*step(grown(5, 0, 9), cursor=2, tip=5)],
        "the cursor, node 2, is not on the branch of the tip, node 5",
    ),
    "a tip elsewhere": ([settled(cursor=1), settled(tip=0)], "the cursor, node 1, is not on the branch of the tip"),
    "a cursor that is undone": ([settled(cursor=3, tip=4)], "the cursor is node 3, which is undone"),
    "a tip that is undone": ([settled(cursor=0, tip=4)], "the tip is node 4, which is undone"),
    "a bookmark that is undone": ([settled(bookmarks={"m": 4})], "the bookmark 'm' is node 4, which is undone"),
    "a bookmark that is not there": ([settled(bookmarks={"m": 9})], "node 9 is not there"),
    "a cursor that is not there": ([settled(cursor=9)], "node 9 is not there"),
    "a negative tip": ([settled(tip=-1)], "tip: expected at least 0, got -1"),
    "settings that are not there": ([settled(settings=1)], "there are no settings 1: the table has 1"),
    "settings below 0": ([settled(settings=-50)], "settings: expected at least 0, got -50"),
    "a parent that comes later": ([BEGUN, grown(5, 6, 9)], "node 6 is not there"),
    "a parent that is the node": ([BEGUN, grown(5, 5, 9)], "node 5 is not there"),
    "a parent below 0": ([BEGUN, grown(5, -1, 9)], "parent: expected at least 0, got -1"),
    "a parent that is undone": ([BEGUN, grown(5, 4, 9)], "node 5 continues node 4, which is undone"),
    "a node out of order": ([BEGUN, grown(7, 0, 9)], "node 7 follows node 4"),
    "a node that is there": ([BEGUN, grown(5, 0, 5)], "node 5 is there already: node 1"),
    "a start on another branch": ([BEGUN, grown(5, 1, 9, start=3)], "node 5 began at node 3, which is not above it"),
    "a start that comes later": ([BEGUN, grown(5, 1, 9, start=2)], "node 5 began at node 2, which is not above it"),
    "a start that is the node": ([BEGUN, grown(5, 1, 9, start=5)], "node 5 is not there"),
    "settings of a node": ([BEGUN, grown(5, 1, 9, settings=-1)], "settings: expected at least 0, got -1"),
    "a node outside of a step": ([grown(5, 1, 9)], "node 5 is outside of a step"),
    "reached outside of a step": ([{"event": "reached", "node": 3}], "node 3 is shown again outside of a step"),
    "reached below what is undone": ([BEGUN, {"event": "reached", "node": 4}], "continues node 3, which is undone"),
    "too much undone": ([{"event": "undone"}] * 2, "nothing is left to undo"),
    "too much redone": ([{"event": "redone"}] * 2, "nothing is left to redo"),
    "two beginnings": ([{"event": "opened", "schema": "genctl-tree/1", "model": "m", "checkpoint": "c", "prompt": "",
                         "prompt_ids": [], "seed": 1}], "a tree has one beginning"),
}  # fmt: skip


def test_the_lines_before_are_a_tree() -> None:
    assert len(tree(FOUR)) == 2


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_together_is_refused(name: str) -> None:
    lines, words = WRONG[name]
    with pytest.raises(InputError) as caught:
        tree([*FOUR, *lines])
    assert words in caught.value.message
    assert f"is damaged at line {1 + len(FOUR) + len(lines)}:" in caught.value.message or lines[0]["event"] == "begun"


def test_a_report_says_so_in_a_line_and_a_hint(tmp_path: Path) -> None:
    file = tmp_path / "tree.jsonl"
    file.write_bytes(b"".join(content([*FOUR, *WRONG["a cursor below the tip"][0]])))
    done = genctl("report", str(file))
    assert done.status == 2
    assert len(done.err.splitlines()) == 2
    assert "the cursor, node 2, is not on the branch of the tip, node 1" in done.err
