"""A chat as a log: its messages with their branches, its settings, and the message that it continues.

After the header, a line of the file is a message or a change:

    {"schema": "genctl-chat/1", "model": "builtin:stories", "checkpoint": "sha256:…", "seed": 5, "settings": […]}
    {"id": 0, "parent": null, "role": "user", "content": "Hello", "seed": 5}
    {"id": 1, "parent": 0, "role": "assistant", "content": "Hi.", "seed": 5, "finish_reason": "eos", "token_ids": […]}
    {"set": "temperature=0.7"}    a setting of what follows; also {"unset": KEY}, {"preset": NAME}, {"system": TEXT}
    {"go": 1}                     the next message continues message 1; null starts from an empty chat

A message continues its `parent`, so an edit is a message with an earlier parent, and a retry is a second answer. An
undo is a `go` to the previous position. The `seed` of a user's message is the seed of its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from genctl.config.settings import SavedLayer
from genctl.config.shapes import Natural, value_of
from genctl.errors import InputError, OutputError, UsageError, count, printable
from genctl.events import Id, Seed
from genctl.io.output import open_beside
from genctl.io.sessions import begin_session, close_session, continue_session, damaged, decoded, encoded, read_session
from genctl.io.sink import Sink

SCHEMA = "genctl-chat/1"
Role: TypeAlias = Literal["system", "user", "assistant"]
# changes -> the shapes of their values
CHANGES: dict[str, Any] = {**dict.fromkeys(("set", "unset", "preset", "system"), str), "go": Natural | None}


class NotAChat(InputError):
    """The file of another command, or of another version."""


@dataclass(frozen=True)
class ChatHeader:
    """The first line of a chat's file."""

    schema: str
    model: str  # as the user named it
    checkpoint: str  # its fingerprint; "" for a server
    seed: Seed  # from which the seed of each answer is derived
    settings: tuple[SavedLayer, ...] = ()  # lowest first


@dataclass(frozen=True)
class Message:
    """One message of a chat."""

    id: Natural
    parent: Natural | None
    role: Role
    content: str
    seed: Seed | None = None
    finish_reason: str = ""  # of an answer, as in records
    prefill: str = ""  # the given beginning of `content`
    token_ids: tuple[Id, ...] = ()  # of what was generated; () for a server


def unsent(content: str, parent: int | None) -> Message:
    """A user message that is not yet in the log."""
    return Message(-1, parent, "user", content)


class Change(NamedTuple):
    """A line that is not a message. `typed`: it was made in this process, not read from a file."""

    name: str
    value: Any
    typed: bool = True


