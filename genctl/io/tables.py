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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
_REASONS = {"unexpected end of data": "a quote is not closed"}
AT_ONCE = 256  # rows of Parquet in memory


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
                reason = f"not {kind.upper()}: {_REASONS.get(reason, reason)}"
            if endless or not header:
                place = f"line {begin}" if header else "the header"
                raise InputError(f"the prompts could not be read: {name}, {place}: {reason}") from None
            yield RefusedRow(reason)
            continue
        if header:
            yield dict(zip(header, cells, strict=True))
            continue
        header = cells
        if twice := next((column for column in header if header.count(column) > 1), None):
            raise InputError(f"the prompts could not be read: {name}: two columns are called {quote(twice)}")


def _check_text(cells: list[str]) -> None:
    for number, cell in enumerate(cells, 1):
        try:
            cell.encode()
        except UnicodeEncodeError as error:
            byte = ord(cell[error.start]) - 0xDC00
            raise RefusedRow(f"not UTF-8: byte 0x{byte:02x} in cell {number}") from None


# -- Parquet -----------------------------------------------------------------------------------------------------------


def parquet(source: IO[bytes] | Pipe, name: str) -> Iterator[Cells]:
    """The rows of a Parquet file, in batches. Raises InputError where there is no pyarrow, or for another file."""
    with _opened(source, name) as file:
        for batch in file.iter_batches(batch_size=AT_ONCE, use_threads=False):
            for row in batch.to_pylist():
                yield {key: plain(value) for key, value in row.items()}


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
