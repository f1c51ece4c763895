"""The only reader of documents: files that a user names, or that are found in known places.

A document is a regular file, a pipe (`<(…)` is one), a terminal or the null device. Its size is bounded, and a pipe
that is silent for SILENCE_S is an error. Other devices are refused, because they never end. Prompts are not documents:
they are a stream, and may arrive as slowly as a person types.
"""

from __future__ import annotations

import io
import json
import math
import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn, TypeAlias

from genctl.errors import quote, reason_of, size

# -- strict JSON: keys are unique, numbers finite, nesting bounded. Python's own reader accepts more -------------------


DEEPEST = 64  # levels of nesting, so that recursive code is safe
MOST_VALUES = 4_000_000  # in one document: each takes up to a hundred bytes of memory


class BadJson(ValueError):
    """An error in a JSON text, as a sentence without its place."""


class Incomplete(BadJson):
    """The text is not JSON; it may be truncated."""


class DuplicateKey(ValueError):
    """An object has `key` twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key!r:.80} is given twice")
        self.key = key


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for `json.loads`. Raises DuplicateKey."""
    items = dict(pairs)
    if len(items) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKey(key)
            seen.add(key)
    return items


def loads(text: str | bytes, *, finite: bool = True) -> Any:
    """The value of a JSON text; bytes are UTF-8. Raises BadJson.

    Refuses duplicate keys, numbers that are not finite or have thousands of digits, more than DEEPEST levels of
    nesting, and more than MOST_VALUES values. Unless `finite`, numbers may be NaN or infinite, as some servers write
    them.
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        if len(text) > MOST_VALUES and sum(map(text.count, ",[{")) > MOST_VALUES:
            raise BadJson(f"it holds more than {MOST_VALUES:,} values")
        if text.startswith("\ufeff"):
            raise Incomplete("not JSON: a byte order mark at column 1")
        value = (_DECODER if finite else _GENEROUS).decode(text)
    except UnicodeDecodeError as error:
        raise Incomplete(f"byte {error.start + 1} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise Incomplete(reason_of(error)) from None
    except RecursionError:
        raise BadJson(_TOO_DEEP) from None
    except DuplicateKey as error:
        raise BadJson(f"the key {quote(error.key)} occurs twice") from None
    except BadJson:
        raise
    except ValueError:  # the interpreter's limit on the digits of an integer
        raise BadJson("a number has too many digits") from None
    if text.count("[") + text.count("{") > DEEPEST and is_deep(value):
        raise BadJson(_TOO_DEEP)
    return value


_TOO_DEEP = f"nested too deeply: more than {DEEPEST} levels"


def is_deep(value: Any) -> bool:
    """Whether objects and lists are nested more than DEEPEST levels deep."""
    level = [value]  # the objects and lists of a level
    for _ in range(DEEPEST):
        if not level:
            return False
        parts = (item.values() if isinstance(item, dict) else item for item in level)
        level = [inner for part in parts for inner in part if isinstance(inner, (dict, list))]
    return bool(level)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise BadJson("a number is too large")
    return value


def _constant(name: str) -> NoReturn:
    raise BadJson(f"not JSON: {name} is not a JSON number")


_GENEROUS = json.JSONDecoder(object_pairs_hook=once)
_DECODER = json.JSONDecoder(object_pairs_hook=once, parse_float=_finite, parse_constant=_constant)


def kind_of(value: Any) -> str:
    """The kind of a JSON value, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {str: "a string", int: "an integer", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


MOST = 64 << 20  # bytes of a document that is read whole, and of one line of JSON lines
MOST_LINES = 1 << 30  # bytes of all JSON lines together
SILENCE_S = 20.0  # timeout of each read from a pipe

Source: TypeAlias = str | Path | IO[bytes]


class Unreadable(Exception):
    """Why a document cannot be read, in a few words for the end or the middle of a sentence."""


def read(source: Source, most: int = MOST, *, regular: bool = False) -> bytes:
    """All bytes. Raises Unreadable. `regular`: accept only a regular file."""
    with opened(source, regular=regular) as file:
        claimed = 0
        with suppress(OSError, ValueError):  # a stream may have no descriptor
            state = os.fstat(file.fileno())
            claimed = state.st_size if stat.S_ISREG(state.st_mode) else 0
        data = b"" if claimed > most else file.read(most + 1)
        if max(claimed, len(data)) > most:
            raise Unreadable(f"larger than {size(most, 0)}, the most that is read")
        return data


def text(source: Source, most: int = MOST, *, regular: bool = False) -> str:
    """The whole text, from UTF-8, without a byte order mark. Raises Unreadable."""
    try:
        return read(source, most, regular=regular).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(reason_of(error)) from None


def text_lines(text: str) -> list[str]:
    """The lines of a text. Only LF and CRLF end one: a lone CR and the separators of Unicode are content."""
    found = [line.removesuffix("\r") for line in text.split("\n")]
    return found if found[-1] else found[:-1]


def lines(source: Source, longest: int = MOST, most: int = MOST_LINES) -> Iterator[bytes]:
    """The lines with their line ends; the last may lack one. Raises Unreadable before a line that is too long."""
    number = total = 0
    with opened(source) as file:
        while line := file.readline(longest + 1):
            number, total = number + 1, total + len(line)
            if len(line) > longest:
                raise Unreadable(f"line {number:,} is longer than {size(longest, 0)}, the most that is read")
            if total > most:
                raise Unreadable(f"larger than {size(most, 0)}, the most that is read")
            yield line


@contextmanager
def opened(source: Source, *, regular: bool = False) -> Iterator[IO[bytes]]:
    """Open a document. Errors of opening and of reading are raised as Unreadable. A stream is used as it is."""
    try:
        if not isinstance(source, (str, Path)):
            yield source
            return
        descriptor = _open(source, regular=regular)
        kind = os.fstat(descriptor).st_mode
        raw: io.RawIOBase = _Pipe(descriptor) if stat.S_ISFIFO(kind) else io.FileIO(descriptor, "rb")
        with io.BufferedReader(raw) as file:
            yield file
    except FileNotFoundError:
        raise Unreadable("no such file") from None
    except (OSError, ValueError) as error:
        raise Unreadable(reason_of(error) if isinstance(error, OSError) else "not a file name") from None


def _open(path: str | Path, *, regular: bool) -> int:
    # opening a pipe must not wait for its other end, and a terminal must not become ours
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"))
    descriptor = os.open(path, flags)
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise Unreadable("a folder, not a file")
        if regular and not stat.S_ISREG(kind):
            raise Unreadable("not a regular file")
        check_ends(descriptor)
        if not stat.S_ISFIFO(kind) and hasattr(os, "set_blocking"):
            os.set_blocking(descriptor, True)  # a terminal waits for a person
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_ends(descriptor: int) -> None:
    """Raises Unreadable for a device that never ends. A person ends a terminal, and the null device is empty."""
    state = os.fstat(descriptor)
    if not (
        stat.S_ISREG(state.st_mode)
        or stat.S_ISFIFO(state.st_mode)
        or stat.S_ISSOCK(state.st_mode)
        or os.isatty(descriptor)
        or os.path.samestat(state, Path(os.devnull).stat())
    ):
        raise Unreadable("a device, not a file")


class _Pipe(io.RawIOBase):
    """A pipe. Raises Unreadable if nothing arrives for SILENCE_S."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._poll.poll(1000 * SILENCE_S):
            raise Unreadable(f"a pipe that brings nothing for {SILENCE_S:g} s")
        data = os.read(self._descriptor, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()
