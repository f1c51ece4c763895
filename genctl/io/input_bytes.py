"""The bytes of an input in pieces, one for each row; and standard input, which may be one prompt, a text inside other
prompts (`{stdin}`), or a pipe that nobody reads."""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from genctl.errors import InputError, UsageError, cannot_read
from genctl.io.rows import RefusedRow

if TYPE_CHECKING:
    from genctl.io.template import Template

# -- standard input whose end may be known before it is read: `echo … | genctl` is one prompt, and is treated as one ---


LIMIT = 2**16  # bytes that are looked at


class Pipe(io.RawIOBase):
    """A binary stream that can be looked at without waiting. `read1` returns what there is, as that of a pipe does."""

    def __init__(self, source: IO[bytes]) -> None:
        # a thread that waits within a buffered stream holds its lock, without which Python cannot end
        self._source: IO[bytes] = getattr(source, "raw", source)
        self._ahead: list[bytes] = []
        self._ended = False

    def drained(self) -> bool:
        """Whether all that will ever come is here, or in a file."""
        try:
            descriptor = self._source.fileno()
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return True
            while not self._ended and sum(map(len, self._ahead)) < LIMIT:
                if not select.select([descriptor], [], [], 0)[0]:
                    break
                self._take()
        except (OSError, ValueError):  # no descriptor, or a system that cannot wait for this one
            return False
        return self._ended

    def read1(self, size: int = -1) -> bytes:
        """The next bytes; b"" at the end. `size` bounds what is read at once."""
        if not self._ahead and not self._ended:
            self._take()
        return self._ahead.pop(0) if self._ahead else b""

    def first_line(self, most: int) -> bytes:
        """The first line, or `most` bytes of it; they are read again."""
        while not self._ended and sum(map(len, self._ahead)) < most and not any(b"\n" in one for one in self._ahead):
            self._take()
        return b"".join(self._ahead)[:most].split(b"\n", 1)[0]

    def _take(self) -> None:
        read = getattr(self._source, "read1", self._source.read)
        data: bytes = read(LIMIT) or b""
        self._ended = not data
        if data:
            self._ahead.append(data)


MARK = "{stdin}"  # `template.STDIN` in braces


def insert(
    arguments: Sequence[str],
    template: Template | None,
    input_path: str | Path | None,
    stdin: IO[bytes] | IO[str] | None,
    *,
    stdin_is_terminal: bool,
    limit: int,
) -> tuple[Sequence[str], Template | None]:
    """The prompts and the template with `{stdin}` replaced by all of standard input, which is read here.

    A template whose only field is `{stdin}` is a prompt of its own. `limit` is in bytes.

    Raises UsageError if standard input is a terminal or already the source of prompts, and InputError.
    """
    if stdin_is_terminal:
        raise UsageError(
            f"{MARK} stands for standard input, which is a terminal", hint="pipe a text in, or redirect it: < FILE"
        )
    from_stdin = not arguments and str(input_path or "-") == "-"
    is_prompt = template is not None and template.is_stdin
    if from_stdin and not is_prompt:
        raise UsageError(
            f"{MARK} in --template is all of standard input, but the prompts are read from there, too",
            hint="give the prompts as arguments or with --input FILE",
        )
    if is_prompt and not from_stdin:
        raise UsageError(f"--template: {MARK} is its only field, so all prompts would be equal", hint="write {prompt}")
    if stdin is None:
        raise InputError(f"{MARK}: standard input is closed")
    try:
        binary: IO[bytes] = getattr(stdin, "buffer", stdin)  # type: ignore[arg-type]
        data = binary.read(limit + 1)
        if len(data) > limit:
            raise InputError(f"{MARK}: standard input is longer than the limit of {limit} bytes")
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise InputError(cannot_read("standard input", error, MARK)) from None
    except UnicodeDecodeError as error:
        raise InputError(f"{MARK}: standard input is not UTF-8 at byte {error.start + 1}") from None
    if template is not None:
        template = template.with_stdin(text)
        if is_prompt:
            return (template.literals[0],), None
    return [argument.replace(MARK, text) for argument in arguments], template


