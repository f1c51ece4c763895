"""Twice the chat, twice the work: opening it, drawing it, and each of its commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from genctl.commands.chat.log import ChatLog
from genctl.commands.chat.screen import drawn
from tests.commands.chat.test_log import log, turn
from tests.work import growth

SIZE = 60
MOST = 2.6


def turns(one: ChatLog, size: int) -> None:
    """A long conversation."""
    for _ in range(size):
        turn(one, "x", "y")


def forks(one: ChatLog, size: int) -> None:
    """A long conversation with two answers to each turn."""
    for _ in range(size):
        turn(one, "x", "y")
        assert one.end is not None
        one.add_message("assistant", "z", one.messages[one.end].parent)


CHATS = {chat.__name__: chat for chat in (turns, forks)}
EVERY: dict[str, Callable[[ChatLog], object]] = {
    "/tree": lambda one: list(drawn(one, 80)),
    "/branch": lambda one: one.branches,
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_opened(name: str, tmp_path: Path) -> None:
    def make(size: int) -> Callable[[], object]:
        path = tmp_path / f"{size}.jsonl"
        path.unlink(missing_ok=True)
        one = log(path)
        CHATS[name](one, size)
        one.close()
        return lambda: ChatLog.look(path)

    assert growth(make, SIZE) < MOST


@pytest.mark.parametrize("what", EVERY)
@pytest.mark.parametrize("name", CHATS)
def test_what_a_chat_does_with_all_it_has(name: str, what: str) -> None:
    def make(size: int) -> Callable[[], object]:
        one = log()
        CHATS[name](one, size)
        return lambda: EVERY[what](one)

    assert growth(make, SIZE) < MOST
