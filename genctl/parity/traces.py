"""Files of traces: one JSON value, JSON lines, or the events of streams, which add up to answers. Imports no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from genctl.config import reader
from genctl.config.reader import BadJson, Unreadable
from genctl.config.shapes import BadShape, value_of
from genctl.errors import InputError, cannot_read, nearest, printable, quote
from genctl.parity.shapes import FIELDS, FITTING, Llama, Ollama, OpenAI, SGLang, rows_of
from genctl.parity.trace_rows import TraceRow

MOST_SHOWN = 100  # failed rows whose reasons are kept
_BOM = b"\xef\xbb\xbf"


class Document(NamedTuple):
    """A JSON value of a file, or why there is none at its place."""

    where: str  # "line 3"
    value: Any
    error: str = ""


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


# -- streams: the events of an answer, as servers send them, add up to it ----------------------------------------------

_TEXTS = ("text", "content", "response")
_OBJECTS = ("logprobs", "message", "meta_info")
_LISTS = (
    "content", "tokens", "token_logprobs", "top_logprobs", "token_ids", "completion_probabilities", "probs", "logprobs",
    "output_token_logprobs", "output_top_logprobs",
)  # fmt: skip
_NUMBERS = ("logprobs", "completion_probabilities", "probs", "meta_info")


class _StreamedAnswer:
    """What the events of an answer add up to."""

    def __init__(self, where: str) -> None:
        self.where, self.error, self.closed = where, "", False
        self.whole: dict[str, Any] = {}
        self.parts: dict[int, dict[str, Any]] = {}  # its choices, of other servers itself
        self.open: set[int] = set()  # parts that have not ended

    def fail(self, error: str) -> None:
        """It cannot be read."""
        self.error = self.error or error

    def add(self, event: dict[str, Any]) -> None:
        """Add an event to those before."""
        self.whole |= {key: value for key, value in event.items() if value is not None}
        for place, part in _parts(event):
            own = self.parts.setdefault(place, {})
            _extend(own, part, repeats="meta_info" in part)
            ends = own.get("finish_reason") or _object(own, "meta_info").get("finish_reason")
            (self.open.discard if ends or True in (own.get("stop"), own.get("done")) else self.open.add)(place)

    def document(self) -> Document:
        """The whole answer."""
        for part in self.parts.values():
            for holder in (part, _object(part, "message")):
                for key in _TEXTS:
                    if isinstance(pieces := holder.get(key), list):
                        holder[key] = "".join(text for text in pieces if isinstance(text, str))
        parts = [part for _, part in sorted(self.parts.items())]
        whole = {**self.whole, "choices": parts} if "choices" in self.whole else parts[0] if parts else None
        return Document(self.where, whole, self.error)


def _parts(event: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    for part in event.get("choices", [event]):
        message = part.get("message") or part.get("delta")
        yield part.get("index") or 0 if "choices" in event else 0, {**part, "message": message, "delta": None}


def _object(part: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object within a part; empty where there is none."""
    return value if isinstance(value := part.get(key), dict) else {}


def _extend(whole: dict[str, Any], part: Mapping[str, Any], *, repeats: bool) -> None:
    """Add values to those before: texts as lists of parts. SGLang `repeats` what it wrote."""
    for key, value in part.items():
        before = whole.get(key)
        if isinstance(value, str) and key in _TEXTS:
            if repeats or not isinstance(before, list):
                whole[key] = before = []
            before.append(value)
        elif isinstance(value, list) and isinstance(before, list) and key in _LISTS:
            if value[: len(before)] == before and (repeats or len(before) > 1):
                whole[key] = value  # all of it once more
            else:
                before.extend(value)
        elif isinstance(value, dict) and key in _OBJECTS:
            whole[key] = before if isinstance(before, dict) else {}
            _extend(whole[key], value, repeats=repeats)
        elif value is not None:
            whole[key] = value


