"""What drawing costs, counted: with 10,000 nodes only what is in view is made."""

from __future__ import annotations

from typing import Any

from genctl.commands.explore.alternatives import by_rank, matching
from genctl.commands.explore.panes import BranchRows
from genctl.commands.explore.screen_source import TreeSource
from genctl.tree.changes import Begun, Grown, Opened, Settled
from genctl.tree.nodes import Tree
from tests.commands.explore.app import Shown, play
from tests.tree.trees import explorer

NODES = 10_000


def large(tree: Tree) -> None:
    """A branch of half of the nodes, and a fork of three tokens at every third of them."""
    tree.apply(Begun("generate", True))
    for _ in range(NODES // 2):
        tree.apply(Grown(len(tree.nodes), len(tree.nodes) - 1, 5, -0.1, " word", entropy=0.2))
    tip, fork = tree.tip, 1
    while len(tree.nodes) < NODES:
        parent = fork
        for place in range(3):
            tree.apply(Grown(len(tree.nodes), parent, 6 + place, -2.0, f" other{place}"))
            parent = len(tree.nodes) - 1
        fork += 3
    tree.apply(Settled(cursor=tip, tip=tip))
    tree.apply(Begun("generate", True))


def test_only_rows_in_view_are_drawn() -> None:
    made = explorer()
    large(made.tree)

    async def part(shown: Shown) -> None:
        app = shown.app
        panes: list[Any] = [app.text_pane, app.choices, app.tree_pane]
        await shown.press("home")  # the end is beyond what this model reads
        assert [pane.id for pane in panes if not pane.drawn] == []
        rows = sum(pane.size.height for pane in panes)

        async def work(key: str) -> int:
            before = sum(pane.drawn for pane in panes)
            await shown.press(key)
            return sum(pane.drawn for pane in panes) - before

        made_rows = app.tree_pane.rows.made
        await shown.press("tab", "tab", "tab")
        for key in ("left", "down", "up", "pageup", "home", "right", "end", "tab"):
            assert await work(key) <= 3 * rows, key  # a key may scroll, and be answered once more by the model
        laid_out = app.text_pane.flow.laid_out
        await shown.press("left", "left")
        assert app.text_pane.flow.laid_out - laid_out < 200  # the line of the cursor, not the text
        assert app.tree_pane.rows.made == made_rows
        assert len(app.tree_pane.rows.parts) > 1000

    play(part, made)


def test_a_token_at_the_end_of_a_branch_changes_one_row() -> None:
    tree = Tree(Opened("genctl-tree/1", "m", "c", "p", (1,), 0))
    large(tree)
    rows = BranchRows()
    rows.refresh(tree)
    before = list(rows.parts)
    end = tree.tip
    row = rows.row_of([end])
    assert row is not None
    tree.apply(Grown(len(tree.nodes), end, 9, -0.1, " x"))
    rows.grow(len(tree.nodes) - 1, end, 1)
    assert not rows.refresh(tree)
    assert rows.made == 1
    assert rows.parts == before
    assert rows.parts[row].end == len(tree.nodes) - 1


def test_a_fork_makes_the_rows_anew() -> None:
    tree = Tree(Opened("genctl-tree/1", "m", "c", "p", (1,), 0))
    large(tree)
    rows = BranchRows()
    rows.refresh(tree)
    count = len(rows.parts)
    tree.apply(Grown(len(tree.nodes), 2, 9, -0.1, " x"))
    rows.grow(len(tree.nodes) - 1, 2, len(tree.children(2)))
    assert rows.refresh(tree)
    assert len(rows.parts) == count + 2  # the part before the fork, and the new one


def test_a_filter_keeps_the_order_of_the_model() -> None:
    source = TreeSource(explorer())
    first = source.look(0).first
    texts = source.vocabulary()
    for wanted in ("a", "The", "zzzz"):
        ids = matching(texts, wanted)
        assert by_rank(ids, first) == sorted(ids, key=first.rank)
