"""A thought on the screen: dimmed, above its answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from genctl.commands.chat.screen import AnswerView
from genctl.events import Began, Ended, Event, Finished, Hypothesis, Row, Stepped, Token
from tests.commands.chat.talk import Talk
from tests.terminal.streams import Terminal

PIECES = ["<think>", "\nIs it a ", "fox", "?\n", "</think>", "\n\n", "Yes", ", it is."]


def events(pieces: list[str]) -> list[Event]:
    found: list[Event] = [Began("0", "p", "greedy")]
    tokens = [Token(place, -0.5, text) for place, text in enumerate(pieces)]
    for step, token in enumerate(tokens[:-1]):
        found.append(Stepped("0", step, (Row("0", 0, (token,), -0.5, -0.5, 0),)))
    hypothesis = Hypothesis(tuple(range(len(pieces))), -4.0, -4.0, "eos", -0.5, 0, text="".join(pieces))
    ended = Ended("0", 0, (tokens[-1],), hypothesis)
    return [*found, Stepped("0", len(pieces) - 1, (), (ended,)), Finished("0", (hypothesis,))]


def shown(pieces: list[str], *, begun: str = "") -> list[str]:
    """The screen at the end."""
    terminal = Terminal()
    view = AnswerView(terminal.console, begun=begun)
    for event in events(pieces):
        view.feed(event)
    view.close()
    return [line for line in terminal.visible() if line]


@pytest.mark.parametrize(("pieces", "begun"), [(PIECES, ""), (PIECES[1:], "<think>")])
def test_a_thought_is_written_above_its_answer(pieces: list[str], begun: str) -> None:
    assert shown(pieces, begun=begun) == ["Is it a fox?", "Yes, it is."]


def test_an_answer_without_a_thought_is_written_as_it_is() -> None:
    assert shown(["Yes", ", it", " is."]) == ["Yes, it is."]


def test_a_thought_is_dimmed(own_state: Path) -> None:
    with Talk(own_state, "-q", "-n", "6", "--prefill", "<think>It may be a fox.</think>") as talk:
        assert talk.say("A fox")[0] == "It may be a fox."
        assert b"\x1b[2mIt\x1b[0m" in talk.raw


def test_the_budget_of_a_thought_is_set_at_the_prompt(own_state: Path) -> None:
    tags = ("--set", 'thinking_tags=["<think>", "</think>"]')
    with Talk(own_state, "-q", "-n", "12", "--prefill", "<think>", "--thinking-budget", "9", *tags) as talk:
        talk.say("/set thinking_budget=2")
        assert len(talk.say("A fox")[0].split()) <= 2
