"""Read prompts from arguments, files and pipes, one row at a time, in constant memory.

Each line (or row of a table) of the input yields exactly one `InputRow` or `BadRow`, so a row's
index is its number less one. Empty lines at the end are not rows; empty lines before that are BadRows ("empty prompt"),
because a prompt seems to be missing there. A byte order mark at the start is dropped. Input is UTF-8.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from genctl.documents import reader
from genctl.documents.reader import Unreadable
from genctl.errors import InputError, UsageError, printable, quote, reason_of
from genctl.io import input_bytes
from genctl.io.input_bytes import pieces, text_of
from genctl.io.rows import BadRow, InputRow, RefusedRow

if TYPE_CHECKING:
    from genctl.io.input_bytes import Pipe
    from genctl.io.jsonl import RowShape
    from genctl.io.remarks import Remarks
    from genctl.io.template import Template

Format: TypeAlias = Literal["lines", "text", "jsonl", "csv", "tsv", "parquet"]
ROWS = ("jsonl", "csv", "tsv", "parquet")  # formats whose rows are named values
Rows: TypeAlias = Iterator[InputRow | BadRow]
Say: TypeAlias = Callable[[str], object]

LIMIT = 16 * 2**20  # bytes in one line (or in a whole input that is one prompt); a longer one is a row that fails
MOST_HELD = 1_000_000  # rows of a command that needs all of them at once
SCANNED = 2**20  # bytes of a file that are counted at once


class Prompts(Iterator[InputRow | BadRow]):
    """The rows of an open input. Closes the file that it opened at the end, or by `close`."""

    def __init__(
        self,
        rows: Rows,
        close: Callable[[], object] = lambda: None,
        at_hand: Callable[[], bool] = lambda: True,
        *,
        whole: bool = False,
    ) -> None:
        self._rows = rows
        self._close = close
        self._at_hand = at_hand  # whether rows can be read without waiting
        self._whole = whole  # the input is one prompt

    def is_alone(self) -> bool:
        """Whether there is only one row, as far as that can be known without waiting for input."""
        if not self._at_hand():
            return self._whole
        ahead = list(islice(self, 2))
        self._rows = chain(ahead, self._rows)
        return len(ahead) < 2

    def __next__(self) -> InputRow | BadRow:
        try:
            return next(self._rows)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. May be called at any time and repeatedly."""
        self._close()

    def __enter__(self) -> Prompts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_prompts(
    arguments: Sequence[str],
    input_path: str | Path | None,
    stdin: IO[bytes] | IO[str] | None,
    *,
    stdin_is_terminal: bool,
    format: Format | None = None,
    shape: RowShape | None = None,
    template: Template | None = None,
    say: Say = lambda line: None,
) -> Prompts | None:
    """The prompts: arguments; else `input_path` ("-" is stdin); else piped stdin.

    With arguments stdin is read only for `{stdin}` in them or in the template; otherwise a remark says if a pipe holds
    text. None if there is no prompt at all (stdin is a terminal). The file is opened here and read later. `template`
    makes each prompt. `say` receives remarks on the input while it is read.

    Raises InputError for a file that cannot be opened and UsageError for arguments together with
    `input_path` or `format`; while reading, InputError for errors of the system.
    """
    named = input_bytes.named(arguments, template)
    if named and not (arguments and input_path is not None):
        arguments, template = input_bytes.insert(
            arguments, template, input_path, stdin, stdin_is_terminal=stdin_is_terminal, limit=LIMIT
        )
    if arguments:
        if input_path is not None:
            raise UsageError(
                f"prompts are given as arguments and with --input {printable(str(input_path))}",
                hint="give one of the two",
            )
        if format is not None:
            raise UsageError(
                f"--input-format {format} says how --input or stdin is read, but prompts are given as arguments"
            )
        return Prompts(from_arguments(arguments, template), input_bytes.Unread(None if named else stdin, say).check)
    if input_path is None and stdin_is_terminal:
        return None
    if input_path is None or str(input_path) == "-":
        if stdin is None:
            if input_path is None:
                return None
            raise InputError("the prompts could not be read: standard input is closed")
        binary: IO[bytes] = getattr(stdin, "buffer", stdin)  # type: ignore[arg-type]
        from genctl.io.input_bytes import Pipe

        pipe = Pipe(binary)
        rows = read(pipe, format=format, name="stdin", shape=shape, template=template, say=say)
        return Prompts(rows, at_hand=pipe.drained, whole=format == "text")
    name = str(input_path)
    try:
        file = Path(name).open("rb")  # noqa: SIM115 (closed by Prompts)
        reader.check_ends(file.fileno())
    except Unreadable as error:
        file.close()
        raise InputError(f"the prompts could not be read: {error}: {printable(name)}") from None
    except FileNotFoundError:
        raise InputError(f"the prompts could not be read: no such file: {printable(name)}") from None
    except IsADirectoryError:
        raise InputError(f"the prompts could not be read: {printable(name)} is a folder") from None
    except OSError as error:
        raise InputError(f"the prompts could not be read: {reason_of(error)}: {printable(name)}") from None
    except ValueError:  # a NUL in the name
        raise InputError(f"the prompts could not be read: not a file name: {printable(name)}") from None
    rows = read(file, format=format, name=name, shape=shape, template=template, say=say)
    return Prompts(rows, file.close, at_hand=Path(name).is_file)  # a named pipe would have to be waited for


