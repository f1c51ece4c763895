"""Twice the chat, twice the work: opening it, and each of its commands as often as it has steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from genctl.commands.chat.chat import _in_force
from genctl.commands.chat.story import Story
from genctl.commands.chat.turns import drawn
from genctl.errors import InputError
from genctl.tree.changes import SCHEMA
from genctl.tree.journal import tree_of_lines
from genctl.tree.nodes import Tree
from tests.work import growth

Line = dict[str, Any]
OPENED = {
    "event": "opened",
    "schema": SCHEMA,
    "model": "m",
    "checkpoint": "c",
    "prompt": "p",
    "prompt_ids": [1],
    "seed": 7,
}


def grown(node: int, parent: int, id: int, **more: Any) -> Line:
    return {"event": "grown", "node": node, "parent": parent, "id": id, "logprob": -0.5, "text": f" w{id}", **more}


def step(*inside: Line, line: str = "generate", **settled: Any) -> Iterator[Line]:
    yield {"event": "begun", "line": line, "step": True}
    yield from inside
    yield {"event": "settled", **settled}


def tree(lines: Iterator[Line] | list[Line]) -> Tree:
    return tree_of_lines([json.dumps(line).encode() + b"\n" for line in (OPENED, *lines)], "tree")


SIZE = 60
MOST = 2.6


def said(line: str, at: int) -> Iterator[Line]:
    return step(line=line, cursor=at, tip=at)


def turns(size: int) -> Iterator[Line]:
    """A long conversation of empty turns."""
    for node in range(1, size + 1):
        yield from said('say ""', node - 1)
        yield from step(grown(node, node - 1, 1, start=node - 1), line=f"answer {node - 1}", cursor=node, tip=node)


def retries(size: int) -> Iterator[Line]:
    """Many answers to one turn."""
    yield from said('say "x"', 0)
    for node in range(1, size + 1):
        yield from said("read", 0)
        yield from step(grown(node, 0, node), line="answer 0", cursor=node, tip=node)


def edits(size: int) -> Iterator[Line]:
    """Many first turns."""
    yield from said('say "x"', 0)
    for _ in range(size):
        yield from said('edit 1 "y"', 0)


def forks(size: int) -> Iterator[Line]:
    """A long conversation with two answers to each turn."""
    for node in range(1, size + 1):
        yield from said('say ""', max(2 * node - 3, 0))
        for place in (2 * node - 1, 2 * node):
            parent = max(2 * node - 3, 0)
            inside = grown(place, parent, place, start=parent)
            yield from step(inside, line=f"answer {parent}", cursor=place, tip=place)
        yield from said(f"branch {node}", 2 * node - 1)


def returns(size: int) -> Iterator[Line]:
    """A long conversation, and many steps back to its first branch and its last turn."""
    yield from turns(size)
    for _ in range(size):
        yield from said("branch 1", size)
        yield from said(f'edit {size} "z"', size)


def heard(size: int) -> Iterator[Line]:
    """Messages that nobody answers."""
    for _ in range(size):
        yield from said("message " + json.dumps({"role": "assistant", "content": "x"}), 0)


def sets(size: int) -> Iterator[Line]:
    """Many settings."""
    for number in range(size):
        yield from said(f"set top_k={number + 1}", 0)
        yield from said("unset top_k", 0)
        yield from said("preset greedy", 0)


CHATS = {chat.__name__: chat for chat in (turns, retries, edits, forks, returns, heard, sets)}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_opened(name: str) -> None:
    assert growth(lambda size: lambda: Story(tree(CHATS[name](size))), SIZE) < MOST


def undone(story: Story) -> None:
    while story.tree.steps:
        story.undo()


def back(story: Story) -> None:
    undone(story)
    while story.tree.undone:
        story.redo()


EVERY: dict[str, Callable[[Story], Any]] = {
    "undo": undone,
    "redo": back,
    "/tree": lambda story: drawn(story.conversation, 80),
    "/branch": lambda story: story.conversation.branches,
    "the settings": lambda story: _in_force(story.settings),
}


@pytest.mark.parametrize("what", EVERY)
@pytest.mark.parametrize("name", CHATS)
def test_what_a_chat_does_with_all_it_has(name: str, what: str) -> None:
    def make(size: int) -> Callable[[], object]:
        story = Story(tree(CHATS[name](size)))
        return lambda: EVERY[what](story)

    assert growth(make, SIZE) < MOST


def test_only_settings_that_are_in_force_are_resolved() -> None:
    story = Story(tree(sets(50)))
    assert _in_force(story.settings) == [("unset", "top_k"), ("preset", "greedy")]


def test_forks_within_forks_are_indented_while_a_line_has_room() -> None:
    lines = drawn(Story(tree(forks(300))).conversation, 80)
    assert len(lines) == 900
    assert max(len(before) for before, _, _ in lines) <= 44


def test_answers_that_share_the_tokens_of_one_have_a_bound() -> None:
    def shared(size: int) -> Iterator[Line]:
        yield from said('say "x"', 0)
        nodes = [grown(node, node - 1, node) for node in range(1, size + 1)]
        yield from step(*nodes, line="answer 0", cursor=size, tip=size)
        for _ in range(size):
            yield from step({"event": "reached", "node": size}, line="answer 0")

    Story(tree(shared(10)), most=1000)
    with pytest.raises(InputError, match="its answers have more than 67,108,864 characters together"):
        Story(tree(shared(40)), most=1000)
