"""Single lines: what they say at 80 columns, and text that tries to be more than text."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import RenderableType

from genctl.commands.inspect import report
from genctl.comparing import statistics
from genctl.errors import count
from genctl.events import Failed, Hypothesis, Row, Stepped, Token, Trace
from genctl.events.history import LaneHistory
from genctl.terminal import explain, theme, widgets
from genctl.terminal.explain import explain_heading, explain_lines, explain_summary
from genctl.terminal.run_history import RunHistory, failure, stop_words
from genctl.terminal.standard_streams import print_message
from tests.terminal.streams import console, token, written

HOSTILE = [
    ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
    ("\x1b]0;title\x07", "␛]0;title␇"),
    ("a\x00b", "a␀b"),
    ("one\rtwo", "one␍two"),
    ("back\x08", "back␈"),
    ("\x7f", "␡"),
    ("\x9b2J", "⟨U+009B⟩2J"),
    ("\x85", "⟨U+0085⟩"),
    ("\u202eevil\u202c", "⟨U+202E⟩evil⟨U+202C⟩"),
    ("\u2066x\u2069", "⟨U+2066⟩x⟨U+2069⟩"),
    ("\u200e\u200f\u061c", "⟨U+200E⟩⟨U+200F⟩⟨U+061C⟩"),
    ("a\u2028b", "a⟨U+2028⟩b"),
    ("\udc80", "⟨U+DC80⟩"),
    ("keep\n\ttabs and 日本 👩‍👩‍👧 é", "keep\n\ttabs and 日本 👩‍👩‍👧 é"),
]


def drawn(width: int, *renderables: RenderableType) -> str:
    out = console(width)
    for one in renderables:
        out.print(one, soft_wrap=False)
    return written(out)


@pytest.mark.parametrize(("text", "shown"), HOSTILE)
def test_characters_that_a_terminal_would_obey_are_shown(text: str, shown: str) -> None:
    assert widgets.visible(text) == shown


@given(st.text(st.characters()))
def test_no_text_leaves_a_control_character_and_showing_twice_is_showing_once(text: str) -> None:
    shown = widgets.visible(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    assert widgets.visible(shown) == shown


@given(st.text(st.characters(), max_size=40), st.sampled_from([60, 80, 120]))
def test_any_token_gives_lines_that_fit(text: str, width: int) -> None:
    one = Token(7, -0.5, text, 3, 1.0, ((7, text, -0.5), (8, text * 9, -1.0)))
    for line in (
        widgets.score_heading(width),
        widgets.score_line(1, one, width),
        *widgets.alternative_lines(one, width, 5),
        widgets.header(width, text, text),
    ):
        assert line.cell_len <= width
        assert "\n" not in line.plain
        assert widgets.visible(line.plain) == line.plain


def test_markup_in_model_output_is_text() -> None:
    one = token(1, "[bold red]x[/]:smile:")
    assert "[bold·red]x[/]:…" in drawn(80, widgets.score_line(1, one))
    assert "[bold·red]x[/]:smile:" in drawn(80, *widgets.alternative_lines(one, 80, 3))


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" fox", "·fox"), ("\n", "\\n"), ("\t", "\\t"), ("a\\n", "a\\\\n"), ("", "‹id 7›"), ("\x1b", "␛")],
)
def test_a_token_is_named_on_one_line(text: str, shown: str) -> None:
    assert widgets.token_text(7, text) == shown


@pytest.mark.parametrize(("name", "shown"), [("</s>", "</s>"), ("\ufffd", "‹id 2›"), ("", "‹id 2›")])
def test_a_token_without_text_goes_by_what_the_alternatives_call_it(name: str, shown: str) -> None:
    line = widgets.score_line(1, Token(2, -0.1, "", 1, 0.5, ((2, name, -0.1), (3, "x", -3.0)))).plain
    assert line.split()[1:-5] == shown.split()


def test_a_bar_is_as_long_as_its_probability_says() -> None:
    assert [widgets.bar(p, 4).plain for p in (0.0, 1e-9, 0.5, 0.53125, 1.0, 2.0, math.nan)] == [
        "    ",
        "▏   ",
        "██  ",
        "██▏ ",
        "████",
        "████",
        "    ",
    ]


def test_percentages_keep_their_width_and_never_call_something_nothing() -> None:
    assert [widgets.percent(p) for p in (0.0, 0.0001, 0.0005, 0.752, 1.0)] == [
        "  0.0%",
        " <0.1%",
        "  0.1%",
        " 75.2%",
        "100.0%",
    ]


def test_a_failure_is_one_line_that_obeys_nobody() -> None:
    lane = LaneHistory("3\x1b", failed=Failed("3\x1b", "model", "no such\nfolder [red]/x[/red]"))
    assert drawn(120, failure(lane)) == "error: prompt 3␛: no such folder [red]/x[/red]\n"
    assert drawn(120, failure(lane, numbered=False)) == "error: no such folder [red]/x[/red]\n"


def test_one_ramp_serves_terminal_and_page() -> None:
    assert theme.ramp(-1.0) == theme.ramp(0.0) == theme.RAMP[0][1]
    assert theme.ramp(9.0) == theme.RAMP[-1][1]
    triplet = theme.colour(0.5).color
    assert triplet is not None
    assert triplet.triplet == (0xB0, 0x88, 0x18)
    assert len({theme.ramp(step / 20) for step in range(21)}) == 21


def test_why_a_text_ended_is_said_in_words() -> None:
    assert stop_words("eos", "") == "ended by itself"
    assert stop_words("eos", "", 2) == "ended by themselves"
    assert stop_words("length", "") == "cut at max_new_tokens"
    assert stop_words("stop", "END") == "stopped by “END”"
    assert stop_words("a reason of tomorrow", "") == "a reason of tomorrow"


@pytest.mark.parametrize("width", [60, 80])
def test_processors_fit_a_narrow_terminal(width: int) -> None:
    trace = Trace("repetition_penalty", 1516, 0.25, True, 0.5, 0.75, 0.001)
    explained = Token(1, -1.0, " a", trace=(trace,))
    history = RunHistory()
    history.feed(Stepped("0", 0, (Row("0", 0, (explained,), -1.0, -1.0),)))
    lines = [explain_heading(width).plain, *(line.plain for line in explain_lines(explained, width))]
    summary = drawn(width, explain_summary(history, width))
    assert max(map(cell_len, [*lines, *summary.splitlines()])) <= width
    assert "1,516.0" in summary


def test_an_error_has_its_colour_only_where_colours_are_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("genctl.terminal.standard_streams.is_coloured", lambda color, stream: color == "auto")
    for line, color in (("error: no such file", "auto"), ("note: fine", "auto"), ("error: no", "never")):
        print_message(line, color=color)
    assert capsys.readouterr().err == "\x1b[1;31merror:\x1b[0m no such file\nnote: fine\nerror: no\n"


def test_a_probability_that_is_shown_as_unchanged_has_no_colour() -> None:
    same = Trace("top_k", 3, 0.5, False, 0.9999, 1.0)
    line = explain_lines(Token(1, -0.1, "a", trace=(same,)))[0]
    assert "100.0% → 100.0%" in line.plain
    assert not any(str(span.style) in ("green", "red") for span in line.spans)


# -- numbers: no negative zero, no exponents where digits fit ----------------------------------------------------------


def test_what_rounds_to_nothing_has_no_sign() -> None:
    assert [widgets.rounded(value) for value in (-0.0, -0.0004, -0.0006, 0.0)] == ["0.000", "0.000", "-0.001", "0.000"]


def test_a_log_probability_looks_like_its_total_where_rounding_alone_separates_them() -> None:
    """Totals are float32 sums of the numbers that a log-probability adds up exactly."""
    one = Hypothesis((1,), -11.8814999, -11.8815001, "length", -11.8815001)
    assert explain.number(explain.logprob_beside_total(one)) == explain.number(one.total) == "-11.882"
    penalised = Hypothesis((1,), -11.8814999, -12.0, "length", -12.0)
    assert explain.number(explain.logprob_beside_total(penalised)) == "-11.881"


def test_a_large_perplexity_is_written_in_digits() -> None:
    assert [widgets.perplexity(value) for value in (2.5, 2238.4, 2051000.0, 3e12)] == [
        "2.5000",
        "2,238",
        "2,051,000",
        "3.00e+12",
    ]


def test_nouns_follow_their_numbers() -> None:
    assert [count(1, "token"), count(2, "pass", "passes"), count(1204, "row")] == ["1 token", "2 passes", "1,204 rows"]


@pytest.mark.parametrize(
    ("value", "digits", "shown", "difference"),
    [
        (-0.0004, 3, "0.000", "0.000"),
        (0.0004, 3, "0.000", "0.000"),
        (-0.5, 3, "-0.500", "-0.500"),
        (0.5, 0, "0", "0"),
        (2_051_000.4, 2, "2,051,000", "+2,051,000"),
        (2238.0, 2, "2,238.00", "+2,238.00"),
        (None, 2, "–", "–"),
    ],
)
def test_numbers_of_a_comparison(value: float | None, digits: int, shown: str, difference: str) -> None:
    assert statistics.number(value, digits) == shown
    assert statistics.signed(value, digits) == difference


def test_a_score_is_written_in_digits() -> None:
    values = (-11.8823, -0.0041, -0.0000021, -1e-12, 0.0)
    shown = ["-11.882", "-0.004100", "-0.000002", "0.000", "0.000"]
    assert [explain.number(value) for value in values] == shown


def test_bytes_are_whole() -> None:
    assert [report.number(value) for value in (10240, 1365.33, 2048.0)] == ["10,240", "about 1,365", "2,048"]
