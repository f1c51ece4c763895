"""A conversation as a tree of messages, and where in it the chat is.

Nothing is removed: an edit, a retry or another branch continues an earlier message.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from genctl.errors import UsageError, count
from genctl.tree.nodes import skip_from


@dataclass(frozen=True)
class Message:
    """One message of the tree."""

    number: int  # in the order in which they were said, from 0
    parent: int | None
    role: str
    content: str
    node: int  # of the tree of tokens, where it ends
    turns: int  # messages of the user down to it

    @property
    def plain(self) -> dict[str, str]:
        """The message as templates and servers take it."""
        return {"role": self.role, "content": self.content}


@dataclass
class Conversation:
    """All messages, and the last one of the branch that continues (`at`; None: nothing is said).

    Adding, taking back and finding a turn cost the same however long the conversation is.
    """

    messages: list[Message] = field(default_factory=list)
    at: int | None = None
    _children: dict[int | None, list[int]] = field(default_factory=dict, compare=False)
    _leaves: list[int] = field(default_factory=list, compare=False)  # messages that nothing continues, in their order
    _depths: list[int] = field(default_factory=list, compare=False)
    _skips: list[int] = field(default_factory=list, compare=False)  # one further up each, as in the tree of tokens

    # -- reading -------------------------------------------------------------------------------------------------------

    def path(self, end: int | None) -> list[Message]:
        """The messages from the first to number `end`."""
        found = []
        while end is not None:
            found.append(self.messages[end])
            end = found[-1].parent
        return found[::-1]

    @property
    def here(self) -> list[Message]:
        """The messages of the branch that continues."""
        return self.path(self.at)

    def turns_to(self, end: int | None) -> int:
        """How many messages of the user there are from the first message to number `end`."""
        return 0 if end is None else self.messages[end].turns

    @property
    def last_answer(self) -> Message | None:
        """The last answer of this branch."""
        here = self.at
        while here is not None and self.messages[here].role != "assistant":
            here = self.messages[here].parent
        return None if here is None else self.messages[here]

    def children(self, number: int | None) -> list[Message]:
        """The messages that continue one, in the order in which they were said; those of None begin the chat."""
        return [self.messages[child] for child in self._children.get(number, ())]

    @property
    def branches(self) -> list[Message]:
        """The last messages of all branches, in the order in which they were said."""
        return [self.messages[leaf] for leaf in self._leaves]

    def turn(self, number: int | None) -> Message:
        """The user's message number `number` of this branch, from 1; None is the last. Raises UsageError."""
        turns = self.turns_to(self.at)
        if self.at is None or not turns:
            raise UsageError("nothing has been said yet")
        if number is not None and not 0 < number <= turns:
            raise UsageError(f"there is no turn {number}: this branch has {count(turns, 'turn')}")
        wanted = turns if number is None else number
        message = self.messages[self.at]
        while message.parent is not None and self.messages[message.parent].turns >= wanted:
            skip = self.messages[self._skips[message.number]]
            message = skip if skip.turns >= wanted else self.messages[message.parent]
        return message

    def attempts(self, question: int | None) -> int:
        """The answers to a message."""
        return sum(message.role == "assistant" for message in self.children(question))

    def add(self, role: str, content: str, parent: int | None, node: int) -> Message:
        """A new message, to which the chat goes."""
        number = len(self.messages)
        message = Message(number, parent, role, content, node, self.turns_to(parent) + (role == "user"))
        self._depths.append(0 if parent is None else self._depths[parent] + 1)
        self._skips.append(number if parent is None else skip_from(parent, self._depths, self._skips))
        if parent is not None and not self._children.get(parent):
            del self._leaves[bisect_left(self._leaves, parent)]
        self._children.setdefault(parent, []).append(number)
        self._leaves.append(number)
        self.messages.append(message)
        self.at = number
        return message

    def go_back(self, length: int, at: int | None) -> None:
        """Take away all messages from number `length` on; the chat is at message `at`."""
        while len(self.messages) > length:
            parent = self.messages.pop().parent
            self._depths.pop()
            self._skips.pop()
            self._leaves.pop()  # nothing continues the last message, and no number is higher
            self._children[parent].pop()
            if parent is not None and not self._children[parent]:
                insort(self._leaves, parent)
        self.at = at

    def branch(self, number: int) -> Message:
        """The last message of branch `number`, from 1. Raises UsageError."""
        leaves = self._leaves
        if not 0 < number <= len(leaves):
            has = "there is none" if not leaves else f"there are {count(len(leaves), 'branch', 'branches')}"
            raise UsageError(f"there is no branch {number}: {has}")
        return self.messages[leaves[number - 1]]


def drawn(conversation: Conversation, width: int) -> Sequence[tuple[str, str, bool]]:
    """The tree in lines: what stands before a message, the message, and whether it is on the branch that continues.

    Messages that follow one another stand below one another; a fork indents what follows it.
    """
    here = {message.number for message in conversation.here}
    leaves = {message.number: place for place, message in enumerate(conversation.branches, 1)}
    lines: list[tuple[str, str, bool]] = []
    waiting: list[tuple[Message, str, str]] = []  # message, before its line, before the lines that follow it

    def follow(number: int | None, indent: str) -> None:
        children = conversation.children(number)
        for place, child in reversed(list(enumerate(children))):
            if len(children) == 1:
                waiting.append((child, indent, indent))
            else:
                last = place == len(children) - 1
                # forks within forks are indented while a line has room for words
                below = indent + ("  " if last else "│ ") if 2 * len(indent) < width else indent
                waiting.append((child, indent + ("└ " if last else "├ "), below))

    follow(None, "")
    while waiting:
        message, before, after = waiting.pop()
        sign = "›" if message.role == "user" else "·" if message.role == "assistant" else "#"
        leaf = f" [{leaves[message.number]}]" if message.number in leaves else ""
        words = " ".join(message.content.split())
        room = max(width - len(before) - len(leaf) - 2, 8)
        cut = words if len(words) <= room else f"{words[: room - 1]}…"
        lines.append((before, f"{sign} {cut}{leaf}", message.number in here))
        follow(message.number, after)
    return lines
