"""Writers of results: text, JSON, JSONL, TSV. UTF-8 in every locale; each result is one write of whole lines.

Misleading characters are escaped in JSON, JSONL and TSV: controls, bidi controls, line separators and lone surrogates.
`text` is written unchanged; only a lone surrogate, which UTF-8 cannot encode, becomes `\\udXXX`.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, Protocol, TypeAlias

from genctl.errors import UsageError, quote
from genctl.io.output import Sink as Sink
from genctl.io.output import open_output as open_output

# The keys of `FORMATS` as a type: the values of --format.
Format: TypeAlias = Literal["text", "json", "jsonl", "tsv"]
Record: TypeAlias = Mapping[str, Any]

COLUMNS = ("id", "sequence", "finish_reason", "logprob", "score", "new_tokens", "text", "prompt", "error")

SCORE_COLUMNS = ("id", "rank", "ppl", "nll", "tokens", "bits", "bpb", "text", "context", "target", "error")

_UNSEEN = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_JSON_UNSEEN = re.compile(f"[{_UNSEEN}]")
TSV_UNSEEN = re.compile(f"[\\x00-\\x1f\\\\{_UNSEEN}]")
_TSV_NAMES = {"\t": "\\t", "\n": "\\n", "\r": "\\r", "\\": "\\\\"}


class Binary(Protocol):
    """The part of a sink that a writer needs."""

    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...


class Writer(Protocol):
    """One output format on one sink. `close` ends the format and closes the sink; both raise what the sink raises."""

    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class WriterSetup:
    """A writer's options, besides its sink."""

    on_error: Callable[[Record], None]  # receives the error records if the format has no place for them (`text`)
    begun: bool = False  # earlier records exist, so no header is written
    shown: Callable[[str], str] = str  # makes a text safe for terminals: escapes controls


@dataclass(frozen=True)
class OutputFormat:
    """One value of --format."""

    open: Callable[[Binary, WriterSetup], Writer]
    suffixes: tuple[str, ...] = ()  # of file names that select it without --format
    records: bool = True  # whether it holds records, not only texts
    nested: bool = False  # whether values may be lists and objects


class Unclosed:
    """A sink or a writer with a `close` that does nothing, because its owner closes it."""

    def __init__(self, write: Callable[[Any], object] = lambda piece: None) -> None:
        self._write = write

    def write(self, piece: Any) -> None:
        self._write(piece)

    def close(self) -> None:
        pass


