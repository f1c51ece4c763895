"""Files of traces: one JSON value, JSON lines, or the events of a stream. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from genctl.documents import reader
from genctl.documents.reader import BadJson, Unreadable
from genctl.errors import InputError, nearest, printable
from genctl.parity.shapes import FIELDS, SHAPES, TraceRow, UnfitShape, prompt_of, rows_of


def _joined(parts: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Chunks of a stream as one answer, in the order of their first."""
    whole: dict[str, tuple[int, dict[str, Any]]] = {}
    for number, part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("choices"), list):
            yield number, part
            continue
        _, answer = whole.setdefault(str(part.get("id")), (number, {**part, "choices": []}))
        for choice in part["choices"]:
            if not isinstance(choice, dict):
                continue
            place = choice.get("index", 0)
            while isinstance(place, int) and len(answer["choices"]) <= place < 1024:
                answer["choices"].append({"logprobs": {}})
            _add(answer["choices"][place], choice)
    yield from whole.values()


def _add(answer: dict[str, Any], choice: dict[str, Any]) -> None:
    said = choice.get("delta", choice.get("message"))
    key, text = ("text", choice.get("text")) if "text" in choice else ("message", (said or {}).get("content"))
    if key == "text":
        answer["text"] = answer.get("text", "") + (text or "")
    else:
        answer["message"] = {"content": answer.get("message", {}).get("content", "") + (text or "")}
    for name, value in (choice.get("logprobs") or {}).items():
        if isinstance(value, list):
            answer["logprobs"].setdefault(name, []).extend(value)
    if isinstance(choice.get("token_ids"), list):
        answer.setdefault("token_ids", []).extend(choice["token_ids"])


def _values(path: str) -> Iterator[tuple[int, Any]]:
    """The JSON values of a file with their lines. Raises InputError."""
    name = printable(path)
    lines = reader.lines(path)
    stream: list[tuple[int, Any]] = []
    begun: list[bytes] = []  # of a document of several lines
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if text.startswith(b"data:"):
                text = text.removeprefix(b"data:").strip()
                if text != b"[DONE]":
                    stream.append((number, reader.loads(text, finite=False)))
                continue
            if not text or text.startswith((b"event:", b":")):
                continue
            if begun or (number == 1 and not _is_whole(text)):
                begun.append(line)
                if sum(map(len, begun)) > reader.MOST:
                    raise Unreadable("a document of several lines, and larger than 64 MiB")
                continue
            value = reader.loads(text, finite=False)
            chunk = isinstance(value, dict) and str(value.get("object", "")).endswith(".chunk")
            if chunk:
                stream.append((number, value))
            elif isinstance(value, list):
                yield from enumerate(value, 1)
            else:
                yield number, value
        if begun:
            value = reader.loads(b"".join(begun), finite=False)
            yield from enumerate(value if isinstance(value, list) else [value], 1)
    except Unreadable as error:
        raise InputError(f"the trace could not be read: {error}: {name}") from None
    except BadJson as error:
        where = f"{name}, line {number}" if not begun else name
        raise InputError(f"{where}: {error}", hint=SHAPES) from None
    yield from _joined(stream)


def _is_whole(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@dataclass
class TraceFile:
    """Rows of a file, spread evenly over it, with the first mistake of each row that is none."""

    rows: list[TraceRow] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    hint: str = ""
    total: int = 0
    places: list[int] = field(default_factory=list)  # of the rows among all


def read(path: str, most: int, fields: Mapping[str, str] = {}) -> TraceFile:
    """At most `most` rows of a file. Raises InputError if it has none."""
    trace, step = TraceFile(), 1
    kept: list[tuple[int, TraceRow]] = []
    for number, value in _values(path):
        where = f"{printable(path)}, row {number}"
        try:
            found = rows_of(value, where, str(number), fields)
        except InputError as error:
            trace.bad[str(number)] = error.message
            trace.hint = error.hint
            if len(trace.bad) > 100 and not kept:
                break
            continue
        for row in found:
            if trace.total % step == 0:
                kept.append((trace.total, row))
            trace.total += 1
            if len(kept) >= 2 * most:
                step *= 2
                kept = [(place, one) for place, one in kept if place % step == 0]
    if not kept:
        message = next(iter(trace.bad.values()), f"{printable(path)}: there is no row")
        raise InputError(message, hint=trace.hint or SHAPES)
    spread = [kept[place * len(kept) // min(most, len(kept))] for place in range(min(most, len(kept)))]
    trace.rows, trace.places = [row for _, row in spread], [place for place, _ in spread]
    return trace


def with_prompts(trace: TraceFile, path: str) -> None:
    """Give rows the prompts of a file: by their id, else in order. Raises InputError."""
    found: dict[str, dict[str, Any]] = {}
    ordered: list[dict[str, Any]] = []
    try:
        for line in reader.lines(path):
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            value: Any = {"prompt": text}
            if text.startswith("{"):
                value = reader.loads(text)
                id = next((str(value[key]) for key in ("custom_id", "id") if key in value), None)
                value = value["body"] if isinstance(value.get("body"), dict) else value
                if id is not None:
                    found[id] = prompt_of(value)
            ordered.append(prompt_of(value))
    except (Unreadable, BadJson, UnfitShape) as error:
        raise InputError(f"--prompts {printable(path)}: {error}") from None
    by_id = bool(found) and any(row.id in found for row in trace.rows)
    if not by_id and len(ordered) != trace.total:
        raise InputError(f"--prompts {printable(path)} has {len(ordered)} prompts, and the trace {trace.total} rows")
    trace.rows = [
        replace(row, **(found.get(row.id, {}) if by_id else ordered[place]))
        for place, row in zip(trace.places, trace.rows, strict=True)
    ]


def field_paths(given: Sequence[str]) -> dict[str, str]:
    """`NAME=PATH` of --field. Raises InputError."""
    found = {}
    for text in given:
        name, equals, path = text.partition("=")
        if name not in FIELDS or not equals or not path:
            near = nearest(name, FIELDS)
            hint = f"did you mean {near}?" if near else f"NAME is one of {', '.join(FIELDS)}"
            raise InputError(f"--field {text}: expected NAME=PATH", hint=hint)
        found[name] = path
    return found
