"""Numbers as they are shown: no negative zero, no exponents where digits fit, no seed that nothing used."""

from __future__ import annotations

from genctl.events import Began
from genctl.render import token_heat, widgets
from genctl.render.beam_picture import from_word
from genctl.render.run_history import Path, RunHistory, fold
from tests.render.streams import token


def test_what_rounds_to_nothing_has_no_sign() -> None:
    assert [widgets.rounded(value) for value in (-0.0, -0.0004, -0.0006, 0.0)] == ["0.000", "0.000", "-0.001", "0.000"]


def test_a_large_perplexity_is_written_in_digits() -> None:
    assert [token_heat.number(value) for value in (2.5, 2238.4, 2051000.0, 3e12)] == [
        "2.5000",
        "2,238",
        "2,051,000",
        "3.00e+12",
    ]


def test_only_runs_that_draw_have_a_seed_in_the_summary() -> None:
    for strategy, seed in (("greedy", None), ("sample", 7)):
        assert fold(RunHistory(), Began("0", "p", strategy, "m", 7)).totals.seed == seed


def test_a_dead_row_shows_its_whole_word() -> None:
    path = Path().grow((token(0, " was"), token(1, " P"), token(2, "ip")))
    assert from_word(path, 6) == "Pip"
    assert from_word(path, 4) == "Pip"
    assert from_word(path, 0) == "was Pip"
