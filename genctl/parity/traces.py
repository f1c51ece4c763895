"""Trace files: one JSON value or JSON lines, in the shapes of servers, trainers and programs. Imports no torch.

A shape is recognised by its keys, and a function turns it into rows. A document that fits no shape is refused with
the first path that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

from genctl.config import reader
from genctl.config.reader import BadJson, Unreadable, kind_of
from genctl.config.shapes import BadShape, Natural
from genctl.errors import InputError, cannot_read, nearest, printable, quote
from genctl.parity.trace_rows import (
    PROMPT_IDS,
    Count,
    Entry,
    Number,
    TracePiece,
    TraceRow,
    Word,
    best_of,
    fit,
    piece,
    piece_of,
    pieces_of,
    prompt_of,
    with_ids,
)

Row: TypeAlias = dict[str, Any]  # an object of a document, or fields of a TraceRow
Ids: TypeAlias = list[Natural] | None
MOST_SHOWN = 100  # failed rows whose reasons are kept
FITTING = (
    "fits: OpenAI's completions and chats with logprobs (batch files, too), vLLM, SGLang, llama-server, Ollama; "
    "prompt_ids, completion_ids and logprobs (--field names them); genctl's records with --scores or "
    "--top-logprobs"
)
WRITING = "genctl writes them with --scores (or --top-logprobs K, with alternatives): record the run once more with it"
STREAM = "an event of a stream: record answers without stream, or with all events of each in one"

# -- shapes ------------------------------------------------------------------------------------------------------------


class NoLogprobs(BadShape):
    """Output of genctl without log-probabilities."""


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _entries(value: Any, path: str) -> tuple[TracePiece, ...]:
    """The tokens of a list of objects."""
    entries: list[Entry] = fit(list[Entry] | None, value, path) or []
    tops = [one.get("top_logprobs") or one.get("top_probs") or () for one in entries]
    return tuple(piece_of(one, map(piece_of, top)) for one, top in zip(entries, tops, strict=True))


def _openai(data: Row) -> Iterator[Row]:
    """A completion or a chat completion."""
    for place, choice in enumerate(fit(list[Row], data["choices"], "choices")):
        if "delta" in choice:
            raise BadShape(STREAM)
        path = f"choices.{place}.logprobs"
        logprobs = fit(Row, choice.get("logprobs"), path)
        if logprobs.get("content") is not None:
            pieces = _entries(logprobs["content"], f"{path}.content")
        else:
            texts = fit(list[str], logprobs.get("tokens"), f"{path}.tokens")
            values = fit(list[Number], logprobs.get("token_logprobs"), f"{path}.token_logprobs")
            tops = fit(list[dict[str, Number] | None] | None, logprobs.get("top_logprobs"), f"{path}.top_logprobs")
            best = [[(None, *pair) for pair in (top or {}).items()] for top in tops or ()]
            pieces = pieces_of(f"{path}.token_logprobs", None, texts, values, best)
        message = fit(Row | None, choice.get("message"), f"choices.{place}.message") or {}
        ids = fit(Ids, choice.get("token_ids"), f"choices.{place}.token_ids")
        yield {
            **prompt_of(data),
            **prompt_of(choice),
            "pieces": with_ids(pieces, ids, f"choices.{place}.token_ids"),
            "text": _text(choice.get("text", message.get("content"))),
            "is_chat": "text" not in choice,
        }


def _sglang(data: Row) -> Iterator[Row]:
    """A response of SGLang's own interface: number, id and text of each token."""
    path, place = "meta_info.output_token_logprobs", tuple[Number, Count, Word]
    meta = fit(Row, data["meta_info"], "meta_info")
    chosen = fit(list[place], meta.get("output_token_logprobs"), path)  # type: ignore[valid-type]
    hint = list[list[place] | None] | None  # type: ignore[valid-type]
    tops = fit(hint, meta.get("output_top_logprobs"), "meta_info.output_top_logprobs")
    values, ids, texts = ([one[at] for one in chosen] for at in range(3))
    best = [[(id, text, value) for value, id, text in top or ()] for top in tops or ()]
    yield {**prompt_of(data), "pieces": pieces_of(path, ids, texts, values, best),
           "text": fit(Word, data.get("text"), "text")}  # fmt: skip


