"""The heat map: each token's digit under its first cell, no control sequence obeyed, nothing wider than the page."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.text import Text

from genctl.commands.score import job
from genctl.engines.protocol import Scored
from genctl.events import Token
from genctl.terminal import theme, widgets
from tests.screens import check_screen
from tests.terminal.streams import STORY, console, written
from tests.terminal.streams import token as made_up

SCREENS = Path(__file__).parent / "screens"


def token(text: str, probability: float, id: int = 7) -> Token:
    return Token(id, math.log(probability), text, 1, 0.5)


def plain(lines: list[Text]) -> list[str]:
    return [line.plain for line in lines]


def test_a_digit_stands_under_each_token() -> None:
    lines = job.heat("", "", [token("once", 0.05), token(" upon", 0.999), token(" a", 0.5), token("way", 0.31)], 80)
    assert plain(lines) == ["once upon away", "0    9    53"]


def test_colour_and_digit_say_the_same() -> None:
    text, digits = job.heat("", "", [token("a", 0.1), token(" b", 0.9)], 80)
    assert [span.style for span in text.spans] == [theme.colour(0.1), theme.colour(0.9)]
    assert digits.plain == "1 9"
    assert [span.style for span in digits.spans] == [theme.colour(0.1), theme.colour(0.9)]


def test_what_has_no_score_comes_first_without_digits() -> None:
    assert plain(job.heat("The sky", " is", [token(" blue", 0.7)], 80)) == ["The sky is blue", "           7"]


def test_words_stay_whole_and_long_ones_are_cut() -> None:
    words = [token("one", 0.1), token(" tw", 0.2), token("o", 0.3), token(" threefour", 0.4)]
    assert plain(job.heat("", "", words, 6)) == ["one", "1", "two", "2 3", "threef", "4", "our"]


def test_a_new_line_is_shown_and_breaks_the_line() -> None:
    assert plain(job.heat("", "", [token("a", 0.1), token("\n\n", 0.2), token("b", 0.3)], 80)) == [
        "a↵",
        "12",
        "↵",
        "b",
        "3",
    ]


def test_tokens_that_share_a_character_are_one_with_the_product() -> None:
    lines = job.heat("", "", [token("", 0.5), token("", 0.5), token("日", 0.9), token("本", 0.8)], 80)
    assert plain(lines) == ["日本", "2 8"]
    assert plain(job.heat("", "", [token("a", 0.9), token("", 0.5, id=5)], 80)) == ["a‹id 5›", "95"]


def test_wide_characters_never_reach_over_the_edge() -> None:
    lines = job.heat("", "", [token("日本語日本語", 0.5), token("\u0301", 0.5)], 5)
    assert all(cell_len(line.plain) <= 5 for line in lines)
    assert "".join(line.plain for line in lines if not line.plain.strip().isdigit()) == "日本語日本語\u0301"


def test_hostile_text_is_shown_and_not_obeyed() -> None:
    out = console(colour=False, terminal=True)
    for line in job.heat(
        "\x1b[2J", "", [token("\x1b]0;gone\x07", 0.5), token("[red]\u202e", 0.5), token("\r", 0.5)], 80
    ):
        out.print(line)
    assert written(out).splitlines()[0] == "␛[2J␛]0;gone␇[red]⟨U+202E⟩␍"
    entry = scored("\x1b[2J[red]\n", 1.0, 1, 3)
    out = console(terminal=True)
    for line in job.ranking([entry], "x", 80):
        out.print(line)
    assert "\x1b" not in written(out)
    assert "␛[2J[red]↵" in written(out)


@pytest.mark.parametrize("value", [1.0, 1.49764, 999.9, 123456.7, math.inf])
def test_perplexities_stay_short(value: float) -> None:
    assert len(widgets.perplexity(value)) <= 9


def scored(text: str, nll: float, count: int, size: int) -> Scored:
    return Scored(text, (), nll, count, size, ())


def check(name: str, lines: list[Text]) -> None:
    out = console(80)
    for line in lines:
        assert cell_len(line.plain) <= 80
        out.print(line)
    check_screen(SCREENS / f"{name}.txt", written(out))


TOKENS = [made_up(step, text) for step, text in enumerate(STORY)]


def test_the_heat_map_at_80_columns() -> None:
    figures = Text(job.figures(scored("", 61.25, 1234, 169)))
    check("heat_80", [*job.heat("Under the old oak", "", TOKENS, 80), figures, job.legend()])


def test_the_table_of_tokens_at_80_columns() -> None:
    check("tokens_80", job.token_table(TOKENS[:6], 80, 3))


def test_the_ranking_at_80_columns() -> None:
    entries = [
        scored(" Paris", 0.5, 1, 6),
        scored(" London, which is not the capital of France at all", 45.0, 10, 50),
        scored("", 1800.0, 2, 0),
    ]
    check("ranking_80", job.ranking(entries, "mean log-probability", 80))
    assert max(len(line.plain) for line in job.ranking(entries, "mean", 60)) <= 60
