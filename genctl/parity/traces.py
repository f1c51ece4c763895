"""Files of traces: one JSON value, JSON lines, or the events of streams. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from genctl.documents import reader
from genctl.documents.reader import BadJson, Unreadable
from genctl.documents.shapes import BadShape
from genctl.errors import InputError, cannot_read, nearest, printable, quote
from genctl.parity.shapes import FIELDS, FITTING, OF_PROMPTS, body_of, id_of, rows_of
from genctl.parity.streams import Document, Streams
from genctl.parity.trace_rows import NO_PROMPT, TraceRow, fit, prompt_of

MOST_SHOWN = 100  # failed rows whose reasons are kept
_BOM = b"\xef\xbb\xbf"


def _documents(given: Iterable[bytes]) -> Iterator[Document]:
    """The JSON values in the lines of a file. Raises Unreadable."""
    lines = ((number, line.removeprefix(_BOM)) for number, line in enumerate(given, 1))
    lines = ((number, line) for number, line in lines if line.strip())
    if (first := next(lines, None)) is None:
        return
    held, size = [first], 0
    if not first[1].startswith((b"data:", b"event:", b"id:", b":")) and isinstance(_loaded(first[1]), BadJson):
        for each in lines:
            held.append(each)
            if (size := size + len(each[1])) > reader.MOST:
                break
        value = _loaded(b"".join(line for _, line in held)) if size <= reader.MOST else BadJson()
        # one document of several lines; else lines, of which the first is broken
        if not isinstance(value, BadJson) or all(isinstance(_loaded(line), BadJson) for _, line in held[:2]):
            yield from _items("the document", value)
            return
    yield from _lines(chain(held, lines))


def _lines(lines: Iterable[tuple[int, bytes]]) -> Iterator[Document]:
    """The JSON values of lines, and of events that are sent in lines."""
    streams = Streams()
    for number, line in lines:
        where, text = f"line {number}", line.strip()
        is_sent = text.startswith(b"data:")
        text = text.removeprefix(b"data:").strip() if is_sent else text
        if text == b"[DONE]":
            yield from streams.end(all=False)
        elif not text.startswith((b"event:", b"id:", b"retry:", b":")):
            value = _loaded(text)
            if isinstance(value, BadJson):
                if not (is_sent and streams.spoil(f"{where}: {value}")):
                    yield Document(where, None, str(value))
            elif is_sent or streams.has(value):
                yield from streams.take(where, value)
            else:
                yield from streams.end(all=False)
                yield from _items(where, value)
    yield from streams.end()


def _items(where: str, value: Any) -> Iterator[Document]:
    if isinstance(value, BadJson):
        yield Document(where, None, str(value))
    elif isinstance(value, list):
        yield from (Document(f"{where}, item {place}", each) for place, each in enumerate(value, 1))
    else:
        yield Document(where, value)


def _loaded(text: bytes) -> Any:
    """A JSON value, or why it is none."""
    try:
        return reader.loads(text, finite=False)
    except BadJson as error:
        return error


class RowPlace(NamedTuple):
    """Where a row is in its file: among the requests, and among all rows."""

    request: int
    row: int


@dataclass
class TraceFile:
    """Rows of a file, spread evenly over it, and why others cannot be audited."""

    rows: list[TraceRow] = field(default_factory=list)
    places: list[RowPlace] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)  # of the first `MOST_SHOWN`
    failed: int = 0
    total: int = 0  # rows
    requests: int = 0

    def fail(self, id: str, reason: str) -> None:
        """A row that cannot be audited."""
        self.failed += 1
        if len(self.bad) < MOST_SHOWN:
            self.bad[id] = reason


def read(path: str, most: int, fields: Mapping[str, str] = {}) -> TraceFile:
    """At most `most` rows of a file. Raises InputError if it has none."""
    trace, kept, step, name = TraceFile(), list[tuple[RowPlace, TraceRow]](), 1, printable(path)
    error = InputError(f"{name}: there is no row", hint=FITTING)
    try:
        for number, document in enumerate(_documents(reader.lines(path)), 1):
            where, rows = f"{name}, {document.where}", list[TraceRow]()
            try:
                if document.error:
                    raise InputError(f"{where}: {document.error}", hint=FITTING)
                rows = rows_of(document.value, where, str(number), fields)
            except InputError as mistake:
                error = error if trace.failed else mistake
                trace.fail(str(number), mistake.message)
                if trace.failed > MOST_SHOWN and not trace.total:
                    break
            # genctl writes a record for each sequence
            trace.requests += not (len(rows) == 1 and rows[0].sequence)
            for row in rows:
                if trace.total % step == 0:
                    kept.append((RowPlace(trace.requests - 1, trace.total), row))
                trace.total += 1
                if len(kept) >= 2 * most:
                    step *= 2
                    kept = [(place, one) for place, one in kept if place.row % step == 0]
    except Unreadable as reason:
        raise InputError(cannot_read(name, reason)) from None
    if not kept:
        raise error
    spread = [kept[place * len(kept) // min(most, len(kept))] for place in range(min(most, len(kept)))]
    trace.places, trace.rows = [place for place, _ in spread], [row for _, row in spread]
    return trace


# -- prompts of another file -------------------------------------------------------------------------------------------


def _prompts(path: str) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """The id and the prompt of each row of a file: of JSON, if its name or its first line says so; else lines.

    Raises BadShape and Unreadable.
    """
    lines = [line.removeprefix(_BOM) for line in reader.lines(path)]
    while lines and not lines[-1].strip():
        lines.pop()
    is_json = isinstance(_loaded(next((line for line in lines if line.strip()), b"")), dict)
    if not is_json and not path.endswith((".json", ".jsonl", ".ndjson")):
        for number, line in enumerate(lines, 1):
            try:
                yield None, {"prompt": line.rstrip(b"\r\n").decode()}
            except UnicodeDecodeError as error:
                raise BadShape(f"line {number}: byte {error.start + 1} is not UTF-8") from None
        return
    for where, value, wrong in _documents(lines):
        try:
            row = {"prompt": value} if isinstance(value, str) else fit(dict[str, Any], value, "the row")
            found = prompt_of(body_of(row)) if not wrong else {}
            if not found.keys() & {*OF_PROMPTS}:
                raise BadShape(wrong or "expected a prompt, prompt_ids or messages")
            yield id_of(row), found
        except BadShape as error:
            raise BadShape(f"{where}: {wrong or error}") from None


def with_prompts(trace: TraceFile, path: str) -> None:
    """Give rows the prompts of a file: by their id, else in order. Raises InputError."""
    name = f"--prompts {printable(path)}"
    try:
        found = [*_prompts(path)]
    except (Unreadable, BadShape) as error:
        raise InputError(f"{name}: {error}") from None
    by_id = {id: prompt for id, prompt in found if id is not None}
    if any(row.own_id and row.id in by_id for row in trace.rows):
        chosen = [by_id.get(row.id) for row in trace.rows]
        if len(by_id) < len(found):
            raise InputError(f"{name}: two prompts have the same id, or one has none")
        if len(found) == trace.requests and (row := next((row for row in trace.rows if row.id not in by_id), None)):
            raise InputError(f"{name}: no prompt has the id {quote(row.id)}, and other rows have ids that are there")
    elif len(found) in (trace.requests, trace.total):
        by_request = len(found) == trace.requests
        chosen = [found[place.request if by_request else place.row][1] for place in trace.places]
    else:
        requests = f" of {trace.requests} requests" if trace.requests != trace.total else ""
        raise InputError(f"{name} has {len(found)} prompts, and the trace {trace.total} rows{requests}")
    rows = []
    for row, place, prompt in zip(trace.rows, trace.places, chosen, strict=True):
        if prompt is None:
            trace.fail(row.name, f"row {row.name}: {name} has no prompt with the id {quote(row.id)}")
        else:
            rows.append((place, replace(row, **{**NO_PROMPT, **prompt})))
    trace.places, trace.rows = [place for place, _ in rows], [row for _, row in rows]


def field_paths(given: Sequence[str]) -> dict[str, str]:
    """`NAME=PATH` of --field. Raises InputError."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if name not in FIELDS or not equals or not path:
            near = nearest(name, FIELDS)
            hint = f"did you mean {near}?" if near else f"NAME is one of {', '.join(FIELDS)}"
            raise InputError(f"--field {text}: expected NAME=PATH", hint=hint)
        if found.setdefault(name, path) != path:
            raise InputError(f"--field {text}: {name} is {found[name]} already")
    return found
