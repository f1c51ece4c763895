"""A tree and its file: one change a line, appended as it happens, so that a killed process loses one token at most.

Each line is written whole, by one unbuffered write. A half-written last line is cut off when the file is opened again,
and the lines that follow are those that an uninterrupted process writes. The file is readable by its owner only, is
never a link, and is locked while it is open.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from genctl import events
from genctl.documents import reader
from genctl.documents.reader import Unreadable
from genctl.errors import InputError, OutputError, printable, reason_of
from genctl.events import Token
from genctl.io.file_lock import NotOurs, lock, open_regular
from genctl.io.output import Sink, open_beside, unbuffered
from genctl.io.sessions import made_folder as made_folder
from genctl.io.sessions import new_file as new_file
from genctl.io.sessions import sessions_folder as sessions_folder
from genctl.tree.changes import KINDS, SCHEMA, Begun, By, Change, Grown, Knobs, Opened, Reached, Settled
from genctl.tree.nodes import Node, Tree

LINK = ".link"  # the suffix of a link to a chat elsewhere
FIRST = b'{"event": "opened"'  # the beginning of the first line
_HINT = "the lines before it are whole: a copy that ends there can be opened"


def remember(path: Path) -> None:
    """Let the folder of sessions have a link to a chat that is saved elsewhere, by which it is found again."""
    with contextlib.suppress(OSError, OutputError):  # the chat is saved all the same; the link may be there
        path, folder = path.resolve(), made_folder()
        if path.parent != folder.resolve():
            (folder / f"{hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()}{LINK}").symlink_to(path)


class TreeFile:
    """An open file, locked. Make one with `create` or `reopen`."""

    def __init__(self, path: Path, sink: Sink, unfinished: Sequence[Change] = ()) -> None:
        self.path = path
        self.unfinished = unfinished  # the changes of a command that was cut short, when the file was opened
        self._sink = sink

    @classmethod
    def create(cls, path: Path | Sink, opened: Opened) -> TreeFile:
        """A new file with its first line: at `path`, or in what `open_beside` has opened.

        It is in its place when this returns, unless it replaces another: that one stays until `keep`. Raises
        OutputError, if it exists or cannot be written; then nothing is left of it.
        """
        sink = path if isinstance(path, Sink) else open_beside(path)
        assert sink.path is not None
        journal = cls(sink.path, sink)
        try:
            journal.write(opened)
            if not sink.replaces:
                sink.put_in_place()
        except BaseException:
            sink.abandon(keep=False)
            raise
        return journal

    @classmethod
    def reopen(cls, path: Path) -> tuple[TreeFile, Tree]:
        """The file of a tree, to be continued, and the tree.

        Raises InputError if the file is not a tree or is damaged, OutputError if it cannot be written, UsageError if
        another process has it open.
        """
        descriptor = _open(path, os.O_RDWR)
        lock(descriptor, path)
        try:
            with open(descriptor, "rb", closefd=False) as file:
                tree, whole, unfinished = _read(_lines(file, printable(str(path))), printable(str(path)))
            sink = Sink(unbuffered(descriptor), printable(str(path)), owned=descriptor, path=path, whole=whole)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise
        try:
            sink.cut_back()
        except OutputError:
            sink.leave()
            raise
        return cls(path, sink, unfinished), tree

    def write(self, change: Change) -> None:
        """Append a change. Raises OutputError."""
        self._sink.write(
            json.dumps(events.to_json(change), ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        )

    @property
    def kept(self) -> bool:
        """Whether the file has its name: not while it is to replace another."""
        return not self._sink.replaces

    def keep(self) -> None:
        """Flush the file to the disk, and let it take the place of the one that it replaces. Raises OutputError."""
        if self.kept:
            self._sink.sync()
        else:
            self._sink.put_in_place()

    def content(self) -> bytes:
        """The whole lines of our file, also if another has its name by now. Raises OutputError."""
        return b"".join(self._sink.read(0, self._sink.whole))

    def recovered(self) -> Tree:
        """After a write that failed: the tree of the file, whose next write tries again. Raises OutputError."""
        self._sink.retry()
        return _read(io.BytesIO(self.content()), printable(str(self.path)))[0]

    def close(self) -> None:
        """Flush the file to the disk and close it. Raises OutputError if another program has taken it away."""
        try:
            self._sink.sync()
        finally:
            self._sink.leave()

    def leave(self) -> None:
        """Close the file as it is: an error is being reported."""
        self._sink.leave()

    def discard(self) -> None:
        """Close the file, and remove it if it is not kept: it holds nothing."""
        self._sink.abandon(keep=False)


class Differs(InputError):
    """A command that is done again has another effect: other settings, another machine, or a server that draws."""

    def __init__(self) -> None:
        super().__init__("what was interrupted does not come out the same here")


class NotAChat(InputError):
    """The tree of another command."""


class SavedTree:
    """A tree and its file, if there is one: every change goes through here."""

    def __init__(self, tree: Tree, journal: TreeFile | None = None) -> None:
        self.tree, self.journal = tree, journal
        self.lock = threading.RLock()  # held while the tree changes
        self.repeats = False  # whether the command is done again that was cut short
        self._expected: deque[Change] = deque()  # changes that the file has already, while they happen again

    def change(self, change: Change) -> None:
        """Let a change happen, and append it to the file. Raises OutputError."""
        with self.lock:
            if isinstance(change, Settled):
                self.take_rest()
            if self._expected:
                if _without_figures(self._expected[0]) != _without_figures(change):
                    raise Differs
                self.tree.apply(self._expected.popleft())
                return
            self.tree.apply(change)
            if self.journal is not None:
                self.journal.write(change)

    @contextmanager
    def again(self) -> Iterator[str]:
        """Do the command again that was cut short, whose line this gives: what the file has is not written twice.

        A command that ends earlier this time keeps what it had written. Where it comes out otherwise (Differs), or
        fails before it is settled, the tree is what the file has.
        """
        assert self.journal is not None
        changes, self.journal.unfinished = self.journal.unfinished, ()
        first = changes[0]
        assert isinstance(first, Begun)
        self.tree.take_back(changes)
        self._expected, self.repeats = deque(changes), True
        try:
            yield first.line
        finally:
            self.take_rest()
            self.repeats = False

    @property
    def expected(self) -> Node | None:
        """The token that the file has next, while a command is done again; None where it has no more."""
        change = self._expected[0] if self._expected else None
        if isinstance(change, Reached):
            return self.tree.nodes[change.node]
        return change if isinstance(change, Grown) else None

    def take_rest(self) -> None:
        """Take in what the file has of a command beyond what came again."""
        while self._expected:
            self.tree.apply(self._expected.popleft())

    def put(self, parent: int, token: Token, by: By, settings: int, seed: int | None, start: int) -> int:
        """Write a token after a node. Returns its node: a new one, or the one that is there."""
        node = self.tree.find(parent, token.id)
        if node is not None:
            self.change(Reached(node))
            return node
        node = len(self.tree.nodes)
        figures = token.logprob, token.text, token.rank, token.entropy
        self.change(Grown(node, parent, token.id, *figures, settings, seed, start, by))
        return node

    def entry(self, values: Mapping[str, Any]) -> int:
        """The place of knobs in the table of settings; a new entry where they are not in it."""
        place = self.tree.entry_of(values)
        if place is None:
            place = len(self.tree.settings)
            self.change(Knobs(dict(values)))
        return place


def _without_figures(change: Change) -> object:
    """A change without numbers whose last digits may depend on how a branch was read, and without the tool."""
    if isinstance(change, Grown):
        return change.node, change.parent, change.id, change.text, change.settings, change.seed, change.start, change.by
    return replace(change, tool="") if isinstance(change, Begun) else change


def read_tree(path: Path) -> Tree:
    """The tree in a file, to look at: another process may be writing it. Raises InputError."""
    with open(_open(path, os.O_RDONLY), "rb") as file:
        return _read(_lines(file, printable(str(path))), printable(str(path)))[0]


def tree_of_lines(lines: Iterable[bytes], name: str) -> Tree:
    """The tree of the lines of a file, `name` in messages. Raises InputError."""
    return _read(itertools.takewhile(lambda line: line.endswith(b"\n"), lines), name)[0]


def _open(path: Path, flags: int) -> int:
    name = printable(str(path))
    try:
        return open_regular(path, flags)
    except NotOurs as error:
        raise InputError(f"{name} {error}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            raise InputError(f"there is no file {name}") from None
        raise InputError(f"cannot open {name}: {reason_of(error)}") from None


def _read(lines: Iterable[bytes], name: str) -> tuple[Tree, int, list[Change]]:
    """The tree of the whole lines, their bytes, and the changes of the command that was cut short."""
    whole = 0
    unfinished: list[Change] = []
    tree: Tree | None = None
    for number, line in enumerate(lines, 1):
        if number == 1 and line.startswith(b'{"event": "treeopened"'):
            raise NotAChat(
                f"{name} is a tree of genctl explore, not a chat", hint=f"genctl explore --open {name} continues it"
            )
        try:
            change = events.from_json(_object(line), KINDS)
            if tree is not None:
                unfinished = [] if isinstance(change, Begun) else unfinished
                tree.apply(change)
                unfinished.append(change)
            elif isinstance(change, Opened):
                if change.schema != SCHEMA:
                    raise InputError(f"{name} is a tree of another version of genctl: {change.schema!r:.40}")
                tree = Tree(change)
            else:
                raise ValueError("a tree begins with another line")
        except InputError as error:
            if tree is None:
                raise
            raise InputError(f"{name} is damaged at line {number}: {error.message}", hint=_HINT) from None
        except ValueError as error:
            if tree is None and not line.startswith(FIRST):
                raise InputError(f"{name} is not the file of a tree", hint="genctl explore --save writes one") from None
            raise InputError(f"{name} is damaged at line {number}: {error}", hint=_HINT) from None
        whole += len(line)
    if tree is None:
        raise InputError(f"{name} is not the file of a tree: it has no whole line")
    return tree, whole, [] if tree.command is None else unfinished


def _object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises ValueError."""
    # a file name in it may be no UTF-8
    found = reader.loads(line.decode("utf-8", "surrogatepass"))
    if not isinstance(found, dict):
        raise reader.BadJson("a change is a JSON object, this is not")
    return found


def _lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    """The whole lines; what follows the last line end is left out. Raises InputError."""
    try:
        yield from itertools.takewhile(lambda line: line.endswith(b"\n"), reader.lines(file))
    except Unreadable as error:
        raise InputError(f"cannot read {name}: {error}") from None
