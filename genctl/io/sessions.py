"""The files of chats and trees, and the default folder for them.

A file is JSON lines, appended as events happen, so a kill loses one line at most. It is readable by
its owner only, is never a link, and is locked while it is open.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

from genctl.config import reader
from genctl.errors import InputError, OutputError, cannot_read, printable
from genctl.io.output import unbuffered, unwritable
from genctl.io.sink import NotOurs, Sink, lock, open_regular

T = TypeVar("T")


def sessions_folder() -> Path:
    """Where sessions are saved: `$XDG_STATE_HOME/genctl/sessions`, `~/.local/state/genctl/sessions` by default."""
    home = Path(os.environ.get("XDG_STATE_HOME", ""))
    # The XDG specification says to ignore a relative path.
    base = home if home.is_absolute() else Path("~/.local/state").expanduser()
    return base / "genctl" / "sessions"


def new_file(kind: str, prompt: str) -> Path:
    """A new name in the folder of sessions: the time, the command and the prompt's first words. Raises OutputError."""
    folder = sessions_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise unwritable(error, folder) from None
    words = "-".join(re.findall(r"[a-z0-9]+", prompt.lower()))[:32].strip("-")
    stem = "-".join(part for part in (time.strftime("%Y%m%d-%H%M%S"), kind, words) if part)
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not os.path.lexists(path := folder / f"{name}.jsonl"))


class OpenedSession(NamedTuple, Generic[T]):
    """A session file opened to continue it."""

    value: T  # parsed from its lines
    sink: Sink
    torn: bool  # whether it ended in an incomplete line, which was dropped


def continue_session(path: Path, read: Callable[[Iterator[bytes]], T]) -> OpenedSession[T]:
    """Open and lock the file of a chat or a tree. `read` parses its complete lines.

    Raises InputError for a file that cannot be read, OutputError if it cannot be written, UsageError if another
    process has it open.
    """
    descriptor, name = _opened(path, os.O_RDWR), printable(str(path))
    lock(descriptor, path)
    whole = 0

    def counted() -> Iterator[bytes]:
        nonlocal whole
        for line in _whole_lines(file, name):
            whole += len(line)
            yield line

    try:
        with open(descriptor, "rb", closefd=False) as file:
            value = read(counted())
        sink = Sink(unbuffered(descriptor), name, owned=descriptor, path=path, whole=whole)
    except BaseException:  # a signal, too: closing the descriptor releases the lock
        with suppress(OSError):
            os.close(descriptor)
        raise
    torn = sink.size > whole
    try:
        sink.cut_back()
    except OutputError:
        sink.leave()
        raise
    return OpenedSession(value, sink, torn)


def read_session(path: Path, read: Callable[[Iterator[bytes]], T]) -> T:
    """Parse, with `read`, the complete lines of a file that another process may be writing. Raises InputError."""
    with os.fdopen(_opened(path, os.O_RDONLY), "rb") as file:
        return read(_whole_lines(file, printable(str(path))))


def begin_session(sink: Sink, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write the first lines of a file opened by `open_beside`, and give it its name, unless it replaces another file.

    Raises OutputError; the file is then removed.
    """
    try:
        for line in lines:
            sink.write(encoded(line))
        if not sink.replaces:
            sink.put_in_place()
    except BaseException:  # a signal, too
        sink.abandon(keep=False)
        raise


def close_session(sink: Sink | None, *, sync: bool) -> None:
    """Close a file, if there is one. With `sync`, raises OutputError if another program has taken it away."""
    if sink is not None:
        try:
            if sync:
                sink.sync()
        finally:
            sink.leave()


def encoded(line: Mapping[str, Any]) -> bytes:
    """Encode a line of the file."""
    return json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def decoded(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises ValueError."""
    found = reader.loads(line.decode("utf-8", "surrogatepass"))  # file names may not be UTF-8
    if not isinstance(found, dict):
        raise reader.BadJson("a line is a JSON object, this is not")
    return found


def damaged(name: str, number: int, error: Exception) -> InputError:
    """The error for a line that does not fit those before it."""
    hint = "the lines before it are whole: a copy that ends there can be opened"
    return InputError(f"{name} is damaged at line {number}: {error}", hint=hint)


def _whole_lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    """The complete lines, without an incomplete one at the end left by a kill. Raises InputError."""
    try:
        yield from itertools.takewhile(lambda line: line.endswith(b"\n"), reader.lines(file))
    except reader.Unreadable as error:
        raise InputError(f"cannot read {name}: {error}") from None


def _opened(path: Path, flags: int) -> int:
    """The descriptor of a file, which is never a link. Raises InputError."""
    name = printable(str(path))
    try:
        return open_regular(path, flags)
    except NotOurs as error:
        raise InputError(f"{name} {error}") from None
    except (OSError, ValueError) as error:
        raise InputError(cannot_read(name, error)) from None
