"""The content of each row of an input, before it is checked: a line, an object of JSON lines, or the cells of a table.

A cell of text is a string. Values of Parquet become those of JSON: dates and decimals become strings, bytes UTF-8 or
base64.
"""

from __future__ import annotations

import base64
import csv
import datetime
import io
import math
import os
import select
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeAlias

from genctl import errors
from genctl.errors import InputError, cannot_read, quote
from genctl.io import jsonl
from genctl.io.rows import RefusedRow

if TYPE_CHECKING:
    from genctl.io.jsonl import RowShape
    from genctl.io.template import Template

Cells: TypeAlias = "dict[str, Any] | RefusedRow"
TABLES = ("csv", "tsv", "parquet")

BOM = b"\xef\xbb\xbf"
ENDLESS = 2**30  # bytes after which a line is taken to have no end
CHUNK = 2**16  # bytes that are read at once
AT_ONCE = 256  # rows of Parquet in memory, at most


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
            while not self._ended and sum(map(len, self._ahead)) < CHUNK:
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
        data: bytes = read(CHUNK) or b""
        self._ended = not data
        if data:
            self._ahead.append(data)


def contents(
    source: IO[bytes] | Pipe, kind: str, name: str, limit: int, shape: RowShape, template: Template | None
) -> Iterator[str | Cells]:
    """The text or the cells of each row, or why it cannot be read. `limit` is in bytes of a row.

    Byte order mark, line ends and empty lines at the end are no content. Raises InputError if the system cannot read
    on, for a line without an end, and for what is no table.
    """
    if kind in TABLES:
        table = parquet(source, name, limit) if kind == "parquet" else separated(source, kind, name, limit)
        yield from _checked(table, name, shape, template)
        return
    blank = 0
    for number, (data, length) in enumerate(split(source, None if kind == "text" else b"\n", limit, name)):
        data = data if number else data.removeprefix(BOM)
        if kind != "text":
            data = data.removesuffix(b"\r")
            if length <= limit and not (data.strip(b" \t\r") if kind == "jsonl" else data):
                blank += 1
                continue
        yield from [RefusedRow("empty prompt")] * blank
        blank = 0
        yield _content(data, length, kind, limit)


def _content(data: bytes, length: int, kind: str, limit: int) -> str | Cells:
    if length > limit:
        return RefusedRow(f"{length} bytes are more than the limit of {limit}")
    try:
        text = data.decode()
        return jsonl.parse(text) if kind == "jsonl" else text
    except UnicodeDecodeError as error:
        return RefusedRow(f"not UTF-8: byte 0x{data[error.start]:02x} at byte {error.start + 1}")
    except RefusedRow as error:
        return error


class BytePiece(NamedTuple):
    """The bytes between two separators."""

    data: bytes  # empty if they are more than the limit
    length: int


def split(source: IO[bytes] | Pipe, separator: bytes | None, limit: int, name: str) -> Iterator[BytePiece]:
    """Split at each separator (None: nowhere). What follows the last separator is a piece if it is not empty.

    Raises InputError for errors of the system, and for a piece without an end.
    """
    # read1 returns what a pipe holds now, so that rows of a slow producer are not held back
    read_some: Callable[[int], bytes] = getattr(source, "read1", source.read)
    length = 0
    head = bytearray()  # of the piece that is still open; emptied once it is too long, so memory is bounded
    while True:
        try:
            chunk = read_some(CHUNK)
        except OSError as error:
            raise InputError(cannot_read(name, error)) from None
        if not chunk:
            break
        *whole, rest = [chunk] if separator is None else chunk.split(separator)
        for part in whole:
            length += len(part)
            yield BytePiece(b"" if length > limit else bytes(head) + part, length)
            length = 0
            head.clear()
        length += len(rest)
        if length > ENDLESS:
            raise InputError(f"cannot read {name}: a line does not end within 1 GiB")
        if length > limit:
            head.clear()
        else:
            head += rest
    if length or separator is None:
        yield BytePiece(bytes(head), length)


# -- tables ------------------------------------------------------------------------------------------------------------


def _checked(table: Iterator[Cells], name: str, shape: RowShape, template: Template | None) -> Iterator[Cells]:
    """The rows of a table. Raises InputError where no row can have a prompt: one sentence in place of one for each."""
    known = False
    for row in table:
        if not known and isinstance(row, dict):
            known, hint = True, ""
            try:
                if template is not None:
                    template.fill(dict.fromkeys(row, ""))
                elif row.keys().isdisjoint(expected := dict.fromkeys((*shape.prompts, "text"))):
                    hint = f"--template '{{{next(iter(row), 'name')}}}' makes a prompt of columns"
                    raise RefusedRow(jsonl.no_prompt("no column with a prompt", tuple(expected), row))
            except RefusedRow as error:
                raise _unreadable(name, str(error), hint) from None
        yield row


