"""Any sequence of commands: the file gives the tree back, and what is kept of the model changes no number."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.errors import GenctlError
from genctl.tree.explorer import Explorer
from genctl.tree.token_tree import ROOT
from tests.tree.trees import explorer, read_tree, reopened

MOVES = ["left", "left 3", "right", "right 2", "up", "down", "start", "end", "goto 1"]
STEPS = [
    "generate 3", "take 1 0", "take 2 0", "take 3 2", "take id:14 0", "sample 2 2", "beams 2 2", "edit  cat", "edit s",
    "set temperature=0.7", "set top_k=3", "set repetition_penalty=1.3", "preset greedy", "expand mass=0.4,depth=2",
]  # fmt: skip
BACK = ["undo"]
LINES = st.lists(st.sampled_from([*MOVES, *STEPS, *STEPS, *BACK]), max_size=9)


def do(made: Explorer, lines: list[str]) -> None:
    for line in lines:
        try:
            list(made.do(line))
        except GenctlError:  # such as `goto 1` before there is one
            continue


@settings(max_examples=25)
@given(LINES)
def test_the_file_gives_the_tree_back_and_goes_on_with_equal_bytes(lines: list[str]) -> None:
    half = len(lines) // 2
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder) / "whole", Path(folder) / "parts"
        made = explorer(whole)
        do(made, lines)
        made.close()
        assert vars(read_tree(whole)) == vars(made.tree)
        first = explorer(parts)
        do(first, lines[:half])
        first.close()
        again = reopened(parts)
        assert vars(again.tree) == vars(first.tree)
        do(again, lines[half:])
        again.close()
        assert vars(again.tree) == vars(made.tree)
        assert parts.read_bytes() == whole.read_bytes()


@settings(max_examples=15)
@given(LINES)
def test_a_small_memory_changes_no_number(lines: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("much", "little", "nothing")]
        for path, memory in zip(files, (None, 60_000, 1), strict=True):
            made = explorer(path, memory=memory)
            do(made, lines)
            made.close()
        assert len({path.read_bytes() for path in files}) == 1


@settings(max_examples=40)
@given(LINES, st.sampled_from(STEPS))
def test_undo_restores_what_was_before_a_step(lines: list[str], step: str) -> None:
    made = explorer()
    do(made, lines)
    nodes, at, knobs, count = list(made.tree.nodes), made.tree.at, made.tree.settings, len(made.tree.steps)
    do(made, [step])
    if len(made.tree.steps) > count:
        list(made.do("undo"))
    assert (made.tree.nodes, made.tree.at, made.tree.settings) == (nodes, at, knobs)
    while made.tree.steps:
        list(made.do("undo"))
    assert (made.tree.cursor, made.tree.tip, len(made.tree)) == (ROOT, ROOT, 0)
    assert list(made.tree.leaves) == [ROOT]


@settings(max_examples=15)
@given(LINES)
def test_a_copy_of_a_tree_is_the_tree_and_its_sums_are_those_of_a_walk(lines: list[str]) -> None:
    made = explorer()
    do(made, lines)
    nodes = range(len(made.tree) + 1)
    assert set(made.tree.leaves) == {node for node in nodes if not made.tree.children(node)}
    for node in nodes:
        path = made.tree.path(node)
        assert made.tree.depths[node] == len(path)
        assert made.tree.joints[node] == pytest.approx(sum(made.tree.nodes[each].logprob for each in path))
    assert made.tree.cursor in (ROOT, *made.tree.path(made.tree.tip))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy"
        list(made.do(f"save {path}"))
        assert vars(read_tree(path)) == vars(made.tree)
        list(made.do("take 1 0"))
        made.close()
        assert vars(read_tree(path)) == vars(made.tree)