class TextWriter:
    """The text of each sequence, unchanged, and one newline. Errors go to `on_error`."""

    def __init__(self, sink: Binary, on_error: Callable[[Record], None], shown: Callable[[str], str] = str) -> None:
        self._sink = sink
        self._on_error = on_error
        self._shown = shown

    def write(self, record: Record) -> None:
        if "error" in record:
            self._on_error(record)
        else:
            self._sink.write(f"{self._shown(record['text'])}\n".encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        self._sink.close()


class JsonlWriter:
    """One object per line."""

    def __init__(self, sink: Binary) -> None:
        self._sink = sink

    def write(self, record: Record) -> None:
        self._sink.write(f"{to_json(record)}\n".encode())

    def close(self) -> None:
        self._sink.close()


class JsonWriter:
    """One array of all records, streamed; complete JSON once closed, also without records."""

    def __init__(self, sink: Binary) -> None:
        self._sink = sink
        self._before = "[\n"
        self._closed = False

    def write(self, record: Record) -> None:
        # update the state first: if a signal interrupts the write, the sink completes it
        piece, self._before = f"{self._before}{to_json(record)}".encode(), ",\n"
        self._sink.write(piece)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._sink.write(b"[]\n" if self._before == "[\n" else b"\n]\n")
        self._sink.close()


class TsvWriter:
    """A header, then one line per record, always with the same columns; missing values are empty."""

    def __init__(self, sink: Binary, columns: Sequence[str], *, header: bool = True) -> None:
        self._sink = sink
        self._columns = columns
        self._header = "\t".join(columns) + "\n" if header else ""

    def write(self, record: Record) -> None:
        fields = {**record.get("metrics", {}), **record}
        fields["new_tokens"] = record.get("usage", {}).get("new_tokens")
        if error := record.get("error"):
            fields["error"] = f"{error['code']}: {error['message']}"
        line = "\t".join(tsv_cell(fields.get(column)) for column in self._columns)
        piece, self._header = f"{self._header}{line}\n".encode(), ""
        self._sink.write(piece)

    def close(self) -> None:
        if self._header:
            piece, self._header = self._header.encode(), ""
            self._sink.write(piece)
        self._sink.close()


class ScoreTextWriter(TextWriter):
    """For `genctl score`: a line of `ppl`, `nll`, `tokens` and the escaped text, separated by tabs, for each text."""

    def write(self, record: Record) -> None:
        if "error" in record:
            super().write(record)
            return
        numbers = ("inf" if record[name] is None else f"{record[name]:.4f}" for name in ("ppl", "nll"))
        cells = [*numbers, str(record["tokens"]), tsv_cell(record.get("target", record["text"]))]
        self._sink.write(("\t".join(cells) + "\n").encode())


FORMATS: dict[str, OutputFormat] = {
    "text": OutputFormat(lambda sink, setup: TextWriter(sink, setup.on_error, setup.shown), records=False),
    "json": OutputFormat(lambda sink, setup: JsonWriter(sink), (".json",), nested=True),
    "jsonl": OutputFormat(lambda sink, setup: JsonlWriter(sink), (".jsonl", ".ndjson"), nested=True),
    "tsv": OutputFormat(lambda sink, setup: TsvWriter(sink, COLUMNS, header=not setup.begun), (".tsv",)),
}
SCORE_FORMATS = {
    "text": OutputFormat(lambda sink, setup: ScoreTextWriter(sink, setup.on_error), records=False),
    "json": FORMATS["json"],
    "jsonl": FORMATS["jsonl"],
    "tsv": OutputFormat(lambda sink, setup: TsvWriter(sink, SCORE_COLUMNS), (".tsv",)),
}
TEXTS = frozenset(name for name, format in FORMATS.items() if not format.records)
FLAT = tuple(name for name, format in FORMATS.items() if not format.nested)
_BY_SUFFIX = {suffix: name for name, format in FORMATS.items() for suffix in format.suffixes}
# Formats that no command writes: plain text under such a name would mislead the program that opens it.
_FOREIGN = (
    ".csv", ".dot", ".gz", ".htm", ".html", ".npy", ".npz", ".ods", ".parquet", ".pdf", ".pickle", ".pkl", ".pt",
    ".sqlite", ".svg", ".toml", ".xls", ".xlsx", ".xml", ".yaml", ".yml", ".zip",
)  # fmt: skip


def open_writer(
    format: str,
    sink: Binary,
    *,
    on_error: Callable[[Record], None],
    begun: bool = False,
    shown: Callable[[str], str] = str,
    formats: Mapping[str, OutputFormat] = FORMATS,
) -> Writer:
    """Make the writer of a format (see `WriterSetup`). Raises UsageError for a format that is not in `formats`."""
    if format not in formats:
        raise UsageError(f"unknown output format {quote(format)}: expected one of {', '.join(formats)}")
    return formats[format].open(sink, WriterSetup(on_error, begun, shown))


def format_of(output: str | None, formats: Sequence[str], default: str = "text") -> str:
    """The format that the suffix of `output` names, else `default`. `formats` are those of the command.

    Raises UsageError if the suffix names a format that the command does not write.
    """
    suffix = "" if output is None else PurePath(output).suffix.lower()
    format = _BY_SUFFIX.get(suffix)
    if format in formats:
        return str(format)
    if suffix in _FOREIGN or format is not None:
        records = " or ".join(f"--format {name}" for name in formats if name != "text")
        raise UsageError(
            f"--output {output}: {suffix[1:]} is not a format of this command", hint=f"{records}; --format text anyway"
        )
    return default


def to_json(record: Record) -> str:
    """The record on one line (`ensure_ascii=False`). Raises ValueError for a non-finite number."""
    return escaped(json.dumps(record, ensure_ascii=False, allow_nan=False))


def report_text(report: Record, format: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A report as JSON, or its `rows` as TSV."""
    if format == "json":
        return f"{to_json(report)}\n"
    return "".join("\t".join(map(str, row)) + "\n" for row in (columns, *rows))


def escaped(line: str) -> str:
    """The same JSON with control and invisible characters as escapes."""
    return _JSON_UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


def tsv_cell(value: Any) -> str:
    """A value as one cell, with controls and tabs written as escapes."""
    return "" if value is None else TSV_UNSEEN.sub(_tsv_escape, str(value))


def _tsv_escape(match: re.Match[str]) -> str:
    letter = match[0]
    return _TSV_NAMES.get(letter) or (f"\\x{ord(letter):02x}" if letter <= "\xff" else f"\\u{ord(letter):04x}")


class Ordered:
    """Writes results in input order, holding back only those that are early.

    `unordered` writes them as they arrive. Each index from `start` on must be put exactly once, with at least one
    record; anything else is an error of the caller (RuntimeError). `written` is called after each row is written.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        unordered: bool = False,
        start: int = 0,
        written: Callable[[int, Sequence[Record]], object] = lambda index, records: None,
    ) -> None:
        self._writer = writer
        self._unordered = unordered
        self._written = written
        self._next = start  # the lowest missing index
        self._early: dict[int, Sequence[Record]] = {}  # results with a higher index (empty: written already)
        self._due: deque[Record] = deque()  # ready to be written; still complete if a signal interrupts a row

    @property
    def held(self) -> int:
        """The number of rows that are held back."""
        return 0 if self._unordered else len(self._early)

    def put(self, index: int, records: Sequence[Record]) -> None:
        """Add the records of row `index`, written once all earlier rows are. Raises what the writer raises."""
        if index < self._next or index in self._early:
            raise RuntimeError(f"row {index} was put twice")
        if not records:
            raise RuntimeError(f"row {index} has no record")
        if self._unordered:
            self._write(records)
            self._written(index, records)
            records = ()
        self._early[index] = records
        while self._next in self._early:
            due = self._early.pop(self._next)
            self._next += 1
            self._write(due)
            if due:
                self._written(self._next - 1, due)

    def drop(self) -> None:
        """Drop the rows that are held back: earlier rows will not arrive."""
        self._early.clear()

    def close(self, *, partial: bool = False) -> None:
        """Close the writer. Raises RuntimeError if a row is missing, unless the run was interrupted (`partial`).

        If it was, the rows held back are written in order, with gaps.
        """
        if self._early and not partial:
            raise RuntimeError(f"row {self._next} is missing")
        self._write(())
        for index in sorted(self._early):
            if due := self._early.pop(index):
                self._write(due)
                self._written(index, due)
        self._writer.close()

    def _write(self, records: Sequence[Record]) -> None:
        self._due.extend(records)
        while self._due:
            self._writer.write(self._due.popleft())