def all_rows(rows: Rows) -> list[InputRow | BadRow]:
    """All rows of an input, for a command that needs them at once. Raises InputError for more than fit in memory."""
    held = list(islice(rows, MOST_HELD + 1))
    if len(held) > MOST_HELD:
        raise InputError(f"there are more than {MOST_HELD:,} prompts, the most that are compared at once")
    return held


def format_of(format: str | None, name: str) -> str:
    """The input format: the given one, else by the file's name."""
    endings = {".ndjson": "jsonl", **{f".{kind}": kind for kind in ROWS}}
    return format or next((kind for ending, kind in endings.items() if name.lower().endswith(ending)), "lines")


def from_arguments(arguments: Sequence[str], template: Template | None = None) -> Rows:
    """One row for each command-line argument."""
    for index, prompt in enumerate(arguments):
        place = f"argument {index + 1}"
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # Python's placeholder for a byte that is not UTF-8
            yield BadRow(str(index), index, place, "input", f"{place}: not UTF-8 at character {error.start + 1}")
            continue
        try:
            yield InputRow(str(index), index, prompt=_prompt(prompt, template), where=place)
        except RefusedRow as error:
            yield BadRow(str(index), index, place, "input", f"{place}: {error}")


def _prompt(text: str, template: Template | None) -> str:
    """The prompt of a text, with the template. Raises RefusedRow."""
    if not text:
        raise RefusedRow("empty prompt")
    return text if template is None else template.fill({"prompt": text})


def read(
    source: IO[bytes] | Pipe,
    *,
    format: Format | None = None,
    name: str,
    limit: int = LIMIT,
    shape: RowShape | None = None,
    template: Template | None = None,
    say: Say = lambda line: None,
) -> Rows:
    """The rows of an open binary stream. `name` is what messages call it; `limit` is in bytes.

    `shape` says what a row of named values may hold (None: `jsonl.ROW`). `say` is told of an input without rows, of
    lines that look like rows of JSONL where nobody said what they are, and of columns that look like misspelt keys.

    - `lines`: one prompt per line, `\\n` or `\\r\\n`; only these end a line.
    - `text`: the whole input is one prompt, its last newline included.
    - `jsonl`: one object per line (see `genctl.io.jsonl`). A row without id goes by its index. To find an id that
      is used twice, a hash is kept of each id that is said (`jsonl.UsedIds`): the only thing that grows.
    - `csv`, `tsv`, `parquet`: rows of a table (see `genctl.io.tables`), otherwise as those of JSONL.
    - None: `jsonl` if the name ends in .jsonl or .ndjson, a table if it ends in its name, else `lines`.

    Raises nothing but InputError when the system cannot read on, or for what is no table; all other bytes become rows.
    """
    kind = format_of(format, name)
    if kind not in get_args(Format):
        raise UsageError(f"unknown input format {quote(kind)}: expected one of {', '.join(get_args(Format))}")
    from genctl.io import jsonl
    from genctl.io.remarks import Remarks

    remarks = Remarks(say, printable(name), watch=format is None and kind == "lines")
    return _read(source, kind, printable(name), limit, shape or jsonl.ROW, template, remarks)


