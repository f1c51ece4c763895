"""A search on a terminal: rows that evolve, text that settles, the table and the formula; cut to the screen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from genctl.commands.run.run_view import RunView
from genctl.events import Began, Event, Failed, Finished, Hypothesis, Row, Stepped, Token
from genctl.terminal.explain import formula, penalty_of
from genctl.terminal.text_width import last_cells, wrap
from tests.terminal.beams import random_searches, search
from tests.terminal.streams import Clock, Terminal, check_screen, console, history, woven, written


def play(events: Iterable[Event], out: Console, err: Console | None = None, **asked: Any) -> RunView:
    clock = Clock()
    view = RunView(out, err or console(out.width), clock=clock, **asked, beams=True)
    with view:
        for event in events:
            clock.now += 0.1
            view.feed(event)
    return view


def test_several_returned_sequences_and_prompts_stand_in_labelled_blocks() -> None:
    terminal, err = Terminal(80, 24), console(80)
    events = woven(
        search(returned=2), search(lane="1", prompt="Over the hill", penalty=-1.0), iter([Failed("2", "input", "no")])
    )
    play(events, terminal.console, err, labels=True)
    check_screen("beam_several_80", f"{terminal.everything()}{'=' * 80}\n{written(err)}")


@given(random_searches())
def test_the_result_is_on_the_screen_in_full_whatever_the_search_did(made: tuple[str, list[Event], str]) -> None:
    _, events, final = made
    terminal = Terminal(20, 10)
    play(events, terminal.console, quiet=True, details=False)
    lines = [line.rstrip() for line in final.split("\n")]
    assert terminal.everything().split("\n")[: len(lines)] == lines or len(final) > 20


@pytest.mark.parametrize("height", [2, 4, 7, 12])
@pytest.mark.parametrize("beams", [2, 9, 40])
def test_the_screen_is_never_exceeded_and_nothing_is_left_of_what_moved(height: int, beams: int) -> None:
    steps = [
        ([(min(row, (beams if n else 1) - 1), f" w{n}", -0.1 * (row + 1)) for row in range(beams)], [])
        for n in range(30)
    ]
    final = ([], [(0, ".", -0.1, "eos")])
    terminal = Terminal(60, height)
    play(search([*steps, final], kept=beams), terminal.console)
    text = terminal.everything()
    assert "rank  from" not in text
    assert "under way" not in text
    head = " ".join(text.split("\n\n")[0].split())
    assert head == " ".join(f"w{n}" for n in range(30)) + "."


@given(st.text(), st.integers(1, 30))
def test_the_end_of_a_text_fits_and_is_its_end(text: str, width: int) -> None:
    end = last_cells(text, width)
    assert cell_len(end) <= width
    assert "\n" not in end
    assert "\x1b" not in end


@given(st.lists(st.text(alphabet="ab c\n漢é", max_size=12), max_size=8), st.integers(2, 12))
def test_lines_that_are_full_never_change_when_text_is_added(pieces: list[str], width: int) -> None:
    settled: list[str] = []
    opening = ""
    for piece in pieces:
        *more, opening = wrap(opening + piece, width)
        settled += more
        assert all(cell_len(line.rstrip()) <= width for line in [*more, opening])
    assert [*settled, opening] == wrap("".join(pieces), width)


def test_each_row_names_the_row_that_it_continues() -> None:
    terminal, clock = Terminal(), Clock()
    view = RunView(terminal.console, console(), clock=clock, beams=True)
    for event in list(search())[:4]:
        clock.now += 0.1
        view.feed(event)
    rows = [line for line in terminal.visible() if line[:4].strip() in ("1", "2", "3")]
    assert [line[5:10].strip() for line in rows] == ["1", "1", "2"]
    view.close()


def test_constraint_progress_stands_beside_its_row() -> None:
    terminal, clock = Terminal(), Clock()
    view = RunView(terminal.console, console(), clock=clock, beams=True)
    for event in list(search(kind="constrained-beam", notes=["1/2"]))[:4]:
        clock.now += 0.1
        view.feed(event)
    assert sum("[1/2]" in line for line in terminal.visible()) == 3
    view.close()


def test_where_nothing_may_move_what_is_certain_streams() -> None:
    out = console()
    view = RunView(out, console(), clock=Clock(), beams=True)
    seen = []
    for event in search():
        view.feed(event)
        seen.append(written(out))
    view.close()
    assert seen[2:8] == ["", "", "", "", "", ""]
    assert written(out).startswith(" the old badger sang under the hill.\n\n  rank")
    assert "\x1b" not in written(out)


def test_the_table_tells_returned_kept_and_pushed_out_apart() -> None:
    out = console()
    play(search(returned=1, kept=2), out)
    marks = [line[0] for line in written(out).split("\n") if line[:1] in ("★", "✗") or line[:6].strip().isdigit()]
    assert marks == ["★", " ", *"✗" * 4, "★"]  # the last is the legend


def test_a_hostile_text_is_shown_and_not_obeyed() -> None:
    steps = [([(0, "\x1b[2J", -0.1), (0, "\x9b1A\r", -0.2)], []), ([(0, "[red]\u202e", -0.1), (1, "\t\n", -0.3)], [])]
    ends = [([], [(0, "\x1b]0;x\x07", -0.1, "stop"), (1, "\x00", -0.1, "eos")])]
    terminal = Terminal()
    play(search([*steps, *ends], prompt="\x1b[5m\x07"), terminal.console, echo=True, labels=True)
    assert "␛[5m␇␛[2J[red]⟨U+202E⟩␛]0;x␇" in terminal.everything()
    assert not {"\x07", "\x9b", "\u202e", "\x00"} & set(written(terminal.console))


def test_what_an_interruption_leaves_is_the_best_so_far() -> None:
    out, err = console(), console()
    play(list(search())[:5], out, err)
    assert written(out).startswith(" the old badger\n")
    assert "not finished" in written(err)


def test_a_lane_that_fails_on_the_way_gives_the_screen_back() -> None:
    terminal, err = Terminal(), console()
    play([*list(search())[:5], Failed("0", "model", "broken")], terminal.console, err)
    assert "rank" not in terminal.everything()
    assert written(err) == "error: prompt 1: broken\n"


BEST = Hypothesis((1, 2, 3, 4), -8.0, -8.0, "eos", -2.0)


@pytest.mark.parametrize(
    ("penalty", "score", "line"),
    [
        (1.0, -2.0, "-8.000 / 4 ** 1.0 = -2.000"),
        (2.0, -0.5, "-8.000 / 4 ** 2.0 = -0.500"),
        (0.0, -8.0, "-8.000 / 4 ** 0.0 = -8.000"),
        (-1.0, -32.0, "-8.000 / 4 ** -1.0 = -32.000"),
    ],
)
def test_the_formula_has_its_numbers(penalty: float, score: float, line: str) -> None:
    best = dataclasses.replace(BEST, score=score)
    began = Began("0", "p", "beam", settings={"length_penalty": penalty})
    lane_history = history([began, Finished("0", (best,))])
    assert penalty_of(lane_history) == penalty
    assert formula(lane_history, best) == f"score = total / tokens ** length_penalty = {line}"
    assert -8.0 / 4**penalty == score


def test_a_search_that_finished_nothing_shows_its_rows_until_it_is_cut() -> None:
    rows = (Row("0", 0, (Token(1, -1.0, "a"),), -1.0, -1.0),)
    out = console()
    play([Began("0", "p", "beam"), Stepped("0", 0, rows)], out)
    assert written(out) == "a\n"
