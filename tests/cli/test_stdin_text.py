"""Standard input inside a prompt (`{stdin}`), as the prompts (`-`), and a pipe that nobody reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from genctl.io.readers import open_prompts
from tests.cli.tool import genctl

NUMBERS = ("-m", "builtin:numbers")


def prompts(*arguments: str, stdin: str = "12\n") -> list[str]:
    done = genctl("run", *NUMBERS, *arguments, "--format", "jsonl", "-n", "1", stdin=stdin)
    assert done.status == 0, done.err
    return [record["prompt"] for record in done.records]


def test_stdin_in_a_prompt_is_all_of_standard_input() -> None:
    assert prompts("1{stdin}", "2{stdin}3") == ["112\n", "212\n3"]
    assert prompts("1{stdin}", stdin="\ufeff5") == ["15"]


def test_stdin_in_a_template_is_all_of_standard_input(tmp_path: Path) -> None:
    assert prompts("--template", "{prompt}:{stdin}", "7", "8", stdin="5") == ["7:5", "8:5"]
    (tmp_path / "rows.txt").write_text("1\n2\n")
    assert prompts("--template", "{prompt}{stdin}", "-i", str(tmp_path / "rows.txt"), stdin="5") == ["15", "25"]


def test_a_dash_reads_prompts_from_standard_input() -> None:
    assert prompts("-", stdin="1\n2\n") == ["1", "2"]
    assert prompts("-", "--input-format", "text", stdin="1\n2") == ["1\n2"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-", "5"], "- as a prompt reads prompts from standard input, but another prompt is given"),
        (
            ["-", "-i", "rows"],
            "- as a prompt reads prompts from standard input, but prompts are also given with --input",
        ),
        (["--template", "{stdin} {prompt}"], "but the prompts are read from there, too"),
        (["--template", "{stdin}", "5"], "{stdin} is its only field, so all prompts would be equal"),
    ],
)
def test_two_uses_of_standard_input_are_refused(arguments: list[str], sentence: str) -> None:
    done = genctl("run", *NUMBERS, *arguments, stdin="1\n")
    assert (done.status, done.out) == (2, "")
    assert sentence in done.err


def test_stdin_in_a_prompt_needs_a_pipe() -> None:
    done = genctl("run", *NUMBERS, "{stdin}")
    assert done.status == 2
    assert done.err.startswith("error: {stdin} stands for standard input, which is a terminal")


@pytest.mark.parametrize("content", [b"1\xff", b"1" * (16 * 2**20 + 1)])
def test_what_cannot_be_a_text_is_refused(content: bytes) -> None:
    done = genctl("run", *NUMBERS, "{stdin}", stdin=content)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: {stdin}: standard input is ")
    assert done.err.count("\n") == 1


@pytest.fixture
def pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "wb", buffering=0) as writer:
        yield reader, writer


def test_a_pipe_that_nobody_reads_is_noted_once_and_left_as_it_is(pipe: tuple[IO[bytes], IO[bytes]]) -> None:
    notes: list[str] = []
    pipe[1].write(b"text\n")
    found = open_prompts(["5"], None, pipe[0], stdin_is_terminal=False, report=notes.append)
    assert found is not None
    found.close()
    (note,) = notes
    assert note.startswith("note: standard input is not read")
    assert "{stdin}" in note
    assert "- as the prompt" in note
    assert pipe[0].read1(9) == b"text\n"  # type: ignore[attr-defined]


def test_a_pipe_that_is_filled_late_is_noted_at_the_end(pipe: tuple[IO[bytes], IO[bytes]]) -> None:
    notes: list[str] = []
    found = open_prompts(["5"], None, pipe[0], stdin_is_terminal=False, report=notes.append)
    assert found is not None
    assert notes == []
    pipe[1].write(b"text\n")
    found.close()
    found.close()
    assert len(notes) == 1


def test_an_empty_pipe_and_the_rest_of_a_loops_file_are_no_reason_for_a_note(
    pipe: tuple[IO[bytes], IO[bytes]], tmp_path: Path
) -> None:
    notes: list[str] = []
    (tmp_path / "lines").write_text("a\nb\n")
    with (tmp_path / "lines").open("rb") as file:
        for stdin in (pipe[0], file):
            found = open_prompts(["5"], None, stdin, stdin_is_terminal=False, report=notes.append)
            assert found is not None
            found.close()
    assert notes == []
