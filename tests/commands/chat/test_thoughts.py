"""A thought on the screen: dimmed while it goes on, one line once it is over."""

from __future__ import annotations

from pathlib import Path

from genctl.commands.chat.answer_view import AnswerView
from genctl.events import Began, Ended, Event, Finished, Hypothesis, Row, Stepped, Token
from tests.commands.chat.talk import Talk
from tests.terminal.streams import Clock, Terminal

PIECES = ["<think>", "\nIs it a ", "fox", "?\n", "</think>", "\n\n", "Yes", ", it is."]


def events(pieces: list[str]) -> list[Event]:
    found: list[Event] = [Began("0", "p", "greedy")]
    tokens = [Token(place, -0.5, text) for place, text in enumerate(pieces)]
    for step, token in enumerate(tokens[:-1]):
        found.append(Stepped("0", step, (Row("0", 0, (token,), -0.5, -0.5, 0),)))
    hypothesis = Hypothesis(tuple(range(len(pieces))), -4.0, -4.0, "eos", -0.5, 0, text="".join(pieces))
    ended = Ended("0", 0, (tokens[-1],), hypothesis)
    return [*found, Stepped("0", len(pieces) - 1, (), (ended,)), Finished("0", (hypothesis,))]


def shown(pieces: list[str], *, begun: str = "") -> tuple[list[str], list[str]]:
    """The screen at the end, and every line that was on it on the way."""
    clock, terminal = Clock(), Terminal()
    view = AnswerView(terminal.console, begun=begun, clock=clock)
    seen: list[str] = []
    for event in events(pieces):
        clock.now += 1
        view.feed(event)
        seen += terminal.visible()
    view.close()
    return [line for line in terminal.visible() if line], seen


def test_a_thought_is_there_while_it_goes_on_and_then_folded() -> None:
    lines, seen = shown(PIECES)
    assert lines == ["thought for 4 tokens (/think shows it)", "Yes, it is."]
    assert "│ Is it a fox?" in seen


def test_a_thought_that_the_prompt_begins_is_folded_too() -> None:
    lines, _ = shown(PIECES[1:], begun="<think>")
    assert lines[1:] == ["Yes, it is."]
    assert lines[0].startswith("thought for ")


def test_an_answer_without_a_thought_is_written_as_it_is() -> None:
    assert shown(["Yes", ", it", " is."])[0] == ["Yes, it is."]


def test_a_folded_thought_is_shown_on_demand(own_state: Path) -> None:
    with Talk(own_state, "-q", "-n", "6", "--prefill", "<think>It may be a fox.</think>") as talk:
        lines = talk.say("A fox")
        assert lines[0].startswith("thought for ")
        assert "It may be" not in " ".join(lines)
        assert talk.say("/think") == ["It may be a fox."]


def test_the_budget_of_a_thought_is_set_at_the_prompt(own_state: Path) -> None:
    tags = ("--set", 'thinking_tags=["<think>", "</think>"]')
    with Talk(own_state, "-q", "-n", "12", "--prefill", "<think>", "--thinking-budget", "9", *tags) as talk:
        talk.say("/set thinking_budget=2")
        lines = talk.say("A fox")
        assert lines[0].startswith("thought for ")
        (thought,) = talk.say("/think")
        assert len(thought.split()) <= 2