def _entry_list(data: Row) -> Iterator[Row]:
    """A response of llama-server's or Ollama's own interface; only one of a chat has a message."""
    key = "completion_probabilities" if data.get("completion_probabilities") else "logprobs"
    message = fit(Row | None, data.get("message"), "message")
    yield {
        **prompt_of(data),
        "prompt_tokens": fit(Count, data.get("tokens_evaluated"), "tokens_evaluated"),
        "pieces": with_ids(_entries(data.get(key), key), fit(Ids, data.get("tokens"), "tokens"), "tokens"),
        "text": _text((message or {}).get("content", data.get("content", data.get("response")))),
        "is_chat": message is not None,
    }


def _record(data: Row) -> Iterator[Row]:
    """A record of genctl. In those of `score`, `token_ids` has the whole text, and `tokens` counts scored tokens."""
    key = "scores" if data.get("scores") else "tokens"
    if data.get(key) is None or isinstance(data[key], int):
        raise NoLogprobs("the record has no log-probabilities of its tokens")
    pieces = []
    for place, one in enumerate(fit(list[Row], data[key], key)):
        given = [one.get(name) for name in ("id", "text", "logprob")]
        id, text, value = fit(tuple[Count, Word, Number], given, f"{key}.{place}")
        tops = fit(list[tuple[Count, Word, Number]] | None, one.get("top"), f"{key}.{place}.top")
        pieces.append(piece(id, text, value, (piece(*top) for top in tops or ())))
    sequence = fit(Count, data.get("sequence"), "sequence") or 0
    row = {"pieces": tuple(pieces), "text": fit(Word, data.get("text"), "text"), "sequence": sequence}
    row["model"] = "" if data.get("backend") else fit(Word, data.get("model"), "model") or ""
    if key == "tokens":
        usage = fit(Row | None, data.get("usage"), "usage") or {}
        counted = fit(Count, usage.get("prompt_tokens"), "usage.prompt_tokens")
        yield {**prompt_of(data), **row, "prompt_tokens": counted, "is_exact": not data.get("backend")}
    else:
        ids = fit(Ids, data.get("token_ids"), "token_ids") or []
        if len(ids) < len(pieces):
            raise BadShape(f"token_ids: expected at least {len(pieces)} items, got {len(ids)}")
        yield {**row, "prompt_ids": tuple(ids[: len(ids) - len(pieces)])}


COMPLETION_IDS = (
    "completion_ids", "response_ids", "completion_token_ids", "response_token_ids", "output_ids", "output_token_ids",
    "token_ids", "responses",
)  # fmt: skip
LOGPROBS = (
    "logprobs", "completion_logprobs", "response_logprobs", "rollout_log_probs", "rollout_logprobs", "old_log_probs",
    "sampling_logprobs", "log_probs", "token_logprobs", "output_logprobs",
)  # fmt: skip


def _trainer(data: Row) -> Iterator[Row]:
    """A rollout: token ids and their log-probabilities."""
    ids_key = next((key for key in COMPLETION_IDS if isinstance(data.get(key), list)), "completion_ids")
    values_key = next((key for key in LOGPROBS if isinstance(data.get(key), list)), "logprobs")
    ids, values = (fit(list[Any], data.get(key), key) for key in (ids_key, values_key))
    if len(ids) == len(values) == 1 and isinstance(ids[0], list):  # a batch of one
        ids, values = ids[0], fit(list[Any], values[0], values_key)
    ids = fit(list[Natural], ids, ids_key)
    values = [one[0] if isinstance(one, list) and len(one) == 1 else one for one in values]
    tops = fit(list[Any] | None, data.get("top_logprobs"), "top_logprobs") or ()
    best = [best_of(top, f"top_logprobs.{place}") for place, top in enumerate(tops)]
    pieces = pieces_of(values_key, ids, None, fit(list[Number], values, values_key), best)
    yield {**prompt_of(data), "pieces": pieces, "text": _text(data.get("completion", data.get("response")))}


