"""The chats on this machine, of which the last one is continued."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.tool import Done, genctl

SHORT = ("-n", "4", "-q")


def say(*arguments: str, turn: str = "The end?") -> Done:
    return genctl("chat", *SHORT, *arguments, stdin=f"{turn}\n")


@pytest.fixture
def folder(own_state: Path) -> Path:
    """The folder of sessions, with three chats; the oldest was changed last."""
    folder = own_state / "genctl" / "sessions"
    folder.mkdir(parents=True)
    for age, (name, turn) in enumerate((("c", "Once upon a time"), ("b", "A fox\nand"), ("a", "x " * 200))):
        assert say("--save", str(folder / f"{name}.jsonl"), turn=turn).status == 0
        os.utime(folder / f"{name}.jsonl", (10**9 - age * 10**5,) * 2)
    return folder


def test_the_last_chat_continues(folder: Path) -> None:
    done = say("--continue", "--format", "jsonl")
    assert done.status == 0, done.err
    assert done.records[0]["usage"]["prompt_tokens"] > 8  # with all earlier messages
    assert (folder / "c.jsonl").read_text().count('"role": "user"') == 2
    later = (folder / "c.jsonl").stat().st_mtime + 1  # file times are coarse
    os.utime(folder / "b.jsonl", (later, later))
    assert say("--continue").status == 0
    assert (folder / "b.jsonl").read_text().count('"role": "user"') == 3


def test_trees_are_no_chats_and_a_damaged_one_is_reported(folder: Path) -> None:
    (folder / "explored.jsonl").write_text('{"schema": "genctl-tree/2"}\n')
    assert say("--continue").status == 0
    header = (folder / "c.jsonl").read_text().splitlines(keepends=True)[0]
    (folder / "z.jsonl").write_text(f"{header}[]\n")
    done = say("--continue")
    assert (done.status, "z.jsonl is damaged at line 2" in done.err) == (2, True)


def test_there_may_be_nothing_to_continue(own_state: Path) -> None:
    assert "there is no chat to continue in" in say("--continue").err
    for more in (("--open", "x"), ("--save", "x")):
        assert say("--continue", *more).status == 2
