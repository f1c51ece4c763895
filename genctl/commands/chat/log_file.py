"""The file of a chat: JSON objects, one a line.

Half a line at the end, left by a kill, is no part of the chat. The file is readable by its owner only, is never a link,
and is locked while it is open.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from genctl.documents import reader
from genctl.errors import InputError, OutputError, printable
from genctl.io.file_lock import lock
from genctl.io.output import unbuffered
from genctl.io.sessions import open_session
from genctl.io.sink import Sink

SCHEMA = "genctl-chat/1"
Line = dict[str, Any]


class NotAChat(InputError):
    """The file of another command."""


class LogFile(NamedTuple):
    """An open file."""

    sink: Sink
    lines: list[Line]
    torn: bool  # whether it ended in half a line, which was dropped


def open_log(path: Path) -> LogFile:
    """A file, to be continued.

    Raises InputError for a file that is no chat or is damaged, OutputError if it cannot be written, UsageError if
    another process has it open.
    """
    descriptor = open_session(path, os.O_RDWR)
    lock(descriptor, path)
    name = printable(str(path))
    try:
        with open(descriptor, "rb", closefd=False) as file:
            lines, whole = _read(file, name)
        torn = os.fstat(descriptor).st_size > whole
        sink = Sink(unbuffered(descriptor), name, owned=descriptor, path=path, whole=whole)
    except BaseException:
        with suppress(OSError):
            os.close(descriptor)
        raise
    try:
        sink.cut_back()
    except OutputError:
        sink.leave()
        raise
    return LogFile(sink, lines, torn)


def read(path: Path) -> list[Line]:
    """The whole lines of a file that another process may be writing. Raises InputError."""
    with os.fdopen(open_session(path, os.O_RDONLY), "rb") as file:
        return _read(file, printable(str(path)))[0]


def encoded(line: Line) -> bytes:
    """A line as the file has it."""
    return json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def damaged(name: str, number: int, error: ValueError) -> InputError:
    """The error for a line that is not one of a chat."""
    hint = "the lines before it are whole: a copy that ends there can be opened"
    return InputError(f"{name} is damaged at line {number}: {error}", hint=hint)


def _read(file: BinaryIO, name: str) -> tuple[list[Line], int]:
    """The whole lines and their bytes. Raises InputError."""
    lines: list[Line] = []
    whole = 0
    try:
        for line in takewhile(lambda line: line.endswith(b"\n"), reader.lines(file)):
            if not lines:
                _check_schema(line, name)
            lines.append(_object(line))
            whole += len(line)
    except reader.Unreadable as error:
        raise InputError(f"cannot read {name}: {error}") from None
    except ValueError as error:
        raise damaged(name, len(lines) + 1, error) from None
    if not lines:
        raise InputError(f"{name} is not the file of a chat: it has no whole line")
    return lines, whole


def _object(line: bytes) -> Line:
    """The JSON object of a line. Raises ValueError."""
    found = reader.loads(line.decode("utf-8", "surrogatepass"))
    if not isinstance(found, dict):
        raise ValueError("a line is a JSON object, this is not")
    return found


def _check_schema(line: bytes, name: str) -> None:
    """Raises InputError for the first line of another file, NotAChat for that of a tree."""
    try:
        first = _object(line)
    except ValueError:
        first = {}
    schema = printable(str(first.get("schema")))[:40]
    if schema == "genctl-tree/1" and not first.get("prompt"):
        raise InputError(f"{name} was written by an older genctl, in the format {schema}: it cannot be continued")
    if schema.startswith("genctl-tree/"):
        hint = f"genctl explore --open {name} continues it"
        raise NotAChat(f"{name} is a tree of genctl explore, not a chat", hint=hint)
    if not schema.startswith("genctl-chat/"):
        raise InputError(f"{name} is not the file of a chat", hint="genctl chat --save writes one")
    if schema != SCHEMA:
        raise InputError(f"{name} was written by another genctl, in the format {schema}: this one reads {SCHEMA}")
