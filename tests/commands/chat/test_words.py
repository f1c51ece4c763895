"""Parts of a chat that need no model: commands and thoughts."""

from __future__ import annotations

import pytest

from genctl.commands.chat import slash, thinking
from genctl.errors import UsageError

# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "text", "name"),
    [
        ("Hello", "Hello", None),
        ("/etc/hosts is a file", "/etc/hosts is a file", None),
        ("//help is a command", "/help is a command", None),
        (" /help", " /help", None),
        ("/help", "", "help"),
        ("/HELP ", "", "help"),
        *((f"/{word}", "", "quit") for word in ("quit", "exit", "q", "bye")),
        *((f"/{word}", "", "new") for word in ("new", "clear")),
        ("/set temperature=0.7", "temperature=0.7", "set"),
        ("/system Be\nkind", "Be\nkind", "system"),
    ],
)
def test_a_line_is_a_text_or_a_command(line: str, text: str, name: str | None) -> None:
    typed = slash.read(line)
    assert typed.text == text
    assert (typed.command and typed.command.name) == name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/retri", "there is no command /retri; did you mean /retry?"),
        ("/", "there is no command /"),
        ("/undo 3", "/undo takes nothing, but '3' follows it"),
        ("/unset", "/unset needs KEY"),
    ],
)
def test_a_command_that_cannot_be_done_is_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        slash.read(line)
    assert error.value.message == message


@pytest.mark.parametrize(("line", "number"), [("/edit", None), ("/edit 2", 2)])
def test_a_command_may_have_a_number(line: str, number: int | None) -> None:
    assert slash.number(slash.read(line), "turn") == number


def test_a_number_of_a_turn_begins_at_one() -> None:
    with pytest.raises(UsageError, match="expected the number of a branch, got '0'"):
        slash.number(slash.read("/branch 0"), "branch")


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("/re", ["/retry"]),
        ("/q", ["/quit"]),
        ("/ex", ["/exit"]),
        ("/set temp", ["temperature="]),
        ("/unset top_", ["top_k", "top_p"]),
        ("/preset g", ["greedy"]),
        ("/undo ", []),
        ("Hello /re", []),
    ],
)
def test_completion_knows_commands_knobs_and_presets(before: str, words: list[str]) -> None:
    knobs, presets = ["temperature", "top_k", "top_p"], ["greedy", "nucleus"]
    found = list(slash.completions(before, knobs, presets))
    assert [word for word, _ in found] == words
    assert all(before[len(before) - length :] == word[:length] for word, length in found)


# -- thoughts ----------------------------------------------------------------------------------------------------------

TEXT = " <think>\nIs 3 < 4? </th\n</think>\n\nYes. <think>no</think>"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_thought_is_split_from_its_answer_in_pieces_of_any_size(size: int) -> None:
    splitter = thinking.ThinkSplitter()
    pieces = [TEXT[place : place + size] for place in range(0, len(TEXT), size)]
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.finish()
    assert "".join(text for kind, text in parts if kind == "thought") == "\nIs 3 < 4? </th\n"
    assert "".join(text for kind, text in parts if kind == "answer") == "Yes. <think>no</think>"


def test_a_prompt_may_begin_the_thought() -> None:
    assert thinking.opened_by("<|Assistant|><think>\n") == "<think>"
    assert thinking.split("hm</think>Yes", "<think>") == ("hm", "Yes")


@pytest.mark.parametrize("text", ["Yes", "", "  Yes", "<thin", "<b>Yes</b>"])
def test_a_text_without_a_thought_is_all_answer(text: str) -> None:
    assert thinking.split(text) == ("", text)


def test_a_thought_that_is_cut_has_no_answer() -> None:
    assert thinking.split("<think>hm </thi") == ("hm </thi", "")
