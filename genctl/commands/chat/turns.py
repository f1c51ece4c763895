"""A conversation as a tree of messages, and where in it the chat is.

Nothing is removed: an edit, a retry or another branch continues an earlier message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from genctl.errors import UsageError, count


@dataclass(frozen=True)
class Message:
    """One message of the tree."""

    number: int  # in the order in which they were said, from 0
    parent: int | None
    role: str
    content: str
    node: int  # of the tree of tokens, where it ends

    @property
    def plain(self) -> dict[str, str]:
        """The message as templates and servers take it."""
        return {"role": self.role, "content": self.content}


@dataclass
class Conversation:
    """All messages, and the last one of the branch that continues (`at`; None: nothing is said)."""

    messages: list[Message] = field(default_factory=list)
    at: int | None = None

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

    @property
    def turns(self) -> list[Message]:
        """The user's messages of this branch."""
        return [message for message in self.here if message.role == "user"]

    @property
    def last_answer(self) -> Message | None:
        """The last answer of this branch."""
        return next((message for message in reversed(self.here) if message.role == "assistant"), None)

    def children(self, number: int | None) -> list[Message]:
        """The messages that continue one, in the order in which they were said; those of None begin the chat."""
        return [message for message in self.messages if message.parent == number]

    @property
    def branches(self) -> list[Message]:
        """The last messages of all branches, in the order in which they were said."""
        parents = {message.parent for message in self.messages}
        return [message for message in self.messages if message.number not in parents]

    def turn(self, number: int | None) -> Message:
        """The user's message number `number` of this branch, from 1; None is the last. Raises UsageError."""
        turns = self.turns
        if not turns:
            raise UsageError("nothing has been said yet")
        if number is not None and number > len(turns):
            raise UsageError(f"there is no turn {number}: this branch has {count(len(turns), 'turn')}")
        return turns[-1 if number is None else number - 1]

    def attempts(self, question: int | None) -> int:
        """The answers to a message."""
        return sum(message.role == "assistant" for message in self.children(question))

    def add(self, role: str, content: str, parent: int | None, node: int) -> Message:
        """A new message, to which the chat goes."""
        message = Message(len(self.messages), parent, role, content, node)
        self.messages.append(message)
        self.at = message.number
        return message

    def drop_last(self) -> None:
        """Take the last message away; the chat is where it was before."""
        self.at = self.messages.pop().parent

    def branch(self, number: int) -> Message:
        """The last message of branch `number`, from 1. Raises UsageError."""
        branches = self.branches
        if number > len(branches):
            has = "there is none" if not branches else f"there are {count(len(branches), 'branch', 'branches')}"
            raise UsageError(f"there is no branch {number}: {has}")
        return branches[number - 1]


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
                waiting.append((child, indent + ("└ " if last else "├ "), indent + ("  " if last else "│ ")))

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
