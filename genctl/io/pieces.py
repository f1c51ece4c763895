"""The bytes of an input in pieces, one for each row: lines, records that end with NUL, or all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, NamedTuple

from genctl.errors import InputError, reason_of
from genctl.io.rows import RefusedRow

if TYPE_CHECKING:
    from genctl.io.stdin_text import Pipe

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
        also = ""
        if piece.offset == 0 and piece.data.startswith((b"\xff\xfe", b"\xfe\xff")):
            also = " (the input looks like UTF-16)"
        raise RefusedRow(f"not UTF-8: byte 0x{byte:02x} at byte offset {offset}{also}") from None


def pieces(source: IO[bytes] | Pipe, kind: str, name: str, limit: int) -> Iterator[RowBytes]:
    """The pieces that are rows, without byte order mark, line ends and empty pieces at the end."""
    found = split(chunks(source, name), None if kind == "text" else b"\0" if kind == "nul" else b"\n", limit, name)
    blank = 0
    for piece in found:
        data, offset = piece.data, piece.offset
        if piece.number == 1 and data.startswith(BOM):
            data, offset = data[len(BOM) :], len(BOM)
        if kind in ("lines", "jsonl"):
            data = data.removesuffix(b"\r")
        if kind != "text" and not piece.length > limit and not (data.strip(b" \t\r") if kind == "jsonl" else data):
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
            raise InputError(f"the prompts could not be read: line {number} of {name} does not end within 1 GiB")
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
        raise InputError(f"the prompts could not be read: {reason_of(error)}: {name}") from None
