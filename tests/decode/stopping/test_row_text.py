"""The text of a row: whole after each token, shown without what a stop may remove, and cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.decode.stopping.row_text import RowText
from genctl.decode.stopping.stops import Marks, Pattern, Stops

letters = st.text("ab🙂", max_size=30)
stop_lists = st.lists(st.text("ab🙂", min_size=1, max_size=5), max_size=4).map(tuple)


class Letters:
    """A detokenizer whose ids are characters. Two bytes of a surrogate pair are one character, the first alone is ?."""

    only_ids = False

    def __init__(self, half: str = "") -> None:
        self.half = half

    def push(self, id: int) -> str:
        if id in MARKED.ids:
            return ""
        if 0xD800 <= id < 0xDC00:
            self.half, before = chr(id), self.half
            return "?" if before else ""
        text, self.half = self.half + chr(id), ""
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if len(text) > 1 else text

    def rest(self) -> str:
        return "?" if self.half else ""

    def piece(self, id: int) -> str:
        return chr(id)

    def fork(self) -> Letters:
        return Letters(self.half)


MARKED = Marks({"<end>": "\udfff"}, {0: "\udfff"})


def pushed(text: RowText, letters: str) -> str:
    """The text shown after more letters."""
    shown = ""
    for letter in letters:
        text.push(ord(letter))
        shown += text.show()
    return shown


@pytest.mark.parametrize(
    ("text", "stops", "keep", "expected"),
    [
        ("one END two END", ["END"], False, "one "),
        ("one END two END", ["END"], True, "one END"),
        ("abcd", ["bc", "abcd"], False, ""),
        ("xabc", ["a", "abc", "ab"], True, "xabc"),
        ("xabc", ["c", "b"], False, "xa"),
        ("nothing", ["END"], True, "nothing"),
        ("nothing", [], False, "nothing"),
        ("a🙂b", ["🙂"], False, "a"),
    ],
)
def test_a_text_is_cut_at_the_earliest_and_longest(text: str, stops: list[str], keep: bool, expected: str) -> None:
    assert Stops(tuple(stops), keep=keep).cut(text) == expected


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=letters, strings=stop_lists, start=st.integers(0, 30))
def test_the_end_of_a_text_is_searched_as_the_whole(text: str, strings: tuple[str, ...], start: int) -> None:
    stops = Stops(strings)
    if stops.find(text[:start]) is None:
        assert stops.find(text, start) == stops.find(text)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(text=letters, strings=stop_lists, keep=st.booleans())
def test_what_is_shown_is_the_text_that_is_cut_at_the_first_stop(
    text: str, strings: tuple[str, ...], keep: bool
) -> None:
    stops, shown = Stops(strings, keep=keep), ""
    row = RowText(Letters(), stops)
    for count, letter in enumerate(text, 1):
        row.push(ord(letter))
        assert row.whole() == text[:count]
        if stops.find(text[:count]):
            last, whole = row.finish("stop")
            assert shown + last == whole == stops.cut(text[:count])
            return
        shown += row.show()
        held = text[len(shown) : count]
        assert not held or any(string.startswith(held) for string in strings), "held back more than a stop could be"
    assert row.finish("length") == (text[len(shown) :], text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(stem=letters, left=letters, right=letters, strings=stop_lists)
def test_a_fork_goes_its_own_way(stem: str, left: str, right: str, strings: tuple[str, ...]) -> None:
    row = RowText(Letters(), Stops(strings))
    shown = pushed(row, stem)
    twin = row.fork()
    for one, more in ((row, left), (twin, right)):
        assert shown + pushed(one, more) + one.finish("eos")[0] == stem + more
        assert one.finish("eos")[1] == stem + more


def test_a_text_that_nearly_matches_everywhere_is_looked_at_once() -> None:
    class Counted(str):
        tests = 0

        def startswith(self, *args: object) -> bool:
            Counted.tests += 1
            return super().startswith(*args)  # type: ignore[arg-type]

    row = RowText(Letters(), Stops((Counted("a" * 200 + "b"),)))
    assert pushed(row, "a" * 1000) == "a" * 800
    assert Counted.tests < 3000


def test_with_a_pattern_nothing_is_shown_before_the_end_unless_the_match_is_kept() -> None:
    for keep, early, last in ((False, "", "one "), (True, "one 2", "2")):
        row = RowText(Letters(), Stops(patterns=(Pattern(r"\d+"),), keep=keep))
        assert pushed(row, "one 2") == early
        row.push(ord("2"))
        assert row.finish("stop") == (last, "one 22" if keep else "one ")


def test_a_token_that_goes_beyond_a_kept_match_is_shown_up_to_it() -> None:
    class Whole(Letters):
        def push(self, id: int) -> str:
            return "a cat sat"

    row = RowText(Whole(), Stops(patterns=(Pattern("cat"),), keep=True))
    row.push(1)
    assert row.finish("stop") == ("a cat", "a cat")


@pytest.mark.parametrize(
    ("tokens", "whole"),
    [
        ([65, 0], "A\udfff"),
        ([0xD83D, 0], "?\udfff"),  # half a character: so far it is one of its own, before the mark
        ([0xD83D, 0, 0xDE42], "\udfff🙂"),  # and is completed after it
        ([0xD83D, 0, 0, 0xDE42, 0, 65], "\udfff\udfff🙂\udfffA"),
        ([0xD83D, 0, 0xD83D], "?\udfff?"),
        ([0, 65], "\udfffA"),
    ],
)
def test_a_mark_lies_where_the_text_with_and_without_what_follows_is_the_same(tokens: list[int], whole: str) -> None:
    row = RowText(Letters(), Stops(("x\udfff",), marks=MARKED))
    for token in tokens:
        row.push(token)
    assert row.whole() == whole
    assert row.finish("eos")[1] == whole.replace("\udfff", "")


def test_a_row_is_cut_at_the_earliest_of_strings_and_matches() -> None:
    strings, patterns = ("three",), (Pattern(r"\d+|th\w+ f"),)
    stops = Stops(strings, patterns)
    assert stops.cut("one two three four") == "one two "
    assert Stops(strings, patterns, keep=True).cut("one two three four") == "one two three f"
    assert stops.cut("one 22 three") == "one "
    assert stops.cut("one two") == "one two"
