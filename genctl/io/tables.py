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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """The rows of a table. Raises InputError for one that lacks the columns of a prompt."""
    known = False
    for row in table:
        if not known and isinstance(row, dict):
            _check(row, name, shape, template)
            known = True
        yield row


def _check(row: Mapping[str, Any], name: str, shape: RowShape, template: Template | None) -> None:
    """Raises InputError where no row can have a prompt, with one sentence in place of one for each row."""
    try:
        if template is not None:
            template.fill(dict.fromkeys(row, ""))
        elif row.keys().isdisjoint({*shape.prompts, "text"}):
            expected = tuple(dict.fromkeys((*shape.prompts, "text")))
            raise RefusedRow(jsonl.no_prompt("no column with a prompt", expected, row))
    except RefusedRow as error:
        column = next(iter(row), "name")
        hint = "" if template is not None else f"--template '{{{column}}}' makes a prompt of columns"
        raise InputError(f"the prompts could not be read: {name}: {error}", hint=hint) from None


# -- CSV and TSV -------------------------------------------------------------------------------------------------------


def _lines(source: IO[bytes] | Pipe, name: str, limit: int) -> Iterator[str]:
    """The lines, whose bytes that are not UTF-8 are surrogates. Raises InputError for one that is too long."""
    for piece in split(chunks(source, name), b"\n", limit, name):
        if piece.length > limit:
            raise InputError(
                f"the prompts could not be read: line {piece.number} of {name} has {piece.length} bytes, "
                f"more than the limit of {limit}"
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
        try:
            cells = next(reader)
            if not cells:
                continue
            if any(not cell.isascii() for cell in cells):
                _check_text(cells)
            if header and len(cells) != len(header):
                raise RefusedRow(f"{errors.count(len(cells), 'cell')}, but the header has {len(header)}")
        except StopIteration:
            return
        except (RefusedRow, csv.Error) as error:
            reason = str(error)
            if endless := reason.startswith("field larger"):
                reason = f"a cell has more than {limit} characters: is a quote not closed?"
            elif isinstance(error, csv.Error):
                plain_reason = next((words for start, words in _REASONS.items() if reason.startswith(start)), reason)
                reason = f"not {kind.upper()}: {plain_reason}"
            if endless or not header:
                place = f"line {begin}" if header else "the header"
                raise InputError(f"the prompts could not be read: {name}, {place}: {reason}") from None
            yield RefusedRow(reason)
            continue
        if header:
            yield dict(zip(header, cells, strict=True))
            continue
        header = cells
        _check_names(header, name)


def _check_names(columns: Sequence[str], name: str) -> None:
    """Raises InputError where two columns have one name, or two have none."""
    if len(set(columns)) < len(columns):
        twice = next(column for column, number in Counter(columns).items() if number > 1)
        which = f"are called {quote(twice)}" if twice else "have no name"
        raise InputError(f"the prompts could not be read: {name}: two columns {which}")


def _check_text(cells: list[str]) -> None:
    for number, cell in enumerate(cells, 1):
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


def parquet_rows(source: IO[bytes] | Pipe, name: str) -> int:
    """The number of rows of a Parquet file. Raises as `parquet`."""
    with _opened(source, name) as file:
        return int(file.metadata.num_rows)


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
        raise InputError(
            f"the prompts could not be read: {name}: Parquet is not read from a pipe", hint="--input FILE reads a file"
        )
    try:
        yield ParquetFile(source)
    except (ArrowException, OSError, ValueError) as error:
        raise InputError(f"the prompts could not be read: {name}: not Parquet: {errors.one_line(error)}") from None
    except RefusedRow as error:
        raise InputError(f"the prompts could not be read: {name}: {error}") from None


def _batches(file: Any, source: IO[bytes] | Pipe, limit: int) -> Iterator[Any]:
    """The rows in record batches that take a few times `limit` bytes at most, however little the file takes.

    A file has a text once that many rows share (a dictionary). Texts are written out for each row only where that is
    small: the longest of them, read beforehand, decides. Raises RefusedRow for rows that are too large by the file's
    own account.
    """
    from pyarrow.parquet import ParquetFile

    leaves = [file.schema.column(place) for place in range(len(file.schema))]
    texts = [leaf.path for leaf in leaves if (leaf.physical_type, leaf.logical_type.type) in _TEXTS]
    shared = ParquetFile(source, read_dictionary=texts)
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        chunks = [group.column(place) for place in range(group.num_columns)]
        rows, most = max(group.num_rows, 1), 4 * limit
        stated = sum(
            max(chunk.total_uncompressed_size, chunk.num_values * max(leaf.length, 8))
            for chunk, leaf in zip(chunks, leaves, strict=True)
        )
        if stated > limit * max(rows, AT_ONCE):
            raise RefusedRow(f"{errors.count(rows, 'row')} of {stated} bytes, more than the limit of {limit} for each")
        listed = [chunk for chunk in chunks if chunk.has_dictionary_page and chunk.path_in_schema in texts]
        longest = 0
        if sum(chunk.total_uncompressed_size for chunk in listed) * AT_ONCE > most:
            paths = [chunk.path_in_schema for chunk in listed]
            first = next(shared.iter_batches(1, [number], paths, use_threads=False), None)
            longest = max(map(_longest, first.columns)) if first is not None else 0
        widest = longest * sum(-(-chunk.num_values // rows) for chunk in listed)  # bytes of texts in a row
        reader = shared if widest > most else file
        at_once = most // max(1, stated // rows, 0 if reader is shared else widest)
        yield from reader.iter_batches(max(1, min(AT_ONCE, at_once)), [number], use_threads=False)


_TEXTS = {("BYTE_ARRAY", kind) for kind in ("STRING", "NONE", "JSON", "ENUM", "BSON")}


def _longest(array: Any) -> int:
    """The bytes of the longest text in the dictionaries of an Arrow array."""
    from pyarrow import compute, types

    if types.is_dictionary(array.type):
        return compute.max(compute.binary_length(array.dictionary)).as_py() or 0
    if types.is_struct(array.type):
        return max(map(_longest, array.flatten()), default=0)
    return _longest(array.flatten()) if types.is_nested(array.type) else 0


def _cells(batch: Any, limit: int) -> Iterator[Cells]:
    """The rows of a batch: all at once where they are small and sound, else each alone."""
    if sum(map(_size, batch.columns)) <= limit:
        with suppress(*_unconverted()):
            rows = batch.to_pylist()
            yield from [{key: plain(value) for key, value in row.items()} for row in rows]
            return
    for place in range(batch.num_rows):
        row: dict[str, Any] = {}
        columns = batch.slice(place, 1).columns
        try:
            if (size := sum(map(_size, columns))) > limit:
                raise RefusedRow(f"{size} bytes are more than the limit of {limit}")
            for column, cell in zip(batch.schema.names, columns, strict=True):
                row[column] = _value(column, cell)
            yield row
        except RefusedRow as error:
            yield error


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


def _value(column: str, cell: Any) -> Any:
    """The value of a column of one row. Raises RefusedRow for one that Python does not have, such as a date."""
    try:
        return plain(cell[0].as_py())
    except UnicodeDecodeError:
        raise RefusedRow(f"column {quote(column)}: not UTF-8") from None
    except _unconverted() as error:
        raise RefusedRow(f"column {quote(column)}: {errors.one_line(error)}") from None


def _unconverted() -> tuple[type[Exception], ...]:
    """What Arrow raises for a value that Python does not have; LookupError is that of an unknown time zone."""
    from pyarrow import ArrowException

    return ArithmeticError, ValueError, LookupError, ArrowException


def plain(value: Any) -> Any:
    """A value of Parquet as JSON has it."""
    known = _PLAIN.get(type(value))
    return str(value) if known is None else known(value)


def _text_of(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


_PLAIN: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys((str, int, bool, type(None)), lambda value: value),
    float: lambda value: value if math.isfinite(value) else None,
    bytes: _text_of,
    dict: lambda value: {str(key): plain(item) for key, item in value.items()},
    **dict.fromkeys((list, tuple), lambda value: [plain(item) for item in value]),
    **dict.fromkeys((datetime.datetime, datetime.date, datetime.time), lambda value: value.isoformat()),
}
