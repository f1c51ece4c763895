"""One prompt is known to be alone where that takes no waiting."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from genctl.io.readers import Prompts, open_prompts


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
