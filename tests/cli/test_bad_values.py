"""What a person reads after a slip on the command line: every mistake at once, the nearest name, no library's words."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from genctl.commands.values import WrongValue, reader_of
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
        (["--strategy", "beem"], "--strategy beem: there is no such strategy; did you mean beam?"),
        (["--set", "tpo_k=5"], "--set tpo_k: unknown key tpo_k; did you mean top_k?"),
    ],
)
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


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["run", "One day", "-o", ""], "--output"),
        (["run", "One day", "-i", ""], "--input"),
        (["run", "One day", "--report", ""], "--report"),
        (["report", ""], "EVENTS"),
    ],
)
def test_an_empty_file_name_has_its_own_sentence(arguments: list[str], name: str) -> None:
    done = genctl(*arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err == f"error: {name} is empty, and an empty text names no file\n"


def test_an_unknown_strategy_is_reported_with_all_other_mistakes() -> None:
    done = genctl("run", "One day", "--strategy", "beem", "--set", "top_k=-1", "-p", "nucleos")
    lines = done.err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "error", "error", "hint"]
    assert all(name in done.err for name in ("did you mean beam?", "did you mean nucleus?", "top_k = -1"))


def test_a_wrong_value_is_an_error_with_fields() -> None:
    with pytest.raises(WrongValue) as caught:
        reader_of(list[Literal["json", "text"]] | None)(["text", "jsn"])
    assert (caught.value.value, caught.value.choices) == ("jsn", ("json", "text"))
    with pytest.raises(WrongValue) as caught:
        reader_of(float)("ten")
    assert (caught.value.value, caught.value.expected) == ("ten", "a number")


@pytest.mark.parametrize("flag", ["--output", "--events", "--report", "--adapter", "--prompt-cache"])
def test_a_name_that_no_file_can_have_is_one_line(flag: str, tmp_path: Path) -> None:
    """Python's `Path.is_file` raises for it."""
    done = genctl("run", "-m", "builtin:numbers", "7", flag, f"{tmp_path}/{'n' * 300}")
    assert done.status == 2
    (line,) = done.err.splitlines()
    assert line.startswith(("error: the output could not be written: File name too long (", "error: cannot use "))
    assert "bug" not in line
