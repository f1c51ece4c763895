"""Every key of the full screen, with the built-in model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genctl.commands.explore.formats import lines_of
from genctl.commands.explore.screen_keys import KEYS, markdown_table
from genctl.commands.explore.screen_source import TreeSource
from genctl.tree.explorer import Explorer
from genctl.tree.journal import read_tree
from tests.commands.explore.app import Shown, play
from tests.tree.trees import explorer, stories

SIZES = [(60, 30), (80, 24), (140, 40)]
each_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: str(size[0]))


@each_size
def test_space_generates_and_the_panes_show_it(size: tuple[int, int]) -> None:
    async def part(shown: Shown) -> None:
        assert "no tokens yet" in shown.text
        await shown.press("space")
        tree = shown.tree
        assert tree.depths[tree.tip] == 6
        written = "".join(tree.nodes[node].text for node in tree.branch())
        assert written[:8] in shown.text.replace("\n", " ")
        assert "entropy" in shown.text
        assert f"logprob {tree.joints[tree.tip]:.3f}" in shown.text
        assert all(len(line) <= size[0] for line in shown.lines)

    play(part, size=size)


def test_arrows_move_the_cursor_and_the_alternatives_follow_it() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space")
        app, branch = shown.app, shown.tree.branch()
        assert app.place.cursor == branch[-1]
        await shown.press("left", "left")
        assert app.place.cursor == branch[-3]
        assert app.choices.selected == shown.tree.nodes[branch[-2]].id
        await shown.press("right")
        assert app.place.cursor == branch[-2]
        await shown.press("home")
        assert app.place.cursor == 0
        await shown.press("end")
        assert app.place.cursor == branch[-1]

    play(part)


def test_enter_takes_the_alternative_and_generates_on() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space", "home", "right", "right", "down", "down")
        wanted = shown.app.choices.selected
        before = len(shown.tree)
        await shown.press("enter")
        tree = shown.tree
        taken = tree.branch()[2]
        assert tree.nodes[taken].id == wanted
        assert tree.nodes[taken].by == "take"
        assert tree.depths[tree.tip] > 3
        assert len(tree) > before
        assert shown.app.place.tip == tree.tip

    play(part)


def test_a_digit_samples_that_many_continuations() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("3")
        tree = shown.tree
        assert len(tree.steps) == 1
        assert tree.steps[0].line == "sample 3"
        assert len(tree.leaves) > 1
        assert len(shown.app.tree_pane.rows.parts) >= len(tree.leaves)

    play(part, explorer(max_new_tokens=12, temperature=2.0, do_sample=True))


def test_b_beams_and_shows_the_rows_while_it_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    do = TreeSource.do

    def slow(self: TreeSource, line: str, /) -> Iterator[Any]:
        for result in do(self, line):
            yield result
            time.sleep(0.02)  # else the search may be over before the screen draws

    monkeypatch.setattr(TreeSource, "do", slow)

    async def part(shown: Shown) -> None:
        drawn: list[int] = []
        show = shown.app.beams.show
        shown.app.beams.show = lambda history: (drawn.append(len(history.rows)), show(history))[1]  # type: ignore[method-assign]
        await shown.press("b")
        assert drawn
        assert max(drawn) == 4
        assert shown.tree.steps[0].line == "beams"
        assert shown.app.choices.display
        assert not shown.app.beams.display

    play(part)


def test_e_edits_the_text_from_here_and_forks() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space", "home", "right", "e")
        await shown.pilot.press("f7", "delete")
        await shown.type(" a cat sat")
        await shown.press("f2")
        tree = shown.tree
        assert "".join(tree.nodes[node].text for node in tree.branch()).endswith(" a cat sat")
        assert tree.nodes[tree.tip].by == "edit"
        assert len(tree.leaves) == 2

    play(part)


def test_escape_leaves_the_editor_and_nothing_changes() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space")
        before = len(shown.tree)
        await shown.press("home", "e", "x", "escape")
        assert len(shown.tree) == before
        assert len(shown.app.screen_stack) == 1

    play(part)


def test_u_undoes_and_capital_u_redoes() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space", "u")
        assert len(shown.tree) == 0
        assert "no tokens yet" in shown.text
        await shown.press("U")
        assert len(shown.tree) == 6
        assert shown.app.place.tip == shown.tree.tip
        await shown.press("U")
        assert "nothing is left to redo" in shown.text

    play(part)


def test_n_goes_to_the_uncertain_tokens() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space", "home")
        tree, app = shown.tree, shown.app
        places = [tree.nodes[node].parent for node in tree.branch()[1:] if tree.nodes[node].entropy >= 1.0]
        assert places
        for place in places:
            await shown.press("n")
            assert app.place.cursor == place
        await shown.press("n")
        assert "no token after this one" in shown.text
        for place in places[-2::-1]:
            await shown.press("N")
            assert app.place.cursor == place

    play(part, explorer(max_new_tokens=16, do_sample=False))


def test_s_changes_a_knob_and_the_distribution_without_a_forward_pass() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space", "home", "right", "right")
        space = shown.app.source.explorer.space  # type: ignore[attr-defined]
        read = space.branches.read_tokens
        await shown.press("s")
        await shown.answer("top_k=2")
        look = shown.app.look
        assert look is not None
        order = look.first.order
        assert [look.first.of(int(id)).processed > float("-inf") for id in order[:3]] == [True, True, False]
        assert look.first.how(int(order[2])) == "top_k 2 at 3"
        assert "top_k 2 at 3" in shown.text
        assert space.branches.read_tokens == read
        await shown.press("s")
        await shown.answer("greedy")
        assert shown.tree.knobs["do_sample"] is False
        await shown.press("s")
        await shown.answer("top_q=2")
        assert "unknown setting" in shown.text

    play(part, explorer(max_new_tokens=6, do_sample=True))


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
        ("nowhere", "no such preset"),
        ("num_beams=2 top_p=1", "num_beams"),
        ("prompt_lookup_num_tokens=-1", "prompt_lookup_num_tokens"),
    ],
)
def test_a_setting_that_cannot_be_used_is_one_line_and_changes_nothing(answer: str, words: str) -> None:
    async def part(shown: Shown) -> None:
        tree = shown.tree
        view, steps = tree.view, list(tree.steps)
        await shown.press("s")
        await shown.answer(answer)
        assert (tree.view, list(tree.steps), len(tree.settings)) == (view, steps, 1)
        assert shown.app.failed
        assert words in shown.app.answer, shown.app.answer
        assert "\n" not in shown.app.answer
        assert sum(shown.app.answer[:40] in line for line in shown.lines) == 1
        await shown.press("space")
        assert "generate: done" in shown.text

    play(part, explorer(max_new_tokens=3, do_sample=True, top_p=0.9))


def test_a_temperature_of_0_takes_the_best_token() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("s")
        await shown.answer("temperature=0")
        assert not shown.app.failed, shown.app.answer
        look = shown.app.look
        assert look is not None
        assert look.first.of(look.first.best).rank == 1
        await shown.press("space")
        assert "generate: done" in shown.text
        assert all(shown.tree.nodes[node].rank == 1 for node in shown.tree.branch()[1:])
        await shown.press("3")  # nothing is drawn, so there are no samples
        assert "temperature = 0 takes the best one" in shown.text
        assert len(shown.tree) == 3

    play(part, explorer(max_new_tokens=3, do_sample=True, top_p=0.9))


def test_x_expands_and_says_what_is_covered() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("x")
        assert shown.app.prompt.value == "mass=0.9,depth=6"
        await shown.pilot.press("ctrl+u")
        await shown.answer("mass=0.5,depth=2")
        assert "of the mass" in shown.text
        assert "continuation" in shown.text
        assert len(shown.tree) >= 2

    play(part)


def test_m_bookmarks_the_place() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space", "left", "m")
        assert dict(shown.tree.bookmarks) == {"m1": shown.app.place.cursor}
        assert "★m1" in shown.text

    play(part)


@each_size
def test_d_shows_two_branches_side_by_side(size: tuple[int, int]) -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space", "d")
        assert "press d again" in shown.text
        first = "".join(shown.tree.nodes[node].text for node in shown.tree.branch()[2:])
        await shown.press("home", "right", "right", "down", "enter", "d")
        second = "".join(shown.tree.nodes[node].text for node in shown.tree.branch()[2:])
        seen = " ".join(shown.text.split())
        assert "they part here" in seen
        assert first.split()[0] in seen
        assert second.split()[0] in seen
        await shown.press("escape")
        assert len(shown.app.screen_stack) == 1

    play(part, size=size)


@pytest.mark.parametrize("line", ["layers", "show 5", "find the", "why", "repeat"])
@pytest.mark.parametrize("size", [(80, 24), (140, 40)], ids=lambda size: str(size[0]))
def test_a_dialog_shows_what_a_script_writes(line: str, size: tuple[int, int]) -> None:
    made = explorer(max_new_tokens=6, do_sample=False)
    for each in ("generate", "left 5", "set repetition_penalty=1.3"):
        made.all(each)
    written = [text for result in made.all(line) for text in lines_of(result)]
    assert len(written) >= (1 if line == "repeat" else 2)

    async def part(shown: Shown) -> None:
        await shown.press("colon")
        await shown.answer(line)
        assert f"{line}: " in shown.text
        for text in written[:12]:  # the rest is scrolled
            assert "".join(text.split())[:20] in "".join(shown.text.split()).replace("│", "")
        if line == "layers":
            assert shown.text.count("(written: rank ") == len(written), "each line keeps what it says of the token"
        await shown.press("escape")
        assert len(shown.app.screen_stack) == 1

    play(part, made, size=size)


def test_the_heads_stand_above_their_columns_after_a_beam_search() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space", "home")
        before = next(line for line in shown.lines if "rank token" in line)
        await shown.press("b")
        assert next(line for line in shown.lines if "rank token" in line) == before

    play(part)


def test_c_copies_the_text_of_the_branch() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space", "c")
        tree = shown.tree
        assert shown.app.clipboard == "".join(tree.nodes[node].text for node in tree.branch())

    play(part)


def test_y_shows_and_copies_the_command_that_repeats_the_branch() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space", "y")
        assert "genctl run" in shown.text
        assert "genctl run" in shown.app.clipboard

    play(part)


def test_slash_filters_the_alternatives() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("slash")
        await shown.app.workers.wait_for_complete()
        await shown.type("girl")
        choices = shown.app.choices
        texts = [choices.first.of(choices._id_at(row)).text for row in range(len(choices))]  # type: ignore[union-attr]
        assert texts
        assert all("girl" in text for text in texts)
        await shown.press("enter", "escape")
        assert len(choices) == len(choices.first)  # type: ignore[arg-type]

    play(part)


def test_the_question_mark_shows_every_key() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("question_mark")
        for key in KEYS:
            assert not key.shown or key.shown in shown.text
        await shown.press("escape")

    play(part, size=(100, 50))


def test_q_leaves() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("q")

    assert play(part).return_value == 0


def test_every_key_of_the_table_has_an_action() -> None:
    app = play(_nothing)
    for key in KEYS:
        name = key.action.split("(")[0].removeprefix("app.")
        assert hasattr(app, f"action_{name}")


async def _nothing(shown: Shown) -> None:
    pass


def test_tab_moves_the_focus_and_enter_opens_a_branch_of_the_tree() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space", "home", "right", "down", "enter")
        app = shown.app
        here = app.place.tip
        await shown.press("tab")
        assert app.focused is app.tree_pane
        rows = [part.end for part in app.tree_pane.rows.parts]
        other = next(end for end in rows if end in shown.tree.leaves and end != here)
        await shown.press(*(["up"] * len(rows)), *(["down"] * rows.index(other)), "enter")
        assert app.place.tip == other
        await shown.press("tab")
        assert app.focused is app.text_pane

    play(part)


def test_a_command_line_does_what_a_script_does() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("colon")
        await shown.answer("generate 3")
        assert len(shown.tree) == 3
        await shown.press("colon")
        await shown.answer("generat 3")
        assert "did you mean generate" in shown.text

    play(part)


def test_the_mouse_moves_and_takes() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space")
        app = shown.app
        flow = app.text_pane.flow
        cell = flow.cell_of(3)
        await shown.pilot.click("#text", offset=(cell + 1, 1 + flow.line_of(3)))
        await shown.settled()
        assert app.place.index == 3
        await shown.pilot.click("#alternatives", offset=(5, 2))
        await shown.settled()
        assert app.choices.at == 2
        await shown.pilot.click("#alternatives", offset=(5, 2), times=2)
        await shown.settled()
        assert shown.tree.steps[-1].line.startswith("take id:")
        await shown.pilot.click("#tree", offset=(5, 1))
        await shown.settled()
        assert app.place.tip == app.tree_pane.selected

    play(part)


def test_without_colour_digits_show_the_probabilities() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space")
        flow, lines = shown.app.text_pane.flow, shown.lines
        row = next(number for number, line in enumerate(lines) if "Once upon a time" in line)
        below = lines[row + 1].split("│")[1]
        for index, piece in enumerate(flow.pieces[1:], 1):
            if flow.line_of(index) == 0:
                assert below[flow.cell_of(index)] == str(min(int((piece.probability or 0) * 10), 9))

    play(part, coloured=False)


def test_the_documents_have_every_key() -> None:
    document = (Path(__file__).parents[3] / "docs" / "explore.md").read_text(encoding="utf-8")
    assert markdown_table() in document


@pytest.mark.parametrize("place", [0, 2])
def test_a_resumed_command_that_comes_out_differently_leaves_the_screen_open(place: int, tmp_path: Path) -> None:
    path = tmp_path / "t"
    made = explorer(path, max_new_tokens=6, do_sample=False)
    made.all("generate 4")
    made.close()
    lines = path.read_text().splitlines(keepends=True)
    nodes = [number for number, line in enumerate(lines) if '"grown"' in line]
    other = json.loads(lines[nodes[place]]) | {"id": 99, "text": " another"}
    path.write_text("".join([*lines[: nodes[place]], json.dumps(other) + "\n"]))
    content = path.read_bytes()
    again = Explorer.reopen(stories(), path)

    async def part(shown: Shown) -> None:
        assert "does not come out the same here" in shown.text
        assert " another" in shown.text
        assert path.read_bytes() == content
        assert len(shown.tree) == place + 1
        await shown.press("space")
        assert "generate: done" in shown.text
        assert len(shown.tree) > place + 1
        await shown.pilot.press("q")

    app = play(part, again, first_command="resume")
    again.close()
    assert app.return_code == 0
    assert read_tree(path) == again.tree