def note_unread(stdin: IO[bytes] | IO[str] | None, report: Callable[[str], object]) -> None:
    """Report a pipe with text on standard input that is not read. Nothing is consumed.

    A file is no reason for it: in `while read line; do genctl …; done < FILE` the rest belongs to the loop.
    """
    with suppress(ImportError, OSError, ValueError, AttributeError):  # Windows lacks them, a test the descriptor
        import fcntl
        import termios

        descriptor = stdin.fileno()  # type: ignore[union-attr]
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        if is_pipe and int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder) > 0:
            report(
                f"note: standard input is not read: write {MARK} in the prompt for its text, or - as the prompt to "
                "read prompts"
            )


# -- the bytes of an input in pieces, one for each row: lines, or all of it --------------------------------------------


ENDLESS = 2**30  # bytes after which a line is taken to have no end
_CHUNK = 2**16
BOM = b"\xef\xbb\xbf"


class RowBytes(NamedTuple):
    """The bytes of a row, between two separators."""

    number: int  # from 1
    offset: int  # of its first byte in the input
    data: bytes  # without its separator; empty if it is longer than the limit
    length: int  # in bytes


def text_of(piece: RowBytes, limit: int) -> str:
    """The text of a piece. Raises RefusedRow."""
    if piece.length > limit:
        raise RefusedRow(f"{piece.length} bytes are more than the limit of {limit}")
    try:
        return piece.data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte, offset = piece.data[error.start], piece.offset + error.start
        is_utf16 = piece.offset == 0 and piece.data.startswith((b"\xff\xfe", b"\xfe\xff"))
        also = " (the input looks like UTF-16)" if is_utf16 else ""
        raise RefusedRow(f"not UTF-8: byte 0x{byte:02x} at byte offset {offset}{also}") from None


def pieces(source: IO[bytes] | Pipe, kind: str, name: str, limit: int) -> Iterator[RowBytes]:
    """The pieces that are rows, without byte order mark, line ends and empty pieces at the end."""
    blank = 0
    for piece in split(chunks(source, name), None if kind == "text" else b"\n", limit, name):
        data, offset = piece.data, piece.offset
        if piece.number == 1 and data.startswith(BOM):
            data, offset = data[len(BOM) :], len(BOM)
        if kind != "text":
            data = data.removesuffix(b"\r")
            if piece.length <= limit and not (data.strip(b" \t\r") if kind == "jsonl" else data):
                blank += 1
                continue
        for number in range(piece.number - blank, piece.number):
            yield RowBytes(number, 0, b"", 0)
        blank = 0
        yield RowBytes(piece.number, offset, data, piece.length)


def split(chunks: Iterator[bytes], separator: bytes | None, limit: int, name: str) -> Iterator[RowBytes]:
    """Split at each separator (None: nowhere). What follows the last separator is a piece if it is not empty.

    Raises InputError for a piece without an end.
    """
    number, offset, length = 1, 0, 0
    head = bytearray()  # of the piece that is still open; emptied once it is too long, so memory is bounded
    for chunk in chunks:
        *whole, rest = [chunk] if separator is None else chunk.split(separator)
        for part in whole:
            length += len(part)
            yield RowBytes(number, offset, b"" if length > limit else bytes(head) + part, length)
            number, offset, length = number + 1, offset + length + 1, 0
            head.clear()
        length += len(rest)
        if length > ENDLESS:
            raise InputError(f"cannot read {name}: line {number} does not end within 1 GiB")
        if length > limit:
            head.clear()
        else:
            head += rest
    if length or separator is None:
        yield RowBytes(number, offset, bytes(head), length)


def chunks(source: IO[bytes] | Pipe, name: str) -> Iterator[bytes]:
    """The bytes as they come. Raises InputError."""
    # read1 hands over what a pipe holds now, so that rows of a slow producer are not held back.
    read_some: Callable[[int], bytes] = getattr(source, "read1", source.read)
    try:
        while chunk := read_some(_CHUNK):
            yield chunk
    except OSError as error:
        raise InputError(cannot_read(name, error)) from None
