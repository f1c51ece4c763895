"""Word wrap of streamed text: what is on the screen, whatever the pieces and the width."""

from __future__ import annotations

import io
import random

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genctl.terminal.text_width import WordWrap

STORY = (
    "Once upon a time, a little girl named Lily found a poppy in the park.\n\n"
    "She ran to her mother, supercalifragilistic!"
)


class Page:
    """A terminal that shows what a `WordWrap` sends."""

    def __init__(self, width: int) -> None:
        self.width, self.sent = width, io.StringIO()
        self.screen = pyte.Screen(width, 40)
        self.stream = pyte.Stream(self.screen)
        self.wrap = WordWrap(self._write, lambda: self.width, dim=("\x1b[2m", "\x1b[0m"))

    def _write(self, text: str) -> None:
        self.sent.write(text)
        self.stream.feed(text.replace("\n", "\r\n"))

    def lines(self) -> list[str]:
        return [line.rstrip() for line in "\n".join(self.screen.display).rstrip().split("\n")]


@pytest.mark.parametrize("width", [20, 33, 60])
def test_no_word_is_cut_however_the_text_is_divided_into_tokens(width: int) -> None:
    draw = random.Random(width)
    for _ in range(20):
        page, left = Page(width), STORY
        while left:
            length = draw.randint(1, 7)
            page.wrap.write(left[:length], dim=draw.random() < 0.2)
            left = left[length:]
        words = " ".join(page.lines()).split()
        assert words == STORY.split() if width > 20 else "".join(words) == "".join(STORY.split())
        whole = Page(width)
        whole.wrap.write(STORY)
        assert page.lines() == whole.lines()


def test_a_word_that_grows_beyond_the_edge_moves_in_one_write() -> None:
    page = Page(16)
    for piece in ["a little girl", " fo", "und"]:
        page.wrap.write(piece)
    assert page.sent.getvalue() == "a little girl fo\x1b[14G\x1b[K\nfound"
    assert page.lines() == ["a little girl", "found"]


def test_no_line_ends_with_spaces_and_a_break_replaces_its_space() -> None:
    page = Page(10)
    page.wrap.write("aaaa bbbb cccc  \n  dd   eeeeeee f ")
    assert page.sent.getvalue() == "aaaa bbbb\ncccc\n  dd\neeeeeee f"


def test_wide_characters_are_left_to_the_terminal() -> None:
    page = Page(10)
    for piece in ["むか", "しむかし。おじい", "さん", " ok"]:
        page.wrap.write(piece)
    assert page.sent.getvalue() == "むかしむかし。おじいさん ok"


def test_a_filled_line_is_not_followed_by_an_empty_one() -> None:
    page = Page(5)
    for piece in ["abc", "de", " ", "f", "\n", "abcde", "\n", "g"]:
        page.wrap.write(piece)
    assert page.lines() == ["abcde", "f", "abcde", "g"]


def test_after_a_resize_words_wrap_at_the_new_width() -> None:
    page = Page(30)
    page.wrap.write("one two three four ")
    page.width = 20
    page.screen.resize(40, 20)
    page.wrap.write("five six")
    assert page.lines() == ["one two three four", "five six"]
    page.width = 60
    page.screen.resize(40, 60)
    page.wrap.write(" seven eight nine ten eleven twelve")
    assert page.lines() == ["one two three four", "five six seven eight nine ten eleven twelve"]


def test_in_a_window_that_became_narrower_the_row_of_the_last_word_counts() -> None:
    page = Page(30)
    page.wrap.write("one two three four")  # two rows of 10, the second with 8 cells
    page.width = 10
    page.wrap.write(" a five")
    assert page.sent.getvalue() == "one two three four a\nfive"


@given(st.text("ab 字。「\t\n", max_size=60), st.integers(2, 12), st.data())
def test_the_pieces_make_no_difference_and_nothing_is_lost(text: str, width: int, data: st.DataObject) -> None:
    one, several = Page(width), Page(width)
    one.wrap.write(text)
    at = data.draw(st.integers(0, len(text)))
    several.wrap.write(text[:at])
    several.wrap.write(text[at:])
    assert "".join(one.sent.getvalue().split()) == "".join(text.split())
    if text.isascii() and "\t" not in text:  # what a terminal does with these at its edge differs
        assert one.lines() == several.lines()


def test_a_prompt_is_dimmed_and_moves_with_the_rest_of_its_word() -> None:
    page = Page(10)
    page.wrap.write("once ti", dim=True)
    page.wrap.write("mes it")
    assert page.sent.getvalue() == "\x1b[2monce\x1b[0m \x1b[2mti\x1b[0mmes\nit"
    page = Page(7)
    page.wrap.write("once ti", dim=True)
    page.wrap.write("mes")
    assert page.lines() == ["once", "times"]
    assert page.sent.getvalue().endswith("\x1b[5G\x1b[K\n\x1b[2mti\x1b[0mmes")
