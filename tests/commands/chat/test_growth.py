"""Opening a chat and listing its branches take linear time: twice the chat, twice the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from genctl.commands.chat.log import ChatLog
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


@pytest.mark.parametrize("name", CHATS)
def test_its_branches_are_listed(name: str) -> None:
    def make(size: int) -> Callable[[], object]:
        one = log()
        CHATS[name](one, size)
        return lambda: one.branches

    assert growth(make, SIZE) < MOST