class Streams:
    """Answers whose events come one by one, those of several among each other; in the order in which they begin."""

    def __init__(self) -> None:
        self._begun: deque[_StreamedAnswer] = deque()
        self._answers: dict[str, _StreamedAnswer] = {}  # that may go on

    def take(self, where: str, event: Any) -> Iterator[Document]:
        """Take an event. Yields what is no part of an answer, and an answer where another one begins in its place."""
        kind = event.get("type") if isinstance(event, dict) else None
        if isinstance(kind, str) and kind.startswith("response."):  # OpenAI's last event of them has all
            if kind in ("response.completed", "response.incomplete"):
                yield Document(where, event.get("response"))
            return
        if (hint := hint_of(event)) is None:
            yield Document(where, event)
            return
        about = _object(event, "meta_info") or event
        key = f"{hint.__name__} {about.get('id')} {about.get('id_slot')}"
        if key not in self._answers and event.get("stop") is True and not event.get("completion_probabilities"):
            # llama-server names its slot in the last event alone
            begun = (name for name, one in self._answers.items() if one.open and name.startswith(hint.__name__))
            key = next(begun, key)
        try:
            event = value_of(hint, event)
        except BadShape as error:
            self.spoil(f"{where}: {error}", key if about.get("id") is not None else "")
            self._answer(key, where).fail(f"{where}: {error}")
            return
        answer = self._answer(key, where)
        has_numbers = any(part.get(name) for _, part in _parts(event) for name in _NUMBERS)
        if has_numbers and any(place in answer.parts and place not in answer.open for place, _ in _parts(event)):
            self._answers.pop(key).closed = True
            answer = self._answer(key, where)
        answer.add(event)
        yield from self._closed()

    def _answer(self, key: str, where: str) -> _StreamedAnswer:
        if key not in self._answers:
            self._answers[key] = _StreamedAnswer(where)
            self._begun.append(self._answers[key])
        return self._answers[key]

    def spoil(self, error: str, key: str = "") -> bool:
        """An event that cannot be read spoils its answer; if nobody knows which, all that are open."""
        spoiled = [one for name, one in self._answers.items() if name == key or (not key and one.open)]
        for one in spoiled:
            one.fail(error)
        return bool(spoiled)

    def has(self, value: Any) -> bool:
        """Whether a value that nobody calls an event is one."""
        if (hint := hint_of(value)) is None:
            return False
        ends = value.get("stop", value.get("done"))
        is_last = ends is True and not value.get("completion_probabilities")
        is_last = is_last and any(one.open for key, one in self._answers.items() if key.startswith(hint.__name__))
        return ends is False or is_last or str(value.get("object", "")).endswith(".chunk")

    def end(self, *, all: bool = True) -> Iterator[Document]:
        """The answers; unless `all`, those that have ended, or the only one."""
        ended = [key for key, one in self._answers.items() if all or not one.open]
        for key in ended or [*self._answers][: len(self._answers) == 1]:
            self._answers.pop(key).closed = True
        yield from self._closed()

    def _closed(self) -> Iterator[Document]:
        while self._begun and self._begun[0].closed:
            yield self._begun.popleft().document()


def hint_of(event: Any) -> Any:
    """The shape of an event of a stream; None if it is none."""
    keys = event.keys() if isinstance(event, dict) else ()
    hints = {OpenAI: ("choices",), SGLang: ("meta_info",), Llama: ("stop", "content"), Ollama: ("done",)}
    return next((hint for hint, names in hints.items() if all(name in keys for name in names)), None)


# -- prompts of another file -------------------------------------------------------------------------------------------


def with_prompts(trace: TraceFile, name: str, found: Sequence[tuple[str | None, Mapping[str, Any]]]) -> None:
    """Give rows the prompts of a file: by their id, else in order. Raises InputError.

    `found` has the id of each prompt, None where it has none, and the fields of a `TraceRow` that it sets.
    """
    by_id = {id: prompt for id, prompt in found if id is not None}
    if any(row.own_id and row.id in by_id for row in trace.rows):
        chosen = [by_id.get(row.id) for row in trace.rows]
        if len(by_id) < len(found):
            raise InputError(f"{name}: a prompt has no id, and others have")
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
            rows.append((place, replace(row, prompt_tokens=None, **prompt)))
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