def _reader_of(data: Row) -> Callable[[Row], Iterator[Row]] | None:
    """The function that turns a document into rows, found by its keys; None if there is none."""
    if "choices" in data:
        return _openai
    if "completion_probabilities" in data:
        return _entry_list
    if "meta_info" in data:
        return _sglang
    if data.get("schema") == "genctl/1":
        return _record
    logprobs = data.get("logprobs")
    if isinstance(logprobs, list) and any(isinstance(one, dict) for one in logprobs):
        return _entry_list
    return _trainer if any(key in data for key in (*COMPLETION_IDS, *LOGPROBS)) else None


# -- documents ---------------------------------------------------------------------------------------------------------

OF_PROMPTS = ("prompt", "prompt_ids", "messages")
FIELDS = ("id", *OF_PROMPTS, "completion", "completion_ids", "logprobs", "top_logprobs")


def _id_of(data: Mapping[str, Any]) -> str | None:
    """The id of a row or of a request; None if it has none. Raises BadShape."""
    key = next((key for key in ("custom_id", "id") if data.get(key) is not None), None)
    if key is not None and (isinstance(data[key], bool) or not isinstance(data[key], (str, int))):
        raise BadShape(f"{key}: expected a string or an integer, got {kind_of(data[key])}")
    return None if key is None else str(data[key])