def _unreadable(name: str, reason: str, hint: str = "") -> InputError:
    return InputError(f"cannot read {name}: {reason}", hint=hint)


def _check_names(columns: Sequence[str], name: str) -> None:
    """Raises InputError where two columns have one name, or two have none."""
    twice, number = next(iter(Counter(columns).most_common(1)), ("", 1))
    if number > 1:
        raise _unreadable(name, f"two columns {f'are called {quote(twice)}' if twice else 'have no name'}")


def _lines(source: IO[bytes] | Pipe, name: str, limit: int) -> Iterator[str]:
    """The lines, whose bytes that are not UTF-8 are surrogates. Raises InputError for one that is too long."""
    for number, (data, length) in enumerate(split(source, b"\n", limit, name), 1):
        if length > limit:
            raise _unreadable(name, f"line {number} has {length} bytes, more than the limit of {limit}")
        data = data.removeprefix(BOM) if number == 1 else data
        yield data.decode("utf-8", "surrogateescape") + "\n"


def separated(source: IO[bytes] | Pipe, kind: str, name: str, limit: int) -> Iterator[Cells]:
    """The rows of CSV or TSV, whose first row names the columns.

    Blank lines are skipped. `limit` is on the bytes of a line, and on the characters of a cell. Raises InputError for a
    header that names a column twice, and for a cell that does not end.
    """
    csv.field_size_limit(limit)
    reader = csv.reader(_lines(source, name, limit), "excel-tab" if kind == "tsv" else "excel", strict=True)
    header: list[str] = []
    while True:
        place = f"line {reader.line_num + 1}" if header else "the header"
        try:
            cells = next(reader, None)
            if cells is None:
                return
            if not cells:
                continue
            try:
                "".join(cells).encode()
            except UnicodeEncodeError as error:
                raise RefusedRow(f"not UTF-8: byte 0x{ord(error.object[error.start]) - 0xDC00:02x}") from None
            if header and len(cells) != len(header):
                raise RefusedRow(f"{errors.count(len(cells), 'cell')}, but the header has {len(header)}")
        except csv.Error as error:
            if str(error).startswith("field larger"):
                reason = f"a cell has more than {limit} characters: is a quote not closed?"
                raise _unreadable(f"{name}, {place}", reason) from None
            refused = RefusedRow(f"not {kind.upper()}: {error}")
        except RefusedRow as error:
            refused = error
        else:
            if header:
                yield dict(zip(header, cells, strict=True))
            else:
                header = cells
                _check_names(header, name)
            continue
        if not header:
            raise _unreadable(f"{name}, {place}", str(refused))
        yield refused


# -- Parquet -----------------------------------------------------------------------------------------------------------


def parquet(source: IO[bytes] | Pipe, name: str, limit: int) -> Iterator[Cells]:
    """The rows of a Parquet file, in batches. `limit` is on the bytes of a row.

    Raises InputError where there is no pyarrow, and for another file.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError(
            f"{name} is Parquet, which needs pyarrow, and it is not installed", hint=errors.extra("parquet")
        ) from None
    if not source.seekable():
        raise _unreadable(name, "Parquet is not read from a pipe", "--input FILE reads a file")
    try:
        file = ParquetFile(source)
        _check_names(file.schema_arrow.names, name)
        for batch in file.iter_batches(AT_ONCE, use_threads=False):
            yield from _cells(batch, limit)
    except (ArrowException, OSError, ValueError) as error:
        raise _unreadable(name, f"not Parquet: {errors.one_line(error)}") from None


def _cells(batch: Any, limit: int) -> Iterator[Cells]:
    """The rows of a batch: all at once where they are small and sound, else those of each half.

    A row is refused if it is too large, or has a value that Python does not have, such as a date.
    """
    from pyarrow import ArrowException

    refused = f"{batch.nbytes} bytes are more than the limit of {limit}"
    if batch.nbytes <= limit:
        try:
            rows = batch.to_pylist()
            yield from [{key: plain(value) for key, value in row.items()} for row in rows]
            return
        except UnicodeDecodeError:
            refused = "a text is not UTF-8"
        except (ArithmeticError, ValueError, LookupError, ArrowException) as error:  # LookupError: of a time zone
            refused = errors.one_line(error)
    if half := batch.num_rows // 2:
        yield from _cells(batch.slice(0, half), limit)
        yield from _cells(batch.slice(half), limit)
    else:
        yield RefusedRow(refused)


def plain(value: Any) -> Any:
    """A value of Parquet as JSON has it."""
    kind = type(value)
    if kind in (str, int, bool) or value is None:
        return value
    if kind is float:
        return value if math.isfinite(value) else None
    if kind is bytes:
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    if kind is dict:
        return {str(key): plain(item) for key, item in value.items()}
    if kind in (list, tuple):
        return [plain(item) for item in value]
    return value.isoformat() if kind in (datetime.datetime, datetime.date, datetime.time) else str(value)
