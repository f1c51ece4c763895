"""Where prompts come from: arguments, a file or a pipe; whether one prompt is alone, and how many lines there are."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from genctl.errors import InputError, UsageError
from genctl.io import readers
from genctl.io.readers import Prompts, count_rows, from_arguments, open_prompts
from genctl.io.rows import BadRow, InputRow


class Untouched(io.BytesIO):
    def read1(self, size: int | None = -1, /) -> bytes:
        raise AssertionError("stdin was read")


def take(found: Prompts | None) -> list[str | None]:
    assert found is not None
    with found:
        return [row.prompt for row in found if isinstance(row, InputRow)]


def test_arguments_leave_stdin_alone() -> None:
    assert take(open_prompts(["a", "b\nc"], None, Untouched(b"x"), stdin_is_terminal=False)) == ["a", "b\nc"]


def test_a_file_leaves_stdin_alone(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt":"a"}\n')
    assert take(open_prompts([], path, Untouched(b"x"), stdin_is_terminal=False)) == ["a"]


@pytest.mark.parametrize("stdin", [io.BytesIO(b"a\nb\n"), io.TextIOWrapper(io.BytesIO(b"a\nb\n"), "ascii")])
@pytest.mark.parametrize("path", [None, "-"])
def test_stdin_is_read_when_piped(stdin: io.BytesIO, path: str | None) -> None:
    stdin.seek(0)
    assert take(open_prompts([], path, stdin, stdin_is_terminal=False)) == ["a", "b"]


def test_a_terminal_is_read_only_when_asked_for() -> None:
    assert open_prompts([], None, Untouched(), stdin_is_terminal=True) is None
    assert take(open_prompts([], "-", io.BytesIO(b"a\n"), stdin_is_terminal=True)) == ["a"]
    assert open_prompts([], None, None, stdin_is_terminal=False) is None


def test_what_would_be_ignored_is_refused() -> None:
    with pytest.raises(UsageError, match="as arguments and with --input x"):
        open_prompts(["a"], "x", None, stdin_is_terminal=True)
    with pytest.raises(UsageError, match="--input-format jsonl"):
        open_prompts(["a"], None, None, stdin_is_terminal=True, format="jsonl")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("missing", "missing: no such file$"),
        ("", "a folder, not a file"),
        ("file/inside", "file/inside: Not a directory$"),
        ("a\0b", "x00b: not a file name$"),
        ("\x1b[2J", r"\\x1b\[2J: no such file$"),
        ("n" * 5000, "File name too long"),
    ],
)
def test_a_file_that_cannot_be_opened_is_one_line(tmp_path: Path, name: str, wanted: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=wanted) as caught:
        open_prompts([], f"{tmp_path}/{name}", None, stdin_is_terminal=True)
    assert caught.value.message.startswith("cannot read ")
    assert caught.value.message.isprintable()


def test_no_permission_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"^cannot read x: Permission denied$"):
        open_prompts([], "x", None, stdin_is_terminal=True)


def test_the_file_is_closed_at_the_end_or_before(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("a\nb\n")
    for taken in (0, 1, 3):
        found = open_prompts([], path, None, stdin_is_terminal=True)
        assert found is not None
        list(itertools.islice(found, taken))
        found.close()
        del found  # an open file would warn here, and warnings are errors


def test_arguments_that_are_no_prompts_are_bad_rows() -> None:
    assert list(from_arguments(["a", "", "b\udcff"])) == [
        InputRow("0", 0, prompt="a", where="argument 1"),
        BadRow("1", 1, "argument 2", "input", "argument 2: empty prompt"),
        BadRow("2", 2, "argument 3", "input", "argument 3: not UTF-8 at character 2"),
    ]


# -- one prompt is known to be alone where that takes no waiting


@pytest.fixture
def pipe() -> Iterator[tuple[IO[bytes], int]]:
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as source:
        yield source, theirs


def opened(source: IO[bytes], **how: Any) -> Prompts:
    prompts = open_prompts((), None, source, stdin_is_terminal=False, **how)
    assert prompts is not None
    return prompts


@pytest.mark.parametrize(("content", "alone"), [(b"a\n", True), (b"a", True), (b"", True), (b"a\nb\n", False)])
def test_a_pipe_that_is_closed_is_read_ahead(pipe: tuple[IO[bytes], int], content: bytes, alone: bool) -> None:
    source, end = pipe
    os.write(end, content)
    os.close(end)
    prompts = opened(source)
    assert prompts.is_alone() is alone
    assert [row.id for row in prompts] == [str(place) for place in range(len(content.split()))]


def test_a_pipe_that_is_open_keeps_nobody_waiting_and_loses_nothing(pipe: tuple[IO[bytes], int]) -> None:
    source, end = pipe
    os.write(end, b"a\n")
    prompts = opened(source)
    assert prompts.is_alone() is False
    os.write(end, b"b\n" * 10_000)
    os.close(end)
    assert sum(1 for _ in prompts) == 10_001


@pytest.mark.parametrize(("content", "alone"), [("a\n", True), ("a\nb", False)])
def test_a_file_is_read_ahead(tmp_path: Path, content: str, alone: bool) -> None:
    (tmp_path / "f").write_text(content)
    prompts = open_prompts((), tmp_path / "f", None, stdin_is_terminal=True)
    assert prompts is not None
    assert prompts.is_alone() is alone
    assert len(list(prompts)) == 2 - alone


def test_an_input_that_is_one_prompt_is_alone_however_slow(pipe: tuple[IO[bytes], int]) -> None:
    source, end = pipe
    assert opened(source, format="text").is_alone()
    os.close(end)


# -- lines for a progress bar


@pytest.mark.parametrize(("content", "rows"), [(b"", 0), (b"a", 1), (b"a\n", 1), (b"a\n\nb", 3), (b"a\r\nb\r\n", 2)])
def test_the_lines_of_a_file_are_counted(
    tmp_path: Path, content: bytes, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "SCANNED", 2)
    path = tmp_path / "rows.txt"
    path.write_bytes(content)
    assert count_rows(path, "lines") == count_rows(path, "jsonl") == rows
    assert count_rows(path, "csv") is None


def test_what_can_be_read_only_once_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "missing", "/dev/null", tmp_path / "pipe"):
        assert count_rows(name, "lines") is None
