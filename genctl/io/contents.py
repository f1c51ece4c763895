"""The unchecked content of each input row: a line of text or JSON, or the cells of a table.

Cells of CSV and TSV are strings. Parquet values become JSON values: dates and decimals become strings, bytes UTF-8 or
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
ENDLESS = 2**30  # bytes after which a line is treated as endless
CHUNK = 2**16  # bytes read at once
AT_ONCE = 256  # most rows of Parquet in memory


class Pipe(io.RawIOBase):
    """A binary stream that can be inspected without blocking. `read1` returns the available bytes, as for a pipe."""

    def __init__(self, source: IO[bytes]) -> None:
        # unbuffered: a thread blocked in a buffered stream holds its lock, and Python could not exit
        self._source: IO[bytes] = getattr(source, "raw", source)
        self._ahead: list[bytes] = []
        self._ended = False

    def drained(self) -> bool:
        """Whether the input is a regular file, or all of it has arrived."""
        try:
            descriptor = self._source.fileno()
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return True
            while not self._ended and sum(map(len, self._ahead)) < CHUNK:
                if not select.select([descriptor], [], [], 0)[0]:
                    break
                self._take()
        except (OSError, ValueError):  # no descriptor, or the system cannot poll it
            return False
        return self._ended

    def read1(self, size: int = -1) -> bytes:
        """The next bytes, in chunks of up to `CHUNK`; b"" at the end. `size` is ignored."""
        if not self._ahead and not self._ended:
            self._take()
        return self._ahead.pop(0) if self._ahead else b""

    def first_line(self, most: int) -> bytes:
        """Peek at the first line, or at `most` bytes of it."""
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

    A byte order mark, line ends, and empty lines at the end are dropped. Raises InputError for errors of the system,
    for a line without an end, and for an invalid table.
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
    """Split at each separator (None: nowhere). The rest after the last separator is a piece if it is not empty.

    Raises InputError for errors of the system, and for a piece without an end.
    """
    # read1 returns what a pipe holds now, so rows of a slow producer are not delayed
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
    """The rows of a table. Raises InputError if its columns give no prompt: one error instead of one for each row."""
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
    """Raises InputError if two columns have the same name, or no name."""
    twice, number = next(iter(Counter(columns).most_common(1)), ("", 1))
    if number > 1:
        raise _unreadable(name, f"two columns {f'are called {quote(twice)}' if twice else 'have no name'}")


def _lines(source: IO[bytes] | Pipe, name: str, limit: int) -> Iterator[str]:
    """The lines; bytes that are not UTF-8 become surrogates. Raises InputError for a line that is too long."""
    for number, (data, length) in enumerate(split(source, b"\n", limit, name), 1):
        if length > limit:
            raise _unreadable(name, f"line {number} has {length} bytes, more than the limit of {limit}")
        data = data.removeprefix(BOM) if number == 1 else data
        yield data.decode("utf-8", "surrogateescape") + "\n"


def separated(source: IO[bytes] | Pipe, kind: str, name: str, limit: int) -> Iterator[Cells]:
    """The rows of CSV or TSV; the first row names the columns.

    Blank lines are skipped. `limit` applies to the bytes of a line, and to the characters of a cell. Raises InputError
    for a header that names a column twice, and for a cell that does not end.
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
    """The rows of a Parquet file, in batches. `limit` is in bytes of a row.

    Raises InputError if pyarrow is not installed, and for a file in another format.
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
    """The rows of a batch, all at once if they are small and valid; else each half in turn.

    A row is refused if it is too large, or has a value that Python cannot represent, such as some dates.
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
        except (ArithmeticError, ValueError, LookupError, ArrowException) as error:  # LookupError: unknown time zone
            refused = errors.one_line(error)
    if half := batch.num_rows // 2:
        yield from _cells(batch.slice(0, half), limit)
        yield from _cells(batch.slice(half), limit)
    else:
        yield RefusedRow(refused)


def plain(value: Any) -> Any:
    """A Parquet value as a JSON value."""
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
