"""Messages for mistakes on the command line, and the tables of options with their conflicts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from string import Formatter
from typing import Literal

import pytest
import typer

from genctl.commands.app import COMMANDS
from genctl.commands.table import Command, CommandOptions, argument, because, check, given, option, repeated, switch
from genctl.errors import UsageError
from tests.cli.tool import genctl


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--format", "jsn"], '--format "jsn": did you mean json? It must be one of text, json, jsonl, tsv'),
        (["--format=xml"], '--format "xml": must be one of text, json, jsonl, tsv'),
        (["--top-logprobs", "ten"], '--top-logprobs: expected a whole number, got "ten"'),
        (["--top-logprobs=ten"], '--top-logprobs: expected a whole number, got "ten"'),
        (["--max-new-tokens", "ten"], 'flag --max-new-tokens: max_new_tokens = "ten": must be a whole number, not a'),
        (["--temperature", "hot"], 'flag --temperature: temperature = "hot": must be a number, not a string'),
        (["--cache", "dinamic"], 'flag --cache: cache_implementation = "dinamic": did you mean dynamic? It must be '),
        (["-p", "nucleos"], "preset nucleos: no such preset; did you mean nucleus?"),
        (["--quantize", "int5"],
         'flag --quantize: quantize = "int5": did you mean int8? It must be one of int8, int4, g'),
        (["--strategy", "beem"], "--strategy beem: there is no such strategy; did you mean beam?"),
        (["--set", "tpo_k=5"], "--set tpo_k: unknown key tpo_k; did you mean top_k?"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_answered_with_what_was_expected(arguments: list[str], sentence: str) -> None:
    done = genctl("run", "One day", *arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.splitlines()[0].startswith(f"error: {sentence}")


def test_flags_presets_and_sets_are_checked_together(tmp_path: Path) -> None:
    preset = tmp_path / "job.toml"
    preset.write_text('extends = "nucleos"\ntop_k = "ten"')
    done = genctl(
        "run", "One day", "-p", str(preset), "--dtype", "bfloat15", "--seed", "x", "--set", "tpo_p=1", "--set", "a"
    )
    assert (done.status, done.out) == (2, "")
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 6
    for words in ("extends: preset nucleos", 'top_k = "ten"', "--dtype", "--seed", "tpo_p", '--set "a"'):
        assert sum(words in line for line in lines) == 1


@pytest.mark.parametrize(
    ("value", "shown"), [(".5", "0.5"), ("1.25", "1.25"), ("1e-3", "0.001"), ("2", "2.0"), ("2.", "2.0")]
)
def test_a_number_may_be_written_as_people_write_it(value: str, shown: str) -> None:
    done = genctl("run", "One day", f"--repetition-penalty={value}", "--dry")
    assert f"repetition_penalty = {shown} " in done.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--tempratur", "1"], 'no such option "--tempratur"'),
        (["run", "--model"], "--model needs a value"),
        (["run", "--chat=1"], "--chat takes no value"),
        (["report"], "EVENTS is missing"),
        (["report", "a", "b c"], "unexpected: b c"),
        (["-V=1"], 'no such option "-="'),
        (["run", "x", "--format", "a\x1b[1m\n"], '--format "a\\x1b[1m\\n": must be one of text, json, jsonl, tsv'),
        (["run", "x", "--a\x1b"], 'no such option "--a\\x1b"'),
        (["models", "\x1b"], "unexpected: \\x1b"),
        (["--version=1"], "--version takes no value"),
        (["presets", "check"], "FILE is missing"),
        (["presets", "list", "--format", "jsn"], '--format "jsn": did you mean json? It must be one of text, json'),
        (["parity", "a", "b", "x", "--max-kl", "low"], '--max-kl: expected a number, got "low"'),
    ],
)
def test_the_parser_is_given_our_words(arguments: list[str], sentence: str) -> None:
    done = genctl(*arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.splitlines()[0] == f"error: {sentence}"


@pytest.mark.parametrize("flag", ["-o", "-i", "--report", "--events"])
def test_an_empty_file_name_has_its_own_sentence(flag: str) -> None:
    done = genctl("run", "One day", flag, "")
    name = {"-o": "--output", "-i": "--input"}.get(flag, flag)
    assert (done.status, done.out) == (2, "")
    assert done.err == f"error: {name} is empty, and an empty text names no file\n"


def test_an_unknown_strategy_is_reported_with_all_other_mistakes() -> None:
    done = genctl("run", "One day", "--strategy", "beem", "--set", "top_k=-1", "-p", "nucleos")
    lines = done.err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "error", "error", "hint"]
    assert all(name in done.err for name in ("did you mean beam?", "did you mean nucleus?", "top_k = -1"))


@pytest.mark.parametrize("flag", ["--output", "--events", "--report", "--adapter", "--prompt-cache"])
def test_a_name_that_no_file_can_have_is_one_line(flag: str, tmp_path: Path) -> None:
    """Python's `Path.is_file` raises for it."""
    done = genctl("run", "-m", "builtin:numbers", "7", flag, f"{tmp_path}/{'n' * 300}")
    assert done.status == 2
    (line,) = done.err.splitlines()
    assert line.startswith(("error: the output could not be written: File name too long (", "error: cannot use "))
    assert "bug" not in line


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
    assert given("count")(Table(count=0))
    assert given("output")(Table(output=""))
    assert not given("count")(Table())
    assert not given("ends", "loud")(Table(ends=("x",)))
    with pytest.raises(typer.TyperException, match="must be one of x, y"):
        call("--ends", "z")


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


def test_no_input_is_answered_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--loud", "-o", "f") == 2
    err = capsys.readouterr().err
    assert err.startswith("Usage: try [OPTIONS] [WORD]...\n")
    assert "No word: give one as an argument" in err


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