class ChatLog:
    """The log, and its file if there is one.

    `new_file` opens the file for the first message, and gets its text; changes before that are written with it. Then a
    line is written before it takes effect, so the chat equals its file (`lines`) even if a write fails (OutputError).
    `settings` are changes that precede all lines, on top of the header's settings.
    """

    def __init__(
        self, header: ChatHeader, new_file: Callable[[str], Sink] | None = None, settings: Iterable[Change] = ()
    ) -> None:
        self.header, self.new_file, self.settings = header, new_file, [*settings]
        self.lines: list[dict[str, Any]] = [asdict(header), *({name: value} for name, value, _ in self.settings)]
        self.sink: Sink | None = None
        self.torn = False  # whether its file ended in an incomplete line, which was dropped
        self.messages: dict[int, Message] = {}
        self.ends: list[int | None] = [None]  # the end after each turn, retry, edit and branch; None is an empty chat

    @classmethod
    def open(cls, path: Path) -> ChatLog:
        """Open the chat in a file to continue it. Raises InputError, and the errors of `continue_session`."""
        log, sink, torn = continue_session(path, lambda lines: cls._read(lines, printable(str(path))))
        log.sink, log.torn = sink, torn
        return log

    @classmethod
    def look(cls, path: Path) -> ChatLog:
        """Read the chat in a file, which another process may be writing. Raises InputError."""
        return read_session(path, lambda lines: cls._read(lines, printable(str(path))))

    @classmethod
    def _read(cls, lines: Iterator[bytes], name: str) -> ChatLog:
        """Parse a chat from complete lines. Raises InputError if they are not a chat or are damaged."""
        number, header = 1, dict[str, Any]()
        with suppress(ValueError):
            header = decoded(next(lines, b""))
        if header.get("schema") != SCHEMA:
            raise NotAChat(f"{name} is not the file of a chat ({SCHEMA})", hint="genctl chat --save writes one")
        try:
            log = cls(value_of(ChatHeader, header))
            for line in lines:
                number += 1
                entry = decoded(line)
                what, value = next(iter(entry.items()), ("", None))
                if "role" in entry:
                    log._append(value_of(Message, entry))
                elif what in CHANGES and len(entry) == 1:
                    log._append(Change(what, value_of(CHANGES[what], value), typed=False))
                else:
                    raise ValueError(f"{what!r:.40} is no line of a chat")
                log.lines.append(entry)
        except ValueError as error:
            raise damaged(name, number, error) from None
        return log

    # -- the file ------------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """The file; None while there is none."""
        return None if self.sink is None else self.sink.path

    def save(self, path: Path) -> None:
        """Continue in a new file with a copy of all lines. Raises OutputError; then the old file is continued."""
        copy = open_beside(path)
        if self.sink is None:
            self.new_file = lambda words: copy
            return
        begin_session(copy, self.lines)
        self.sink.leave()
        self.sink = copy

    def close(self, *, sync: bool = True) -> None:
        """Close the file. With `sync`, raises OutputError if another program has removed it."""
        close_session(self.sink, sync=sync)

    def _write(self, line: dict[str, Any], *, lasting: bool = False) -> None:
        """Append a line; a lasting one is on the disk when this returns. Raises OutputError; it can be retried."""
        if self.sink is None and self.new_file is not None and "content" in line:  # settings alone are no chat
            sink = self.new_file(line["content"])
            begin_session(sink, self.lines)
            self.sink = sink
        if self.sink is not None:
            try:
                self.sink.write(encoded(line))
                if lasting:
                    self.sink.sync()
            except OutputError:
                with suppress(OutputError):
                    self.sink.retry()
                raise
        self.lines.append(line)

    # -- changes -------------------------------------------------------------------------------------------------------

    def add_message(self, role: Role, content: str, parent: int | None, **more: Any) -> Message:
        """Add a message and continue from it. `more`: further fields. Answers are synced, so a power cut loses none."""
        message = Message(self._next_id, parent, role, content, **more)
        line = {key: value for key, value in asdict(message).items() if value not in ("", ())} | {"content": content}
        self._write(line, lasting=role != "user")
        self._append(message)
        return message

    def change(self, name: str, value: Any) -> None:
        """Add a change: a setting, or `go`."""
        self._write({name: value})
        self._append(Change(name, value))

    def undo(self) -> None:
        """Go back to the position before the last turn, retry, edit or branch. Raises UsageError."""
        if len(self.ends) == 1:
            raise UsageError("there is nothing to undo")
        self._write({"go": self.ends[-2]})
        self.ends.pop()

    def _append(self, entry: Message | Change) -> None:
        """Apply an entry. Raises ValueError for an id that is not above all others, or a parent that is missing."""
        if isinstance(entry, Change) and entry.name != "go":
            self.settings.append(entry)
            return
        before, after = (entry.parent, entry.id) if isinstance(entry, Message) else (entry.value, entry.value)
        if before is not None and before not in self.messages:
            raise ValueError(f"there is no message {before}")
        if isinstance(entry, Message):
            if entry.id < self._next_id:
                raise ValueError(f"message {entry.id} is there already")
            self.messages[entry.id] = entry
            if entry.role == "assistant" and before == self.end:
                self.ends.pop()  # an answer belongs to the step that its question began
        self.ends.append(after)

    @property
    def end(self) -> int | None:
        """The message that the next one continues; None begins the chat."""
        return self.ends[-1]

    @property
    def _next_id(self) -> int:
        return next(reversed(self.messages), -1) + 1  # ids grow

    # -- reading -------------------------------------------------------------------------------------------------------

    def path_to(self, id: int | None) -> list[Message]:
        """The messages from the first to `id`."""
        found = []
        while id is not None:
            found.append(self.messages[id])
            id = found[-1].parent
        return found[::-1]

    @property
    def here(self) -> list[Message]:
        """The messages of the branch that continues."""
        return self.path_to(self.end)

    def turns_to(self, id: int | None) -> int:
        """The number of user messages from the first message to `id`."""
        return sum(message.role == "user" for message in self.path_to(id))

    def turn(self, number: int | None = None) -> Message:
        """The user's message `number` of this branch, from 1; None is the last. Raises UsageError."""
        users = [message for message in self.here if message.role == "user"]
        if not users:
            raise UsageError("the chat is empty")
        if number is not None and not 0 < number <= len(users):
            raise UsageError(f"there is no turn {number}: this branch has {count(len(users), 'turn')}")
        return users[-1 if number is None else number - 1]

    @property
    def unanswered(self) -> bool:
        """Whether the last turn has no answer yet, because the process was killed."""
        last = self.messages.get(-1 if self.end is None else self.end)
        return last is not None and last.role == "user" and last.seed is not None and not self.answers(last.id)

    def answers(self, question: int) -> list[Message]:
        """The answers to a message, oldest first."""
        return [each for each in self.messages.values() if each.parent == question and each.role == "assistant"]

    @property
    def branches(self) -> list[Message]:
        """The last message of each branch, oldest first; an unanswered turn counts only on the current branch."""
        everything = self.messages.values()
        parents = {message.parent for message in everything}
        counted = [each for each in everything if each.role != "user" or each.id in parents or each.id == self.end]
        parents = {message.parent for message in counted}
        return [message for message in counted if message.id not in parents]

    def branch(self, number: int) -> Message:
        """The last message of branch `number`, from 1. Raises UsageError."""
        branches = self.branches
        if not 0 < number <= len(branches):
            has = "there is none" if not branches else f"there are {count(len(branches), 'branch', 'branches')}"
            raise UsageError(f"there is no branch {number}: {has}")
        return branches[number - 1]
