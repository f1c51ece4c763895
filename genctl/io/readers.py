"""Read prompts from arguments, files and pipes, one row at a time, in constant memory.

Each line (or row of a table) of the input yields exactly one `InputRow` or `BadRow`, so a row's
index is its number minus one. Empty lines at the end are ignored; others are BadRows ("empty prompt"),
because a prompt seems to be missing there. A byte order mark at the start is dropped. Input is UTF-8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, get_args

from genctl.config import reader
from genctl.config.check import setting_of
from genctl.config.reader import Unreadable
from genctl.errors import InputError, UsageError, cannot_read, printable, quote
from genctl.io import jsonl
from genctl.io.contents import TABLES, Pipe, contents
from genctl.io.jsonl import RowShape
from genctl.io.rows import SCHEMA, BadRow, InputRow, RefusedRow
from genctl.io.template import STDIN, Template, insert_stdin, note_unread

Format: TypeAlias = Literal["lines", "text", "jsonl", "csv", "tsv", "parquet"]
ROWS = ("jsonl", *TABLES)  # formats whose rows are named values
Rows: TypeAlias = Iterator[InputRow | BadRow]
ReportLine: TypeAlias = Callable[[str], object]

LIMIT = 16 * 2**20  # bytes in one line (or in a whole input that is one prompt); a longer one is a row that fails
MOST_HELD = 1_000_000  # rows of a command that needs all of them at once
MOST_COLUMNS = 10_000  # most column names that are checked for remarks
SCANNED = 2**20  # bytes of a file that are scanned at once


class Prompts(Iterator[InputRow | BadRow]):
    """The rows of an open input. Its file is closed at the end, or by `close`."""

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
        """Whether there is only one row; False if that cannot be known without waiting for input."""
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
        close, self._close = self._close, lambda: None
        close()

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
    shape: RowShape = jsonl.ROW,
    template: Template | None = None,
    report: ReportLine = lambda line: None,
) -> Prompts | None:
    """The prompts: arguments; else `input_path` ("-" is stdin); else piped stdin.

    With arguments stdin is read only for `{stdin}` in them or in the template; otherwise, if a pipe holds text, that is
    reported. None if there is no prompt at all (stdin is a terminal). The file is opened here and read later. Prompts
    are made with `template`. `report` receives remarks on the input while it is read.

    Raises InputError for a file that cannot be opened and UsageError for arguments together with
    `input_path` or `format`; while reading, InputError for errors of the system.
    """
    if arguments and input_path is not None:
        raise UsageError(
            f"prompts are given as arguments and with --input {printable(str(input_path))}",
            hint="give one of the two",
        )
    if arguments and format is not None:
        raise UsageError(f"--input-format {format} applies to --input and stdin, but prompts are given as arguments")
    named = (template is not None and STDIN in template.fields) or any(f"{{{STDIN}}}" in text for text in arguments)
    if named:
        if not arguments and str(input_path or "-") == "-":
            raise UsageError(
                "{stdin} in --template is all of standard input, but the prompts are read from there, too",
                hint="give the prompts as arguments or with --input FILE",
            )
        arguments, template = insert_stdin(arguments, template, stdin, is_terminal=stdin_is_terminal, limit=LIMIT)
    if arguments:
        # called after the last prompt: at the start of a run the pipe's writer may not have written yet
        note = partial(note_unread, None if named else stdin, report)
        return Prompts(from_arguments(arguments, template), note)
    if input_path is None and (stdin_is_terminal or stdin is None):
        return None
    if input_path is None or str(input_path) == "-":
        if stdin is None:
            raise InputError("cannot read standard input: it is closed")
        pipe = Pipe(getattr(stdin, "buffer", stdin))  # type: ignore[arg-type]
        rows = read(pipe, format=format, name="stdin", shape=shape, template=template, report=report)
        return Prompts(rows, at_hand=pipe.drained, whole=format == "text")
    name = str(input_path)
    file = _open(Path(name), printable(name))
    rows = read(file, format=format, name=name, shape=shape, template=template, report=report)
    return Prompts(rows, file.close, at_hand=Path(name).is_file)  # reading a named pipe could block


def _open(path: Path, name: str) -> IO[bytes]:
    """Open an input file that has an end (see `check_ends`). Raises InputError."""
    try:
        file = path.open("rb")
        try:
            reader.check_ends(file.fileno())
        except Unreadable:
            file.close()
            raise
    except IsADirectoryError:
        raise InputError(cannot_read(name, "a folder, not a file")) from None
    except (Unreadable, OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(cannot_read(name, error)) from None
    return file


def all_rows(rows: Rows) -> list[InputRow | BadRow]:
    """All rows of an input, for a command that needs them at once. Raises InputError for more than `MOST_HELD`."""
    held = list(islice(rows, MOST_HELD + 1))
    if len(held) > MOST_HELD:
        raise InputError(f"there are more than {MOST_HELD:,} prompts, the most that are compared at once")
    return held


def format_of(format: str | None, name: str) -> str:
    """The input format: the given one, else by the file's name."""
    ending = name.lower().rpartition(".")[2] if "." in name else ""
    return format or ("jsonl" if ending == "ndjson" else ending if ending in ROWS else "lines")


def from_arguments(arguments: Sequence[str], template: Template | None = None) -> Rows:
    """One row for each command-line argument."""
    for index, prompt in enumerate(arguments):
        place = f"argument {index + 1}"
        try:
            prompt.encode()
            yield InputRow(str(index), index, prompt=_prompt(prompt, template), where=place)
        except UnicodeEncodeError as error:  # a surrogate: Python's escape for a byte that is not UTF-8
            yield BadRow(str(index), index, place, "input", f"{place}: not UTF-8 at character {error.start + 1}")
        except RefusedRow as error:
            yield BadRow(str(index), index, place, "input", f"{place}: {error}")


