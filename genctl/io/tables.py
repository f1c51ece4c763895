"""Rows of tables: CSV and TSV with a header, and Parquet. Each is an object of named values, as a row of JSONL is.

A cell of text is a string, an empty one an empty string; where the key is one of genctl's own, an empty cell or a null
is a key that the row does not have, and what is a list or an object is JSON. Other values of Parquet become what JSON
has for them: dates and numbers of fixed point are strings, bytes are UTF-8 or base64.
"""

from __future__ import annotations

import base64
import csv
import datetime
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from genctl import errors
from genctl.errors import InputError, quote
from genctl.io import jsonl
from genctl.io.input_bytes import BOM, chunks, split
from genctl.io.jsonl import RowShape
from genctl.io.rows import RefusedRow

if TYPE_CHECKING:
    from genctl.io.input_bytes import Pipe
    from genctl.io.template import Template

Cells: TypeAlias = "dict[str, Any] | RefusedRow"
_DIALECTS = {"csv": "excel", "tsv": "excel-tab"}  # by format
_REASONS = {"unexpected end of data": "a quote is not closed", "new-line": "a carriage return outside quotes"}
AT_ONCE = 256  # rows of Parquet in memory, at most


def checked(table: Iterator[Cells], name: str, shape: RowShape, template: Template | None) -> Iterator[Cells]:
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


# -- CSV and TSV -------------------------------------------------------------------------------------------------------


def _lines(source: IO[bytes] | Pipe, name: str, limit: int) -> Iterator[str]:
    """The lines, whose bytes that are not UTF-8 are surrogates. Raises InputError for one that is too long."""
    for piece in split(chunks(source, name), b"\n", limit, name):
        if piece.length > limit:
            raise InputError(
                f"cannot read {name}: line {piece.number} has {piece.length} bytes, more than the limit of {limit}"
            )
        data = piece.data.removeprefix(BOM) if piece.number == 1 else piece.data
        yield data.decode("utf-8", "surrogateescape") + "\n"


def separated(source: IO[bytes] | Pipe, kind: str, name: str, limit: int) -> Iterator[Cells]:
    """The rows of CSV or TSV, whose first row names the columns.

    Blank lines are skipped. `limit` is on the bytes of a line, and on the characters of a cell. Raises InputError for a
    header that names a column twice, and for a cell that does not end.
    """
    csv.field_size_limit(limit)
    reader = csv.reader(_lines(source, name, limit), _DIALECTS[kind], strict=True)
    header: list[str] = []
    while True:
        begin = reader.line_num + 1
        place = f"line {begin}" if header else "the header"
        try:
            cells = next(reader, None)
            if cells is None:
                return
            if not cells:
                continue
            for number, cell in enumerate(cells, 1):
                if not cell.isascii():
                    _check_text(cell, number)
            if header and len(cells) != len(header):
                raise RefusedRow(f"{errors.count(len(cells), 'cell')}, but the header has {len(header)}")
        except csv.Error as error:
            reason = str(error)
            if reason.startswith("field larger"):
                words = f"a cell has more than {limit} characters: is a quote not closed?"
                raise _unreadable(f"{name}, {place}", words) from None
            reason = next((words for start, words in _REASONS.items() if reason.startswith(start)), reason)
            refused = RefusedRow(f"not {kind.upper()}: {reason}")
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


def _check_text(cell: str, number: int) -> None:
    """Raises RefusedRow for a cell, which is that of this number in its row, with a byte that is not UTF-8."""
    try:
        cell.encode()
    except UnicodeEncodeError as error:
        byte = ord(cell[error.start]) - 0xDC00
        raise RefusedRow(f"not UTF-8: byte 0x{byte:02x} in cell {number}") from None


# -- Parquet -----------------------------------------------------------------------------------------------------------


def parquet(source: IO[bytes] | Pipe, name: str, limit: int) -> Iterator[Cells]:
    """The rows of a Parquet file, in batches. `limit` is on the bytes of a row.

    Raises InputError where there is no pyarrow, or for another file.
    """
    with _opened(source, name) as file:
        _check_names(file.schema_arrow.names, name)
        for batch in _batches(file, source, limit):
            yield from _cells(batch, limit)


@contextmanager
def _opened(source: IO[bytes] | Pipe, name: str) -> Iterator[Any]:
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
        yield ParquetFile(source)
    except (ArrowException, OSError, ValueError) as error:
        raise _unreadable(name, f"not Parquet: {errors.one_line(error)}") from None
    except RefusedRow as error:
        raise _unreadable(name, str(error)) from None


def _batches(file: Any, source: IO[bytes] | Pipe, limit: int) -> Iterator[Any]:
    """The rows in record batches that take a few times `limit` bytes at most, however little the file takes.

    A file has a text once that many rows share (a dictionary), and so has a batch. Raises RefusedRow for rows that are
    too large by the file's own account.
    """
    from pyarrow.parquet import ParquetFile

    text_types = {("BYTE_ARRAY", kind) for kind in ("STRING", "NONE", "JSON", "ENUM", "BSON")}
    leaves = [file.schema.column(place) for place in range(len(file.schema))]
    texts = [leaf.path for leaf in leaves if (leaf.physical_type, leaf.logical_type.type) in text_types]
    reader = ParquetFile(source, read_dictionary=texts)
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        chunks = [group.column(place) for place in range(group.num_columns)]
        rows = max(group.num_rows, 1)
        stated = sum(
            max(chunk.total_uncompressed_size, chunk.num_values * max(leaf.length, 8))
            for chunk, leaf in zip(chunks, leaves, strict=True)
        )
        if stated > limit * max(rows, AT_ONCE):
            raise RefusedRow(f"{errors.count(rows, 'row')} of {stated} bytes, more than the limit of {limit} for each")
        at_once = 4 * limit // max(1, stated // rows)
        yield from reader.iter_batches(max(1, min(AT_ONCE, at_once)), [number], use_threads=False)


def _size(array: Any) -> int:
    """The bytes of an Arrow array with each of its values written out."""
    from pyarrow import ExtensionArray, compute, types

    if isinstance(array, ExtensionArray):
        return _size(array.storage)
    if types.is_dictionary(array.type):  # texts
        return len(array) + (compute.sum(compute.binary_length(array.dictionary).take(array.indices)).as_py() or 0)
    if types.is_struct(array.type):
        return sum(map(_size, array.flatten()))
    if types.is_nested(array.type):  # lists and maps
        return len(array) + _size(array.flatten())
    return len(array) + int(array.nbytes)


def _cells(batch: Any, limit: int) -> Iterator[Cells]:
    """The rows of a batch: all at once where they are small and sound, else each alone.

    A row is refused if it is too large, or has a value that Python does not have, such as a date.
    """
    from pyarrow import ArrowException

    unconverted = (ArithmeticError, ValueError, LookupError, ArrowException)  # LookupError: of an unknown time zone
    if sum(map(_size, batch.columns)) <= limit:
        with suppress(*unconverted):
            rows = batch.to_pylist()
            yield from [{key: plain(value) for key, value in row.items()} for row in rows]
            return
    for place in range(batch.num_rows):
        row: dict[str, Any] = {}
        columns = batch.slice(place, 1).columns
        if (size := sum(map(_size, columns))) > limit:
            yield RefusedRow(f"{size} bytes are more than the limit of {limit}")
            continue
        column = ""
        try:
            for column, cell in zip(batch.schema.names, columns, strict=True):
                row[column] = plain(cell[0].as_py())
        except unconverted as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else errors.one_line(error)
            yield RefusedRow(f"column {quote(column)}: {reason}")
        else:
            yield row


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
