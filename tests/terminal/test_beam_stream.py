"""Text that is written while a search goes on: as soon as it is certain, and never taken back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings

from genctl.commands.run.text_stream import StableTexts, recorded_prompt
from genctl.events import Began, Ended, Event, Finished, Hypothesis, Row, Stepped, Token
from tests.terminal.beams import STEPS, random_searches, search
from tests.terminal.streams import lane


def streamed(events: list[Event], **options: Any) -> list[str]:
    """What is out after each event, and after the end."""
    pieces: list[str] = []
    out = []
    texts = StableTexts(lambda piece, dim: pieces.append(piece), **options)
    for event in events:
        texts.feed(event)
        out.append("".join(pieces))
    texts.close()
    return [*out, "".join(pieces)]


@settings(max_examples=400)
@given(random_searches())
def test_what_is_written_is_never_taken_back(made: tuple[str, list[Event], str]) -> None:
    _, events, final = made
    out = streamed(events)
    assert out[-1] == f"{final}\n"
    for text in out[:-2]:
        assert final.startswith(text)


def test_what_all_rows_share_is_out_at_once() -> None:
    steps = [
        ([(0, " the", -0.1)], []),
        ([(0, " old", -0.1), (0, " young", -0.2)], []),
        ([(0, " oak", -0.1), (0, " elm", -0.2)], []),
        ([(1, " stood", -0.1), (1, " fell", -0.2)], []),
        ([], [(0, ".", -0.1, "eos")]),
    ]
    out = streamed(list(search(steps)))
    assert out[2:6] == [" the", " the", " the old", " the old elm"]
    assert out[-1] == " the old elm stood.\n"


def test_a_finished_sequence_that_may_still_win_holds_the_stem_back() -> None:
    steps = [
        ([(0, " yes", -0.5), (0, " no", -0.1)], []),
        ([(0, " we", -0.5)], [(1, "", -0.1, "eos")]),
        ([(0, " can", -5.0)], []),
        ([], [(0, "", -0.1, "eos")]),
    ]
    out = streamed(list(search(steps)))
    assert out[2:5] == ["", "", ""]
    assert out[-1] == " no\n"


def test_a_finished_sequence_that_is_beaten_holds_nothing_back() -> None:
    steps = [
        ([(0, " yes", -0.5), (0, " no", -4.0)], []),
        ([(0, " we", -0.1)], [(1, "", -4.0, "eos")]),
        ([(0, " can", -0.1)], [(0, "", -0.2, "eos")]),
        ([(0, " now", -0.1)], []),
    ]
    for kind, expected in (("beam", " yes we"), ("constrained-beam", "")):
        out = streamed(list(search(steps, kind=kind))[:-1])
        assert out[-2] == expected


def slotted(kind: str) -> list[Event]:
    rows = tuple(Row("0", 0, (Token(slot, -1.0, text),), -1.0, -1.0, slot) for slot, text in enumerate("ab"))
    return [Began("0", "p", kind), Stepped("0", 0, rows)]


def test_of_samples_the_first_streams_unless_they_will_be_reranked() -> None:
    assert streamed(slotted("sample"))[-2] == "a"
    assert streamed(slotted("best_of"))[-2] == ""


def test_the_prompt_comes_once_before_each_of_its_texts() -> None:
    began, *rest = search(STEPS, returned=2, prompt="P")
    assert isinstance(began, Began)
    texts = [" the old badger sang under the hill.", " the old badger slept under the hill."]
    for answers, between in ((False, ""), (True, "\t")):
        events = [dataclasses.replace(began, encoder_decoder=answers), *rest]
        assert streamed(events, prompt=recorded_prompt)[-1] == "".join(f"P{between}{text}\n" for text in texts)


def test_a_result_that_contradicts_what_was_written_is_written_in_full() -> None:
    other = Hypothesis((7,), -1.0, -1.0, "eos", text="the dog")
    events = [*list(lane("0", [["a ", "cat"]]))[:3], Finished("0", (other,))]
    assert streamed(events)[-1] == "a \nthe dog\n"


def test_a_row_that_nothing_continues_is_no_obstacle() -> None:
    rows = (Row("0", 0, (Token(1, -1.0, "a"),), -1.0, -1.0), Row("0", 0, (Token(2, -1.0, "b"),), -2.0, -2.0))
    done = Hypothesis((1, 3), -1.0, -1.0, "eos", -0.5, text="ac")
    step = Stepped("0", 1, (), (Ended("0", 0, (Token(3, -0.1, "c"),), done),))
    assert streamed([Began("0", "p", "beam"), Stepped("0", 0, rows), step])[-2] == "ac"


@pytest.mark.parametrize("kind", ["beam", "beam-sample"])
def test_equals_may_both_win(kind: str) -> None:
    steps = [([(0, "x", -1.0)], [(0, "a", -1.0, "eos"), (0, "b", -1.0, "eos")]), ([], [(0, "y", -9.0, "eos")])]
    assert streamed(list(search(steps, kind=kind)))[-3] == ""
