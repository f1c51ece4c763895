"""Text cut at stop strings, finished or growing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.decode.stopping import HoldBack, NamedCriterion, cut, trim
from genctl.decode.stopping.text import Pattern

letters = st.text("ab🙂", max_size=30)
stop_lists = st.lists(st.text("ab🙂", min_size=1, max_size=5), max_size=4)


@pytest.mark.parametrize(
    ("text", "stops", "keep", "expected"),
    [
        ("one END two END", ["END"], False, ("one ", "END")),
        ("one END two END", ["END"], True, ("one END", "END")),
        ("abcd", ["bc", "abcd"], False, ("", "abcd")),
        ("xabc", ["a", "abc", "ab"], True, ("xabc", "abc")),
        ("xabc", ["c", "b"], False, ("xa", "b")),
        ("nothing", ["END"], True, ("nothing", "")),
        ("nothing", [], False, ("nothing", "")),
        ("nothing", [""], False, ("nothing", "")),
        ("a🙂b", ["🙂"], False, ("a", "🙂")),
    ],
)
def test_trim_cuts_at_the_earliest_and_longest(
    text: str, stops: list[str], keep: bool, expected: tuple[str, str]
) -> None:
    assert trim(text, stops, keep) == expected


@settings(max_examples=400, deadline=None, derandomize=True)
@given(pieces=st.lists(letters, max_size=8), stops=stop_lists, keep=st.booleans())
def test_what_is_released_is_the_trimmed_text(pieces: list[str], stops: list[str], keep: bool) -> None:
    expected, found = trim("".join(pieces), stops, keep)
    live = HoldBack(stops, keep)
    shown = ""
    for piece in pieces:
        shown += live.push(piece)
        assert expected.startswith(shown), "released what trim cuts"
    shown += live.flush()
    assert shown == expected
    assert live.stopped == bool(found)
    assert live.push("more") == live.flush() == ""


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=letters, stops=stop_lists, more=letters)
def test_only_what_may_become_a_stop_string_is_held(text: str, stops: list[str], more: str) -> None:
    live = HoldBack(stops)
    shown = live.push(text)
    if not live.stopped:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(stem=letters, left=letters, right=letters, stops=stop_lists, keep=st.booleans())
def test_a_fork_goes_its_own_way(stem: str, left: str, right: str, stops: list[str], keep: bool) -> None:
    live = HoldBack(stops, keep)
    shown = live.push(stem)
    twin = live.fork()
    assert shown + live.push(left) + live.flush() == trim(stem + left, stops, keep)[0]
    assert shown + twin.push(right) + twin.flush() == trim(stem + right, stops, keep)[0]


def test_a_longer_stop_string_that_began_earlier_is_waited_for() -> None:
    live = HoldBack(["abcd", "bc"])
    assert live.push("xabc") == "x"
    assert live.fork().push("d") == ""
    assert live.push("x") == "a"


def test_a_text_that_nearly_matches_everywhere_is_read_once() -> None:
    live = HoldBack(["a" * 2000 + "b"])
    steps = 0
    automaton = live._automaton
    step = automaton.step

    def counting(state: int, character: str) -> int:
        nonlocal steps
        before = automaton.depth[state]
        state = step(state, character)
        steps += 1 + before - automaton.depth[state]  # a failure link followed makes the state less deep
        return state

    automaton.step = counting  # type: ignore[method-assign]
    try:
        shown = "".join(live.push("a") for _ in range(10_000))
    finally:
        del automaton.step  # type: ignore[method-assign]
    assert shown == "a" * 8000
    assert steps <= 10_000


def test_a_row_is_cut_at_the_earliest_of_strings_and_matches() -> None:
    criteria = (
        NamedCriterion("stop_strings", lambda written: None, stops=("three",)),
        NamedCriterion("stop_regex", lambda written: None, pattern=Pattern(r"\d+|th\w+ f")),
    )
    assert cut("one two three four", criteria) == ("one two ", "three f")
    assert cut("one two three four", criteria, keep=True) == ("one two three f", "three f")
    assert cut("one 22 three", criteria) == ("one ", "22")
    assert cut("one two", criteria) == ("one two", "")
