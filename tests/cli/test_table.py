"""The table of a command: fields become parameters, conflicts are rows."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module
from string import Formatter
from typing import Literal

import pytest
import typer

from genctl.commands.app import COMMANDS
from genctl.commands.table import Command, CommandOptions, argument, because, check, given, option, repeated, switch
from genctl.errors import UsageError
from tests.cli.tool import genctl

TABLES = [name for name in COMMANDS if name != "presets"]  # a group


@dataclass(frozen=True)
class Table(CommandOptions):
    words: tuple[str, ...] = argument("Words.", "WORD")
    output: str | None = option("A file.", "FILE", "--output", "-o")
    count: int | None = option("How many.", "N", least=2)
    kind: Literal["a", "b"] = option("Which.", default="a")
    loud: bool = switch("Shout.")
    ends: tuple[Literal["x", "y"], ...] = repeated("Ends.", "x|y")
    inner: str = "no option"


SEEN: list[Table] = []


def perform(options: Table) -> int | None:
    SEEN.append(options)
    return None if options.loud and not options.words else 7


def call(*arguments: str) -> object:
    command = Command("try", Table, f"{__name__}:perform", "Try it.", conflicts=CONFLICTS, knobs=(), input="word")
    return command.build("")(list(arguments), standalone_mode=False, prog_name="try")


CONFLICTS = (
    (given("loud", without=["words", "output"]), "--loud without words"),
    *because(given("loud"), "--loud but ", (given(kind=["b"]), "--kind {kind} and --count {count}")),
)


def test_a_command_line_becomes_the_options_object() -> None:
    assert call("one", "two", "-o", "f", "--count", "3", "--kind", "b", "--ends", "y", "--ends", "x") == 7
    assert SEEN.pop() == Table(("one", "two"), "f", 3, "b", False, ("y", "x"))
    assert call() == 7
    assert SEEN.pop() == Table()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--loud"], "--loud without words"),
        (["w", "--loud", "--kind", "b"], "--loud but --kind b and --count None"),
        (["--count", "1"], "--count 1: must be at least 2"),
    ],
)
def test_the_first_conflict_is_the_error(arguments: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    assert caught.value.message == sentence


def test_zero_and_the_empty_text_are_given() -> None:
    assert given("count")(Table(count=0))
    assert given("output")(Table(output=""))
    assert not given("count")(Table())
    assert not given("ends", "loud")(Table(ends=("x",)))


def test_no_input_is_answered_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--loud", "-o", "f") == 2
    err = capsys.readouterr().err
    assert err.startswith("Usage: try [OPTIONS] [WORD]...\n")
    assert "No word: give one as an argument" in err


def test_a_value_that_is_no_choice_is_refused() -> None:
    with pytest.raises(typer.TyperException, match="must be one of x, y"):
        call("--ends", "z")


@pytest.mark.parametrize("name", TABLES)
def test_sentences_name_options_of_their_table(name: str) -> None:
    module, _, attribute = COMMANDS[name][0].partition(":")
    command: Command = getattr(import_module(module), attribute)
    for when, sentence in command.conflicts:
        for _, field, _, _ in Formatter().parse(sentence):
            assert field is None or hasattr(command.options, field), sentence
        when(command.options())
    needed = {item.name: "x" for item in fields(command.options) if item.metadata.get("required")}
    check(command.options(**needed), command.conflicts)
    shown = [option for names in command.brief.values() for option in names]
    assert len(shown) == len(set(shown))


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--do-sample", "false"], "write --no-do-sample"),
        (["--no-do-sample", "True"], "write --no-do-sample"),
        (["--scores", "off"], "leave --scores out"),
        (["-q", "yes"], "write -q"),
    ],
)
def test_a_boolean_word_behind_a_switch_is_refused(words: list[str], hint: str) -> None:
    done = genctl("run", *words, "hello")
    assert (done.status, done.out) == (2, "")
    assert f"error: {words[0]} takes no value, but {words[1]} follows it\nhint: {hint}" in done.err


def test_a_prompt_may_be_a_boolean_word() -> None:
    for words in (["false", "--no-do-sample"], ["--no-do-sample", "--", "false"]):
        (record,) = genctl("run", "-n", "1", "--format", "jsonl", *words).records
        assert record["prompt"] == "false"