def _at(data: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(data, list) and part.isdecimal() and len(part) < 9:
            data = next(iter(data[int(part) :][:1]), None)
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data


def rows_of(data: Any, where: str, id: str, fields: Mapping[str, str] = {}) -> list[TraceRow]:
    """The rows of one JSON value. `fields`: from --field. Raises InputError with the first path that does not fit."""
    try:
        data = fit(Row, data, "the row")
        bodies = (part.get("body") for part in (data.get("response"), data) if isinstance(part, dict))
        body = next((body for body in bodies if isinstance(body, dict)), data)  # a line in a batch file
        named = {name: _at(body if _at(data, path) is None else data, path) for name, path in fields.items()}
        if missing := next((name for name, value in named.items() if value is None), None):
            raise BadShape(f"{fields[missing]}: expected {missing}, as --field says, got null")
        own = _id_of({"id": named.pop("id")} if "id" in named else data)
        if not named.keys().isdisjoint(OF_PROMPTS):
            body = {key: value for key, value in body.items() if key not in (*OF_PROMPTS, *PROMPT_IDS)}
        # fields of a completion can only be a trainer's
        rows_in = _reader_of(body) if named.keys() <= {*OF_PROMPTS} else _trainer
        if rows_in is None:
            if "event" in body and "lane" in body:  # a line of --events
                raise NoLogprobs("an event of a run, in place of its record with log-probabilities")
            keys = ", ".join(printable(key[:40]) for key in [*body][:8]) or "nothing"
            raise BadShape(f"no numbers of tokens: it has {keys}")
        if False in (body.get("stop"), body.get("done")):
            raise BadShape(STREAM)
        rows = [*rows_in({**body, **named})]
    except BadShape as error:
        raise InputError(f"{where}: {error}", hint=WRITING if isinstance(error, NoLogprobs) else FITTING) from None
    given = {"id": id if own is None else own, "own_id": own is not None}
    return [TraceRow(**{**given, "sequence": place, **row}) for place, row in enumerate(rows)]


# -- files -------------------------------------------------------------------------------------------------------------

EVENTS = (b"data:", b"event:")  # lines of a stream


def _documents(given: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """The JSON values in the lines of a file, each with its place; or a BadJson. Raises Unreadable."""
    lines = ((number, line.removeprefix(b"\xef\xbb\xbf")) for number, line in enumerate(given, 1))
    lines = ((number, line) for number, line in lines if line.strip())
    if (first := next(lines, None)) is None:
        return
    held, size, values = [first], 0, list[tuple[str, Any]]()
    if isinstance(_loaded(first[1]), BadJson) and not first[1].startswith(EVENTS):
        for each in lines:
            held.append(each)
            if (size := size + len(each[1])) > reader.MOST:
                break
        if not isinstance(value := _loaded(b"".join(line for _, line in held)), BadJson):
            values = [("the document", value)]
    for where, value in values or ((f"line {number}", _loaded(line)) for number, line in chain(held, lines)):
        if isinstance(value, list):
            yield from ((f"{where}, item {place}", each) for place, each in enumerate(value, 1))
        else:
            yield where, value


def _loaded(text: bytes) -> Any:
    """A JSON value, or a BadJson with the reason."""
    try:
        return reader.loads(text, finite=False)
    except BadJson as error:
        return BadJson(STREAM) if text.startswith(EVENTS) else error


@dataclass
class TraceFile:
    """Rows of a file, evenly spaced, and why others cannot be audited."""

    rows: list[TraceRow] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)  # of the first `MOST_SHOWN`
    failed: int = 0
    total: int = 0  # rows
    requests: int = 0

    def fail(self, id: str, reason: str) -> None:
        """Record a row that cannot be audited."""
        self.failed += 1
        if len(self.bad) < MOST_SHOWN:
            self.bad[id] = reason


def read(path: str, most: int, fields: Mapping[str, str] = {}) -> TraceFile:
    """Read at most `most` rows of a file. Raises InputError if it has none."""
    trace, kept, step, name = TraceFile(), list[TraceRow](), 1, printable(path)
    error = InputError(f"{name}: there is no row", hint=FITTING)
    try:
        for number, (place, value) in enumerate(_documents(reader.lines(path)), 1):
            where, rows = f"{name}, {place}", list[TraceRow]()
            try:
                if isinstance(value, BadJson):
                    raise InputError(f"{where}: {value}", hint=FITTING)
                rows = rows_of(value, where, str(number), fields)
            except InputError as mistake:
                error = error if trace.failed else mistake
                trace.fail(str(number), mistake.message)
                if trace.failed > MOST_SHOWN and not trace.total:
                    break
            # genctl writes a record for each sequence
            trace.requests += not (len(rows) == 1 and rows[0].sequence)
            for row in rows:
                if trace.total % step == 0:
                    kept.append(replace(row, request=trace.requests - 1, place=trace.total))
                trace.total += 1
                if len(kept) >= 2 * most:
                    step *= 2
                    kept = [one for one in kept if one.place % step == 0]
    except Unreadable as reason:
        raise InputError(cannot_read(name, reason)) from None
    if not kept:
        raise error
    count = min(most, len(kept))
    trace.rows = [kept[place * len(kept) // count] for place in range(count)]
    return trace


# -- options: prompts of another file, and names of fields -------------------------------------------------------------


def with_prompts(trace: TraceFile, name: str, found: Sequence[tuple[str | None, Mapping[str, Any]]]) -> None:
    """Give rows the prompts of a file, by id, else in order. Raises InputError.

    `found` has the id of each prompt (None without one), and the fields of a `TraceRow` that it sets.
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
        chosen = [found[row.request if by_request else row.place][1] for row in trace.rows]
    else:
        requests = f" of {trace.requests} requests" if trace.requests != trace.total else ""
        raise InputError(f"{name} has {len(found)} prompts, and the trace {trace.total} rows{requests}")
    rows = []
    for row, prompt in zip(trace.rows, chosen, strict=True):
        if prompt is None:
            trace.fail(row.name, f"row {row.name}: {name} has no prompt with the id {quote(row.id)}")
        else:
            rows.append(replace(row, prompt_tokens=None, **prompt))
    trace.rows = rows


def field_paths(given: Sequence[str]) -> dict[str, str]:
    """Parse each `NAME=PATH` of --field. Raises InputError."""
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