def _prompt(text: str, template: Template | None) -> str:
    """The prompt for a text, by the template if there is one. Raises RefusedRow."""
    if not text:
        raise RefusedRow("empty prompt")
    return text if template is None else template.fill({"prompt": text})


def read(
    source: IO[bytes] | Pipe,
    *,
    format: Format | None = None,
    name: str,
    limit: int = LIMIT,
    shape: RowShape = jsonl.ROW,
    template: Template | None = None,
    report: ReportLine = lambda line: None,
) -> Rows:
    """The rows of an open binary stream. `name` is its name in messages; `limit` is in bytes of a row.

    `shape` defines the keys of a row of named values. `report` receives remarks on the input and its columns. Without
    `format`, the name decides; standard input is `jsonl` if its first line is an object with a known key.

    Raises only InputError, for errors of the system or an invalid table; any other bytes become rows.
    """
    kind = format_of(format, name)
    if kind not in get_args(Format):
        raise UsageError(f"unknown input format {quote(kind)}: expected one of {', '.join(get_args(Format))}")
    name = printable(name)
    if format is None and isinstance(source, Pipe) and _is_row(source.first_line(limit), shape, template):
        kind = "jsonl"
        report("note: standard input is read as JSON lines; --input-format lines makes each line a prompt")
    remarks, ids = Remarks(report), jsonl.UsedIds()
    index = -1
    unit = "line" if kind in ("jsonl", "lines") else "row"
    for index, content in enumerate(contents(source, kind, name, limit, shape, template)):
        place = f"{unit} {index + 1}"
        where = name if kind == "text" else f"{name}, {place}"
        own_id: str | None = None
        columns: dict[str, Any] = {}
        try:
            if isinstance(content, RefusedRow):
                raise content
            if isinstance(content, str):
                if index == 0 and format is None and kind == "lines" and _is_row(content.encode(), shape, template):
                    report(
                        "hint: the first line looks like a JSON row but is read as a prompt; "
                        "--input-format jsonl reads rows"
                    )
                row = InputRow(str(index), index, prompt=_prompt(content, template), where=where)
            else:
                if template is None and jsonl.is_request(content, shape.prompts):
                    remarks.model(content["body"].get("model"), where)
                    content = jsonl.request_row(content)
                own, columns = shape.split(content, template, cells=kind != "jsonl")
                if columns:
                    remarks.columns(columns, shape, where, () if template is None else template.fields)
                own_id = jsonl.row_id(own)
                ids.claim(own_id, index, unit)
                if kind != "jsonl":
                    shape.unfold(own)
                if template is not None:
                    own["prompt"] = shape.filled(template, content)
                values = shape.fields(own, columns)
                id = str(index) if own_id is None else own_id
                row = InputRow(id, index, columns=columns, where=where, own_id=own_id is not None, **values)
        except RefusedRow as error:
            message = str(error) if kind == "text" else f"{place}: {error}"
            id = str(index) if own_id is None else own_id
            yield BadRow(id, index, where, "input", message, own_id is not None, columns)
        else:
            yield row
    if index < 0:
        report(f"note: no prompts: {name} is empty")


def _is_row(line: bytes, shape: RowShape, template: Template | None) -> bool:
    """Whether a line is a JSON object with a prompt key, or with a field of the template."""
    try:
        row = jsonl.parse(line.decode("utf-8-sig"))
    except (UnicodeDecodeError, RefusedRow):
        return False
    fields = () if template is None else template.fields
    return not row.keys().isdisjoint((*shape.prompts, *fields)) or jsonl.is_request(row, shape.prompts)


class Remarks:
    """Remarks on the rows of an input, each made once."""

    def __init__(self, report: ReportLine) -> None:
        self._report = report
        self._columns: set[str] = set()  # names already checked
        self._has_model = False

    def columns(self, columns: Mapping[str, Any], shape: RowShape, where: str, used: Sequence[str]) -> None:
        """Report columns whose names look like misspelt keys or like settings; `used` are fields of a template.

        In genctl's own records, setting names such as `seed` are ordinary columns.
        """
        if not (new := columns.keys() - self._columns) or len(self._columns) > MOST_COLUMNS:
            return
        self._columns |= new
        settings = []
        for column in [column for column in columns if column in new][:MOST_COLUMNS]:
            if key := shape.suggested(column):
                self._report(f"warning: {where}: {quote(column)} is read as a column of your own; is {key} meant?")
            elif "params" in shape.known and columns.get("schema") != SCHEMA and column not in used:
                settings += [(column, f'"{knob}": …')] if (knob := setting_of(column)) else []
        if settings:
            names, knobs = (", ".join(some) for some in zip(*settings, strict=True))
            self._report(
                f"warning: {where}: read as columns of your own, not as settings: {names}; settings of a row are "
                f'written "params": {{{knobs}}}'
            )

    def model(self, name: Any, where: str) -> None:
        """Report the model of the first request that names one."""
        if name and not self._has_model:
            self._has_model = True
            self._report(f"note: {where}: the model {quote(str(name))} is not used: --model names that of all rows")


def count_rows(path: str | Path, kind: str) -> int | None:
    """The number of lines of a regular file, for a progress bar. None for other inputs, and on any failure."""
    if kind not in ("lines", "jsonl") or not Path(path).is_file():  # opening a pipe would block
        return None
    lines, last = 0, b"\n"
    try:
        with Path(path).open("rb") as file:
            while piece := file.read(SCANNED):
                lines, last = lines + piece.count(b"\n"), piece[-1:]
    except OSError:
        return None
    return lines + (last != b"\n")
