"""The search tree: every token that was tried, where branches died, which ones won; and nothing of it is obeyed."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import given

from genctl.commands.tree_formats import tree_json, tree_lines
from genctl.events import Began, Ended, Event, Failed, Finished, Hypothesis, Row, Stepped, Token
from genctl.pages.search_tree import SearchTree, SearchTrees
from tests.terminal.beams import random_searches, search
from tests.terminal.streams import check_screen, lane


def tree(events: Any) -> SearchTree:
    trees = SearchTrees()
    for event in events:
        trees.feed(event)
    (found,) = trees.take_all()
    return found


def drawn(events: Any, width: int | None = None) -> list[str]:
    return [line.plain for line in tree_lines(tree(events), width)]


def test_stems_are_shared_and_every_end_is_told() -> None:
    check_screen("tree_80", "\n".join(drawn(search(returned=2), 80)) + "\n")


@given(random_searches())
def test_every_token_is_in_every_form_once(made: tuple[str, list[Event], str]) -> None:
    _, events, final = made
    tokens = sum(len(e.rows) + len(e.ended) for e in events if isinstance(e, Stepped))
    found = tree(events)
    data = tree_json(found)
    assert len(data["nodes"]) == tokens + 1
    nodes = {node["node"]: node for node in data["nodes"]}
    (winner,) = [node for node in data["nodes"] if node["state"] == "returned"]
    text, at = "", winner
    while at["parent"] is not None:
        text, at = at["text"] + text, nodes[at["parent"]]
    assert final.startswith(text)
    ends = [node for node in data["nodes"] if not any(other["parent"] == node["node"] for other in data["nodes"])]
    lines = tree_lines(found)
    marks = sum(bool(re.search("[★○] .*score|✗ died|… left|live, total|live$", line.plain)) for line in lines[1:-1])
    assert marks == len([end for end in ends if end["parent"] is not None])


def test_a_line_is_never_wider_than_asked_unless_nesting_leaves_no_room() -> None:
    for width in (40, 60, 80):
        assert all(len(line.rstrip()) <= width for line in drawn(search(prompt="word " * 40), width))


def test_a_long_search_is_drawn_without_recursion_and_nests_only_where_it_forks() -> None:
    steps = [([(0, f" w{n}", -0.1), (0, f" x{n}", -3.0)], []) for n in range(3000)]
    lines = drawn(search([*steps, ([], [(0, ".", -0.1, "eos")])]))
    assert len(lines) == 6002
    assert all(line[5:].startswith(("┠─ ", "┣▸ ", "┗▸ ")) for line in lines[1:-1])
    assert max(line.find("w2999") for line in lines) < 12


def test_a_run_that_was_cut_short_shows_what_still_lived() -> None:
    lines = drawn(list(search())[:4])
    assert sum("live, total" in line for line in lines) == 3


def test_rows_that_lived_when_the_search_ended_are_told_from_those_that_died() -> None:
    steps = [([(0, "a", -0.1), (0, "b", -0.2), (0, "c", -0.3)], []), ([(0, "d", -0.1)], [(1, "", -0.1, "eos")])]
    states = {node.token.text: node.state for node in tree(search(steps)).nodes if node.token}
    assert states == {"a": "inner", "b": "inner", "c": "died", "d": "left", "": "returned"}


HOSTILE = '"];}\\ \\n\n\t\x1b[31m\x00\u202e&amp;<b>\ud800'


def hostile() -> list[Event]:
    done = Hypothesis((1, 2), -1.0, -1.0, "stop", -0.5, stop=HOSTILE, text=HOSTILE)
    rows = (Row("0", 0, (Token(1, -1.0, HOSTILE),), -1.0, float("-inf")),)
    ended = Ended("0", 0, (Token(2, float("-inf"), HOSTILE),), done)
    return [
        Began("0", HOSTILE, "beam", HOSTILE),
        Stepped("0", 0, rows),
        Stepped("0", 1, (), (ended,)),
        Finished("0", (done,)),
    ]


def test_the_tree_on_a_terminal_and_in_json_is_harmless_too() -> None:
    found = tree(hostile())
    for line in tree_lines(found, 80):
        assert line.plain.isprintable() or not set(line.plain) & set("\x1b\x00\u202e\t\n\ud800")
    data = json.loads(json.dumps(tree_json(found), allow_nan=False))
    assert data["nodes"][1]["text"] == HOSTILE
    assert data["nodes"][1]["total"] is None


def test_independent_rows_make_a_tree_as_well() -> None:
    lines = drawn(lane("0", [["a", "b"], ["c", "d"]]))
    assert lines[1:3] == [
        "1 ┣━ cd  ★ 2 · score -0.481 · cut at max_new_tokens",
        "1 ┗▸ ab  ★ 1 · score -0.481 · ended by itself",
    ]


def test_branches_that_died_are_dim_all_along() -> None:
    steps = [
        ([(0, "a", -0.1), (0, "b", -0.2)], []),
        ([(0, "c", -0.1), (1, "d", -0.1), (1, "e", -0.1)], []),
        ([(0, "f", -0.1)], []),
        ([], [(0, "", -0.1, "eos")]),
    ]
    styles = {}
    for line in tree_lines(tree(search(steps))):
        text = line.plain.split(" ", 2)[-1]
        styles[text.split("  ")[0]] = str(line.spans[-1].style) if line.spans else str(line.style)
    assert "not dim" not in styles["b"]
    assert {name for name, style in styles.items() if "not dim" in style} == {"acf"}


def test_a_lane_that_failed_has_no_tree() -> None:
    trees = SearchTrees()
    for event in (Began("0", "p", "beam"), Failed("0", "input", "no")):
        trees.feed(event)
    assert list(trees.take_all()) == []
