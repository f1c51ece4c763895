"""Every key of the full screen, with the built-in model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genctl.commands.explore.formats import lines_of
from genctl.commands.explore.panes import KEYS
from genctl.commands.explore.screen import ExploreApp
from genctl.tree.commands import COMMANDS
from tests.commands.explore.app import Shown, play, played
from tests.tree.trees import explorer

SIZES = [(60, 30), (80, 24), (140, 40)]
each_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: str(size[0]))


def rows(app: ExploreApp) -> dict[int, Any]:
    """The rows of the tree, by the last node in each."""
    found, waiting = {}, [*app.tree_pane.root.children]
    while waiting:
        row = waiting.pop()
        found[row.data] = row
        waiting += row.children
    return found


@each_size
def test_space_generates_and_the_panes_show_it(size: tuple[int, int]) -> None:
    async def part(shown: Shown) -> None:
        assert "no tokens yet" in shown.text
        await shown.press("space")
        tree = shown.tree
        assert tree.depths[tree.tip] == 6
        written = "".join(tree.nodes[node].text for node in tree.path(tree.tip))
        assert written[:8] in shown.text.replace("\n", " ")
        assert all(len(line) <= size[0] for line in shown.lines)
        await shown.press("home")
        assert shown.app.choices.size.height >= (8 if size[0] == 60 else 16)
        heading = next(line for line in shown.lines if "prob" in line and "rank" in line)
        line = next(line for line in shown.lines if line.count("%") == 2)
        assert heading.index("prob") == line.index("%") - 5  # headings are above their columns
        assert heading.index("final") == line.rindex("%") - 5

    play(part, size=size)


@played()
async def test_arrows_move_the_cursor_and_the_alternatives_follow_it(shown: Shown) -> None:
    await shown.press("space")
    app, branch = shown.app, shown.tree.path(shown.tree.tip)
    assert app.at.cursor == branch[-1]
    await shown.press("left", "left")
    assert app.at.cursor == branch[-3]
    assert app.choices.selected == shown.tree.nodes[branch[-2]].id
    await shown.press("right")
    assert app.at.cursor == branch[-2]
    await shown.press("home")
    assert app.at.cursor == 0
    await shown.press("end")
    assert app.at.cursor == branch[-1]


@played()
async def test_enter_takes_the_alternative_and_generates_on(shown: Shown) -> None:
    await shown.press("space", "home", "right", "right", "down", "down")
    wanted = shown.app.choices.selected
    before = len(shown.tree)
    await shown.press("enter")
    tree = shown.tree
    taken = tree.path(tree.tip)[2]
    assert tree.nodes[taken].id == wanted
    assert tree.nodes[taken].by == "take"
    assert tree.depths[tree.tip] > 3
    assert len(tree) > before
    assert shown.app.at.tip == tree.tip


@played(lambda: explorer(max_new_tokens=12, temperature=2.0, do_sample=True))
async def test_a_digit_samples_that_many_continuations(shown: Shown) -> None:
    await shown.press("3")
    tree = shown.tree
    assert len(tree.steps) == 1
    assert tree.steps[0].line == "sample 3"
    assert len(tree.leaves) > 1
    assert rows(shown.app).keys() >= tree.leaves.keys()


@played()
async def test_e_edits_the_text_from_here_and_forks(shown: Shown) -> None:
    await shown.press("space", "home", "right", "right", "e")
    assert shown.app.line.value == 'edit " was a curious girl"'
    await shown.pilot.press("ctrl+u")
    await shown.answer('edit " a cat sat')
    tree = shown.tree
    assert "".join(tree.nodes[node].text for node in tree.path(tree.tip)).endswith(" a cat sat")
    assert tree.nodes[tree.tip].by == "edit"
    assert len(tree.leaves) == 2


@played(lambda: explorer(max_new_tokens=6, do_sample=True))
async def test_s_changes_a_knob_and_the_distribution_without_a_forward_pass(shown: Shown) -> None:
    await shown.press("space", "home", "right", "right")
    branches = shown.app.explorer.branches
    read = branches.read_tokens
    await shown.press("s")
    await shown.answer("top_k=2")
    found = shown.app.choices.distribution
    assert found is not None
    order = found.order
    assert [found.of(int(id)).processed > float("-inf") for id in order[:3]] == [True, True, False]
    assert "top_k" in next(line for line in shown.lines if " –" in line)
    assert branches.read_tokens == read
    await shown.press("p")
    await shown.answer("greedy")
    assert shown.tree.settings["do_sample"] is False
    await shown.press("s")
    await shown.answer("top_q=2")
    assert "unknown setting" in shown.text


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("top_p=2", "set: top_p = 2: must be at most 1"),
        ("temperature=-1", "set: temperature = -1"),
        ("temprature=1", "unknown setting 'temprature'; did you mean temperature?"),
        ("dtype=float16", "dtype"),
        ("top_p=", "top_p"),
        ("=2", "set: got '=2'"),
        ("top_p", "set: got 'top_p'"),
        ("num_beams=2 top_p=1", "num_beams"),
        ("prompt_lookup_num_tokens=-1", "prompt_lookup_num_tokens"),
    ],
)
def test_a_setting_that_cannot_be_used_is_one_line_and_changes_nothing(answer: str, words: str) -> None:
    async def part(shown: Shown) -> None:
        tree = shown.tree
        at, steps = tree.at, list(tree.steps)
        await shown.press("s")
        await shown.answer(answer)
        assert (tree.at, list(tree.steps), tree.settings) == (at, steps, {})
        assert shown.app.failed
        assert words in shown.app.answer, shown.app.answer
        assert "\n" not in shown.app.answer
        assert sum(shown.app.answer[:40] in line for line in shown.lines) == 1
        await shown.press("space")
        assert "generate: done" in shown.text

    play(part, explorer(max_new_tokens=3, do_sample=True, top_p=0.9))


@played(lambda: explorer(max_new_tokens=3, do_sample=True, top_p=0.9))
async def test_a_temperature_of_0_takes_the_best_token(shown: Shown) -> None:
    await shown.press("s")
    await shown.answer("temperature=0")
    assert not shown.app.failed, shown.app.answer
    found = shown.app.choices.distribution
    assert found is not None
    assert found.of(int(found.processed.argmax())).rank == 1
    await shown.press("space")
    assert "generate: done" in shown.text
    assert all(shown.tree.nodes[node].rank == 1 for node in shown.tree.path(shown.tree.tip)[1:])
    await shown.press("3")  # decoding is greedy, so there are no samples
    assert "temperature = 0 takes the best one" in shown.text
    assert len(shown.tree) == 3


@played()
async def test_u_undoes(shown: Shown) -> None:
    await shown.press("space", "u")
    assert len(shown.tree) == 0
    assert "no tokens yet" in shown.text
    await shown.press("u")
    assert "nothing is left to undo" in shown.text
    await shown.press("space")  # node numbers are reused
    assert len(shown.tree) == 6
    assert shown.app.choices.distribution.node == shown.tree.tip  # type: ignore[union-attr]


@played()
async def test_b_searches_and_shows_what_it_found(shown: Shown) -> None:
    await shown.press("b")
    assert shown.tree.steps[0].line == "beams"
    assert len(shown.tree.leaves) == 4
    assert "beams: done" in shown.text


@pytest.mark.parametrize("line", ["show 5", "find the", "why"])
@pytest.mark.parametrize("size", [(80, 24), (140, 40)], ids=lambda size: str(size[0]))
def test_a_dialog_shows_what_a_script_writes(line: str, size: tuple[int, int]) -> None:
    made = explorer(max_new_tokens=6, do_sample=False)
    for each in ("generate", "left 5", "set repetition_penalty=1.3"):
        list(made.do(each))
    written = [text for result in list(made.do(line)) for text in lines_of(result)]
    assert len(written) >= 2

    async def part(shown: Shown) -> None:
        await shown.press("colon")
        await shown.answer(line)
        assert f"{line}: " in shown.text
        for text in written[:12]:  # the rest is scrolled out
            assert "".join(text.split())[:20] in "".join(shown.text.split()).replace("│", "")
        await shown.press("escape")
        assert len(shown.app.screen_stack) == 1

    play(part, made, size=size)


def test_a_text_that_has_ended_stops_and_its_alternatives_are_marked() -> None:
    async def part(shown: Shown) -> None:
        assert "next token (after EOS)" in shown.text
        await shown.press("space")
        assert "the text ends here (EOS); take or edit continues after it" in shown.text
        assert len(shown.tree) == 1
        await shown.press("left")
        assert "next token ─" in shown.text
        await shown.press("right", "enter")
        assert "after EOS: the text ends at node 1" in shown.text
        assert len(shown.tree) > 1

    made = explorer(max_new_tokens=3, do_sample=False)
    list(made.do("take id:2"))
    play(part, made)


@played()
async def test_tab_moves_the_focus_and_enter_opens_a_branch_of_the_tree(shown: Shown) -> None:
    await shown.press("space", "home", "right", "down", "enter")
    app = shown.app
    here = app.at.tip
    await shown.press("tab")
    assert app.focused is app.tree_pane
    other = next(end for end in shown.tree.leaves if end != here)
    app.tree_pane.move_cursor(rows(app)[other])
    await shown.press("enter")
    assert app.at.tip == other
    assert rows(app)[other].label.plain.startswith("▸")
    await shown.press("tab")
    assert app.focused is app.choices


@played()
async def test_the_mouse_selects_and_takes(shown: Shown) -> None:
    await shown.press("space", "home", "right")
    app, branch = shown.app, shown.tree.path(shown.tree.tip)
    await shown.pilot.click("#alternatives", offset=(5, 4))
    await shown.settled()
    assert app.choices.cursor_row == 2
    await shown.pilot.click("#alternatives", offset=(5, 4))
    await shown.settled()
    assert shown.tree.steps[-1].line.startswith("take id:")
    await shown.pilot.click("#tree", offset=(5, 1 + rows(app)[branch[-1]].line))
    await shown.settled()
    assert app.at.tip == branch[-1]


@played()
async def test_keys_that_arrive_together_act_in_their_order(shown: Shown) -> None:
    await shown.burst(":set max_new_tokens=3\r:take 1 0\r")
    assert shown.tree.settings == {"max_new_tokens": 3}
    assert [step.line for step in shown.tree.steps] == ["set max_new_tokens=3", "take 1 0"]


def test_a_key_is_answered_while_the_model_writes() -> None:
    made = explorer(max_new_tokens=40, do_sample=False)

    async def part(shown: Shown) -> None:
        await shown.send("space")
        while len(shown.tree) < 3:
            await shown.pilot.pause(0.01)
        await shown.send("home", "b", "space")
        await shown.settled()
        assert shown.app.at.cursor == 0  # where the user moved it
        assert [step.line for step in shown.tree.steps] == ["generate"]  # one command at a time
        assert len(shown.tree) < 40

    do = made.do

    def slow(line: str) -> Iterator[Any]:
        for result in do(line):
            yield result
            time.sleep(0.05)

    made.do = slow  # type: ignore[assignment, method-assign]
    play(part, made)


@played()
async def test_c_copies_the_text_of_the_branch(shown: Shown) -> None:
    await shown.press("space", "c")
    tree = shown.tree
    assert shown.app.clipboard == "".join(tree.nodes[node].text for node in tree.path(tree.tip))


def test_every_key_of_the_table_has_an_action() -> None:
    for key in KEYS:
        name = key.action.split("(")[0]
        assert not name or hasattr(ExploreApp, f"action_{name}")


def test_the_documents_have_every_key() -> None:
    document = (Path(__file__).parents[3] / "docs" / "explore.md").read_text(encoding="utf-8")
    rows = [f"| `{key.shown}` | {key.about} |" for key in KEYS if key.shown]
    assert "\n".join(("| key | what it does |", "|---|---|", *rows)) in document


@played()
async def test_a_key_completes_the_line_and_no_key_leaves_it_for_the_tree(shown: Shown) -> None:
    app = shown.app
    await shown.burst(":gen")
    await shown.press("right")
    assert app.line.value == "generate"
    await shown.press("home", "x", "end", "left", "right")
    assert app.focused is app.line
    assert app.line.value == "xgenerate"
    assert len(shown.tree) == 0
    await shown.press("escape")
    assert app.focused is app.choices
    assert not app.line.display


@pytest.mark.parametrize("keys", ["?", ":help\r"])
def test_help_has_keys_and_commands(keys: str) -> None:
    async def part(shown: Shown) -> None:
        await shown.burst(keys)
        for first in (key.shown for key in KEYS):
            assert first in shown.text
        for command in COMMANDS.values():
            assert command.usage in shown.text

    play(part, size=(120, 110))


@pytest.mark.parametrize("in_line", [False, True])
def test_quit_leaves(in_line: bool) -> None:
    async def part(shown: Shown) -> None:
        if in_line:
            await shown.press("colon")
            await shown.answer("quit")
        else:
            await shown.press("q")

    assert play(part).return_code == 0
