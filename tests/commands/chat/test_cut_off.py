"""A chat that was killed: the user's message stays, and its answer is generated again, with the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genctl.commands.chat.log import ChatLog
from tests.cli.tool import genctl
from tests.commands.chat.test_saved import chat, messages
from tests.engines.server.stand_in import Failure, running

ANSWERED = "note: the last turn has no answer yet; it is answered first\n"


def cut(whole: Path, lines: int = 1) -> Path:
    """The chat's file as a kill leaves it: without its last lines."""
    path = whole.with_name("cut.jsonl")
    path.write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[:-lines]))
    return path


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A greedy chat of two turns."""
    path = tmp_path / "whole.jsonl"
    done = chat("--save", str(path), "-n", "12", turns=("One day", "And then"))
    assert done.status == 0, done.err
    return path


def test_killed_at_any_line_a_chat_goes_on_with_the_same_bytes(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    chat("--save", str(whole), "-n", "3", "--do-sample", "--seed", "5", turns=("A fox", "A bear"))
    for lines, turns in ((4, ("A fox", "A bear")), (3, ("A bear",)), (2, ("A bear",)), (1, ())):
        path = cut(whole, lines)
        done = chat("--open", str(path), turns=turns)
        assert done.status == 0, done.err
        assert path.read_bytes() == whole.read_bytes()
        assert (ANSWERED in done.err) == bool(lines % 2)


def test_an_answer_that_was_drawn_for_a_row_with_an_id_comes_again(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    rows = [json.dumps({"id": name, "role": "user", "content": name}) for name in ("one", "two")]
    drawn = ("--input-format", "jsonl", "-n", "8", "--do-sample", "--seed", "5")
    chat("--save", str(whole), *drawn, turns=tuple(rows))
    path = cut(whole)
    assert chat("--open", str(path), turns=()).status == 0
    assert path.read_bytes() == whole.read_bytes()


def test_a_turn_that_cannot_be_answered_is_not_said_at_the_next_opening(whole: Path) -> None:
    """Killed after the turn was saved, which is too long for an answer to fit."""
    path = cut(whole)
    lines = path.read_text().splitlines()
    lines[-1] = lines[-1].replace("And then", "word " * 600)
    path.write_text("".join(f"{line}\n" for line in lines))
    assert chat("--open", str(path), "-n", "2", turns=("More",)).status != 0
    assert messages(path) == messages(whole)[:2]
    done = chat("--open", str(path), "-n", "2", turns=("More",))
    assert (done.status, done.err) == (0, "")


def test_an_answer_of_a_server_is_generated_anew(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    with running() as server:
        words = ("chat", "--backend", server.url)
        assert genctl(*words, "--save", str(whole), stdin="Hello\n").status == 0
        path = cut(whole)
        content = path.read_bytes()
        server.fault = lambda server, body: Failure(404, b'{"error": {"message": "no"}}')
        assert genctl(*words, "--open", str(path), stdin="").status == 3
        assert path.read_bytes() == content, "a server that is gone leaves the turn as it was"
        server.fault = lambda server, body: None
        done = genctl(*words, "--open", str(path), stdin="More\n")
        assert (done.status, ANSWERED in done.err) == (0, True)
    assert messages(path)[:2] == messages(whole)
    assert len(ChatLog.look(path).branches) == 1