def _read(
    source: IO[bytes] | Pipe,
    kind: str,
    name: str,
    limit: int,
    shape: RowShape,
    template: Template | None,
    remarks: Remarks,
) -> Rows:
    from genctl.io import jsonl, openai_rows

    ids = jsonl.UsedIds()
    index = -1
    unit = "line" if kind in ("jsonl", "lines") else "row"
    for index, content in _contents(source, kind, name, limit, shape, template):
        place = f"{unit} {index + 1}"
        where = name if kind == "text" else f"{name}, {place}"
        own_id: str | None = None
        columns: dict[str, Any] = {}
        mistakes: list[str] = []
        try:
            if isinstance(content, RefusedRow):
                raise content
            if isinstance(content, dict) and template is None and openai_rows.is_request(content, shape.prompts):
                content, model, mistakes = openai_rows.row_of(content)
                remarks.model(model, where)
            if isinstance(content, str):
                remarks.line(content)
                row = InputRow(str(index), index, prompt=_prompt(content, template), where=where)
            else:
                own, columns = shape.split(content, template, cells=kind != "jsonl")
                if columns:
                    remarks.columns(columns, shape, where, () if template is None else template.fields)
                own_id = jsonl.row_id(own)
                ids.claim(own_id, index, unit)
                if mistakes:
                    raise RefusedRow("; ".join(mistakes))
                id = str(index) if own_id is None else own_id
                if kind != "jsonl":
                    shape.unfold(own)
                if template is not None:
                    own["prompt"] = shape.filled(template, content)
                values = shape.fields(own, columns)
                row = InputRow(id, index, columns=columns, where=where, own_id=own_id is not None, **values)
        except RefusedRow as error:
            ids.not_by_index(index)
            message = str(error) if kind == "text" else f"{place}: {error}"
            id = str(index) if own_id is None else own_id
            yield BadRow(id, index, where, "input", message, own_id is not None, columns)
        else:
            yield row
    remarks.end(index + 1)


def _contents(
    source: IO[bytes] | Pipe, kind: str, name: str, limit: int, shape: RowShape, template: Template | None
) -> Iterator[tuple[int, str | dict[str, Any] | RefusedRow]]:
    """What each row has, or why it cannot be read; with its index."""
    if kind in ("csv", "tsv", "parquet"):
        from genctl.io import tables

        table = (
            tables.parquet(source, name, limit) if kind == "parquet" else tables.separated(source, kind, name, limit)
        )
        yield from enumerate(tables.checked(table, name, shape, template))
        return
    from genctl.io.jsonl import parse

    content: str | dict[str, Any] | RefusedRow
    for piece in pieces(source, kind, name, limit):
        try:
            content = text_of(piece, limit)
            if kind == "jsonl":
                if not content:
                    raise RefusedRow("empty prompt")
                content = parse(content)
        except RefusedRow as error:
            content = error
        yield piece.number - 1, content


# -- an input file before it is read: its number of rows, and whether it has changed -----------------------------------


@dataclass(frozen=True)
class InputScan:
    """A regular file: its rows as `read` will number them, its bytes, and their digest in hex."""

    rows: int | None  # None: not known
    bytes: int
    digest: str

    def identity(self) -> dict[str, Any]:
        """The fields that must be equal for the same input."""
        return {"bytes": self.bytes, "digest": self.digest}


def scan(path: str | Path, kind: str) -> InputScan | None:
    """Read a regular file once, in pieces. None for anything else (a pipe can be read only once) and on any failure,
    which the reader will report.

    `kind` is an input format.
    """
    blank = {"lines": b"\r\n", "jsonl": b" \t\r\n"}.get(kind, b"")  # what a line without a prompt has
    digest = hashlib.blake2b(digest_size=16)
    rows: int | None = 0
    size = seen = 0
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # before it is opened: opening a pipe would block
            return None
        with Path(path).open("rb") as file:
            while piece := file.read(SCANNED):
                digest.update(piece)
                size += len(piece)
                if not blank:
                    continue
                # empty rows at the end do not count: only rows up to the last byte that belongs to none of them
                if rest := piece.rstrip(blank):
                    rows = seen + rest.count(b"\n") + 1
                seen += piece.count(b"\n")
        if kind in ROWS and not blank:
            rows = _table_rows(path, kind)
    except (OSError, ValueError):
        return None
    return InputScan(rows if blank or kind in ROWS else 1, size, digest.hexdigest())


def _table_rows(path: str | Path, kind: str) -> int | None:
    from genctl.io import tables

    try:
        with Path(path).open("rb") as file:
            if kind == "parquet":
                return tables.parquet_rows(file, str(path))
            return sum(1 for _ in tables.separated(file, kind, str(path), LIMIT))
    except InputError:  # the reader will report it
        return None
