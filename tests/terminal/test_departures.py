"""Texts of an n-best list, each from where it leaves the one that it is nearest to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from genctl.commands.run.beam_view import BeamView
from genctl.commands.run.nbest_table import table
from genctl.commands.run.run_view import RunView
from genctl.events import Ended, Event, Finished, Hypothesis, Stepped
from genctl.history import LaneHistory
from genctl.terminal.departures import ENDS, SAME, column, departures, leaves, parts
from tests.terminal.beams import search
from tests.terminal.streams import Clock, console, written

OPENING = " there was a curious girl named Poppy who lived in a town full of flowers. One day, Poppy woke up and"
ENDINGS = (" looked", " listened", " lay", " left")


def alike() -> list[Event]:
    """A search whose four sequences share 21 tokens and differ in their last word."""
    words = [f" {word}" for word in OPENING.split()]
    steps = [([(0, word, -0.1)], []) for word in words]
    return list(search([*steps, ([], [(0, end, -0.1 * n, "length") for n, end in enumerate(ENDINGS, 1)])], returned=2))


def lane(events: list[Event]) -> LaneHistory:
    history = LaneHistory("0")
    for event in events:
        history = history.after(event)
    return history


def test_rows_of_the_table_that_begin_alike_show_where_they_differ_at_every_width() -> None:
    for width in (44, 60, 80, 140):
        lines = [line.plain for line in table(lane(alike()), 4, width)]
        for line, end in zip(lines[1:5], ENDINGS, strict=True):
            assert line.endswith(f"+21 │ …{end.strip()}"), (width, lines)
        assert all(len(line) <= width for line in lines)
        assert "+n tokens shared with the nearest text above" in " ".join(lines)


def test_each_text_leaves_the_one_that_it_is_nearest_to() -> None:
    texts = ["a b c d", "x y", "a b c e", "a b f"]
    ids = [[1, 2, 3, 4], [7, 8], [1, 2, 3, 5], [1, 2, 6]]
    found = departures(texts, ids)
    assert column(found) == ["+3 │ ", "   │ ", "+3 │ ", "+2 │ "]
    assert [part.plain for part in parts(texts, found, 5)] == ["…d", "x y", "…e", "…f"]


def test_short_texts_are_shown_in_full_where_there_is_room() -> None:
    texts = ["a b c", "a b d"]
    shown = parts(texts, departures(texts, [()] * 2), 20)
    assert [part.plain for part in shown] == texts
    assert [part.plain[span.start : span.end] for part in shown for span in part.spans if str(span.style) == "dim"] == [
        "a b "
    ] * 2


def test_texts_that_end_or_are_equal_are_called_so() -> None:
    texts = [f"{OPENING} a", f"{OPENING} a c", "q", "q"]
    shown = [part.plain for part in parts(texts, departures(texts, [()] * 4), 20)]
    assert shown == [ENDS, "… c", "q", SAME]


def test_a_word_that_both_have_begun_is_shown_from_its_beginning() -> None:
    assert leaves("the badger", "the badge of honour") == 4
    assert leaves("the old.", "the old") == 7


@given(st.lists(st.text("ab .", max_size=12), min_size=2, max_size=6))
def test_what_is_left_out_is_shared_with_another_text(texts: list[str]) -> None:
    found = departures(texts, [()] * len(texts))
    for place, (text, each) in enumerate(zip(texts, found, strict=True)):
        others = texts[:place] + texts[place + 1 :]
        assert any(other.startswith(text[: each.character]) for other in others)


def test_full_texts_dim_what_they_share_with_the_one_before() -> None:
    out = console(200, colour=True)
    with BeamView(out, console(), labels=True, clock=Clock()) as view:
        for event in alike():
            view.feed(event)
    assert f"\x1b[2m{OPENING} \x1b[0mlistened" in written(out)
    assert f"{OPENING} looked" in written(out)  # the first is not dimmed


def test_several_samples_dim_what_they_share_too() -> None:
    texts = ("One morning it rained", "One morning it snowed")
    done = tuple(Hypothesis((1, 2), -1.0, -1.0, "eos", slot=n, text=text) for n, text in enumerate(texts))
    began, prefilled, *_ = alike()
    out = console(200, colour=True)
    with RunView(out, console(), labels=True, clock=Clock()) as view:
        for event in (began, prefilled, Stepped("0", 0, (), tuple(Ended("0", 0, (), one) for one in done))):
            view.feed(event)
        view.feed(Finished("0", done))
    assert "\x1b[2mOne morning it \x1b[0msnowed" in written(out)
