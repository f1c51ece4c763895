"""Texts of an n-best list, each from where it diverges from the one that it is nearest to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from genctl.commands.run.beam_picture import picture, table
from genctl.commands.run.run_view import RunView
from genctl.events import Ended, Event, Finished, Hypothesis, Row, Stepped, Token
from genctl.events.history import Path
from genctl.terminal.live_layout import Look
from genctl.terminal.text_width import disambiguate, word_boundary
from tests.terminal.beams import search
from tests.terminal.streams import Clock, console, history, written

OPENING = " there was a curious girl named Poppy who lived in a town full of flowers. One day, Poppy woke up and"
ENDINGS = (" looked", " listened", " lay", " left")


def alike() -> list[Event]:
    """A search whose four sequences share 21 tokens and differ in their last word."""
    words = [f" {word}" for word in OPENING.split()]
    steps = [([(0, word, -0.1)], []) for word in words]
    return list(search([*steps, ([], [(0, end, -0.1 * n, "length") for n, end in enumerate(ENDINGS, 1)])], returned=2))


def test_a_word_that_both_have_begun_is_shown_from_its_beginning() -> None:
    assert word_boundary("the badger", "the badge of honour") == 4
    assert word_boundary("the old.", "the old") == 7


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


LATE = [
    ' Rowan, who was playing the fiddle all alone. "That was lovely," said Poppy.',
    ' Toby, who was playing the fiddle all alone. "That was lovely," said Poppy.',
    ' Rowan, who was playing the fiddle all alone. "Why do you play alone?" asked',
    ' Rowan, who was playing the flute all alone. "That was lovely," said Poppy.',
    ' Rowan, who was playing the flute all alone. "Why do you play alone?" asked',
]


def test_texts_that_differ_late_have_the_words_at_which_they_part() -> None:
    assert disambiguate(LATE, 38, growing=True) == [
        'Rowan…fiddle…"That…ovely," said Poppy.',
        'Toby,…. "That was lovely," said Poppy.',
        'Rowan…fiddle…"Why…u play alone?" asked',
        'Rowan…flute…"That…lovely," said Poppy.',
        'Rowan…flute…"Why…ou play alone?" asked',
    ]
    assert disambiguate(LATE, 200, growing=True) == LATE


def test_rows_that_differ_late_look_different_in_the_live_view_and_in_the_table_at_every_width() -> None:
    began, prefilled, *_ = search()
    words = [[f" {word}" for word in text.split(" ")[1:]] for text in LATE]
    ended = []
    for number, pieces in enumerate(words):
        tokens = tuple(100 * number + place for place in range(len(pieces)))
        ended.append(Hypothesis(tokens, -1.0 - number, -1.0 - number, "length", -1.0 - number, text=LATE[number]))
    rows = tuple(
        Row("0", 0, tuple(Token(id, -0.1, text) for id, text in zip(one.tokens, pieces, strict=True)), -1.0, -1.0)
        for one, pieces in zip(ended, words, strict=True)
    )
    live = Stepped("0", 0, rows)
    over = Stepped("0", 1, (), tuple(Ended("0", place, (), one) for place, one in enumerate(ended)))
    for width in (60, 80, 140):
        drawn = picture(history([began, prefilled, live]), Path(), Look(), console(width, 20), beams=5)
        texts = [line.plain[31:] for line in drawn if line.plain[:4].strip().isdigit()]
        assert len(set(texts)) == 5, texts
        done = history([began, prefilled, live, over, Finished("0", tuple(ended))])
        shown = [line.plain.partition("│")[2] or line.plain for line in table(done, 5, width)][1:6]
        assert len(set(shown)) == 5, shown
        assert all(line.cell_len <= width for line in [*drawn, *table(done, 5, width)])


@given(st.lists(st.text("ab .\n", max_size=30), min_size=1, max_size=6), st.integers(1, 30), st.booleans())
def test_disambiguate_fits(texts: list[str], width: int, growing: bool) -> None:
    shown = disambiguate(texts, width, growing=growing)
    assert len(shown) == len(texts)
    assert all(len(line) <= width and "\n" not in line for line in shown)
    if width > 40:
        assert len(set(shown)) == len(set(texts))
