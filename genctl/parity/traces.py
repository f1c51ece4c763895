"""What engines wrote: tokens with their numbers, in the shapes in which servers, trainers and programs write them.

A shape is a function from a JSON object to rows. A document that has none of them is refused with the first path that
did not fit. Imports no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from genctl.documents import reader
from genctl.documents.reader import BadJson, Unreadable, kind_of
from genctl.errors import InputError, nearest, printable

Listed: TypeAlias = "tuple[int | None, str | None, float]"  # the id or the text of a token, and its number
_UNKNOWN = -1e4  # servers write this, or less, for the logarithm of 0


@dataclass(frozen=True)
class TracePiece:
    """A token as it was written; its number is NaN where there is none."""

    id: int | None
    text: str | None
    number: float
    top: tuple[Listed, ...] = ()


@dataclass(frozen=True)
class TraceRow:
    """A completion with its numbers. `total` is a number for all of it, where its tokens have none."""

    id: str
    pieces: tuple[TracePiece, ...]
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    text: str | None = None
    is_chat: bool = False
    total: float = math.nan
    own_id: bool = True


class UnfitShape(Exception):
    """A document that does not fit a shape: where, and what was expected there."""

    def __init__(self, path: str, expected: str, value: Any = None) -> None:
        super().__init__(f"{path}: expected {expected}, got {kind_of(value)}")


# -- JSON values as they are expected ----------------------------------------------------------------------------------


def _list(value: Any, path: str, what: str = "a list") -> list[Any]:
    if not isinstance(value, list):
        raise UnfitShape(path, what, value)
    return value


def _dict(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnfitShape(path, "an object", value)
    return value


def _ids(value: Any, path: str) -> tuple[int, ...]:
    for place, id in enumerate(_list(value, path, "a list of token ids")):
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < 2**31:
            raise UnfitShape(f"{path}[{place}]", "a token id", id)
    return tuple(value)


def _number(value: Any, path: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnfitShape(path, "a number", value)
    return float(value) if math.isfinite(value) and value > _UNKNOWN else math.nan


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise UnfitShape(path, "a string", value)
    return value


_AS_ID = re.compile(r"token_id:(\d{1,9})")  # vLLM with return_tokens_as_token_ids


def _listed(id: Any, text: Any, value: Any, path: str) -> Listed:
    match = _AS_ID.fullmatch(text) if isinstance(text, str) else None
    if match is not None:
        id, text = int(match[1]), None
    known = isinstance(id, int) and not isinstance(id, bool) and id >= 0
    if not known and not isinstance(text, str):
        raise UnfitShape(f"{path}.token", "the text or the id of a token", text)
    return (id if known else None), text, _number(value, f"{path}.logprob")


def _entry(entry: Any, path: str) -> TracePiece:
    """An object of a token: OpenAI's chats, Ollama, llama-server (with `prob` for `logprob` where it drew)."""
    one = _dict(entry, path)
    tops: Any = next((one[key] for key in ("top_logprobs", "top_probs", "probs") if one.get(key)), [])

    def listed(each: Any, place: str) -> Listed:
        each = _dict(each, place)
        if (value := each.get("logprob")) is None and isinstance(each.get("prob"), (int, float)):
            value = math.log(each["prob"]) if each["prob"] > 0 else None
        text = each.get("token", each.get("tok_str", each.get("content")))
        return _listed(each.get("id"), text, value, place)

    top = tuple(listed(each, f"{path}.top_logprobs[{place}]") for place, each in enumerate(_list(tops, path)))
    if "logprob" not in one and "prob" not in one and top:  # llama-server's older form has a list alone
        text = one.get("token", one.get("content"))
        one = {**one, "logprob": next((value for _, other, value in top if other == text), None)}
    id, text, number = listed(one, path)
    return TracePiece(id, text, number, tuple(each for each in top if not math.isnan(each[2])))


def _pieces(entries: Any, path: str) -> tuple[TracePiece, ...]:
    return tuple(_entry(each, f"{path}[{place}]") for place, each in enumerate(_list(entries, path)))


def _with_ids(pieces: Sequence[TracePiece], ids: Any, path: str) -> tuple[TracePiece, ...]:
    if ids is None or not pieces:
        return tuple(pieces)
    known = _ids(ids, path)
    if len(known) < len(pieces):
        raise UnfitShape(path, f"{len(pieces)} token ids, one for each number", ids)
    return tuple(replace(piece, id=id) for piece, id in zip(pieces, known, strict=False))


# -- shapes ------------------------------------------------------------------------------------------------------------


def _prompt(data: Mapping[str, Any]) -> dict[str, Any]:
    """What was read, as far as a document says it."""
    found: dict[str, Any] = {}
    prompt = data.get("prompt", data.get("input"))
    ids = next((data[key] for key in PROMPT_IDS if isinstance(data.get(key), list)), None)
    if ids is not None:
        found["prompt_ids"] = _ids(ids[0] if ids and isinstance(ids[0], list) else ids, "prompt_ids")
    if isinstance(prompt, str) and prompt:
        found["prompt"] = prompt
    elif isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
        found.setdefault("prompt_ids", _ids(prompt, "prompt"))
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        found["messages"] = tuple(prompt)
    if isinstance(data.get("messages"), list):
        found["messages"] = tuple(_dict(one, "messages") for one in data["messages"])
    return found


def _openai(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for place, choice in enumerate(_list(data["choices"], "choices")):
        path = f"choices[{place}]"
        choice = _dict(choice, path)
        logprobs = _dict(choice.get("logprobs"), f"{path}.logprobs")
        said = choice.get("message", choice.get("delta"))
        text = choice.get("text", (said or {}).get("content") if isinstance(said, dict) else None)
        if isinstance(logprobs.get("content"), list):
            pieces = _pieces(logprobs["content"], f"{path}.logprobs.content")
        else:
            path = f"{path}.logprobs"
            texts = _list(logprobs.get("tokens"), f"{path}.tokens", "a list of tokens")
            values = _list(logprobs.get("token_logprobs"), f"{path}.token_logprobs", "a list of numbers")
            tops = logprobs.get("top_logprobs") or [None] * len(texts)
            if not len(texts) == len(values) == len(tops):
                raise UnfitShape(f"{path}.token_logprobs", f"{len(texts)} numbers, one for each token", values)
            pieces = tuple(
                _plain_piece(text, value, top, f"{path}.token_logprobs[{place}]")
                for place, (text, value, top) in enumerate(zip(texts, values, tops, strict=True))
            )
        ids = choice.get("token_ids")
        row = {"pieces": _with_ids(pieces, ids, f"choices[{place}].token_ids"), "is_chat": "text" not in choice}
        yield {**_prompt(data), **_prompt(choice), **row, "text": text if isinstance(text, str) else None}


def _plain_piece(text: Any, value: Any, top: Any, path: str) -> TracePiece:
    id, shown, number = _listed(None, text, value, path)
    pairs = (top or {}).items() if isinstance(top or {}, dict) else ()
    found = [_listed(None, other, each, path) for other, each in pairs]
    return TracePiece(id, shown, number, tuple(each for each in found if not math.isnan(each[2])))


def _llama(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    key = "completion_probabilities" if "completion_probabilities" in data else "probs"
    ids = data.get("tokens") or None
    yield {**_prompt(data), "pieces": _with_ids(_pieces(data[key], key), ids, "tokens"), "text": data.get("content")}


def _sglang(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    about = _dict(data["meta_info"], "meta_info")
    told = _list(about.get("output_token_logprobs"), "meta_info.output_token_logprobs")
    tops = about.get("output_top_logprobs") or [None] * len(told)
    path = "meta_info.output_token_logprobs"

    def listed(one: Any, place: str) -> Listed:
        value, id, text = (*_list(one, place), None, None)[:3]
        return _listed(id, text, value, place)

    pieces = []
    for place, (one, top) in enumerate(zip(told, tops, strict=True)):
        found = tuple(listed(each, f"meta_info.output_top_logprobs[{place}]") for each in top or ())
        pieces.append(TracePiece(*listed(one, f"{path}[{place}]"), found))
    yield {**_prompt(data), "pieces": tuple(pieces), "text": data.get("text")}


def _ollama(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    message = data.get("message")
    text = message.get("content") if isinstance(message, dict) else data.get("response")
    yield {
        **_prompt(data), "pieces": _pieces(data["logprobs"], "logprobs"), "text": text, "is_chat": message is not None,
    }  # fmt: skip


def _responses(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for place, item in enumerate(_list(data["output"], "output")):
        for number, part in enumerate(_dict(item, f"output[{place}]").get("content") or ()):
            path = f"output[{place}].content[{number}].logprobs"
            pieces = _pieces(_dict(part, path).get("logprobs"), path)
            yield {**_prompt(data), "pieces": pieces, "text": part.get("text"), "is_chat": True}


def _record(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    key = "tokens" if "tokens" in data else "scores"
    pieces = []
    for place, one in enumerate(_list(data.get(key), key, "tokens with log-probabilities (--top-logprobs)")):
        path = f"{key}[{place}]"
        one = _dict(one, path)
        entries = [(*_list(each, path), None, None, None)[:3] for each in one.get("top") or ()]
        top = tuple(_listed(id, text, value, path) for id, text, value in entries)
        pieces.append(TracePiece(*_listed(one.get("id"), one.get("text"), one.get("logprob"), path), top))
    if key == "scores":
        ids = _ids(data.get("token_ids"), "token_ids")
        yield {"prompt_ids": ids[: len(ids) - len(pieces)], "pieces": tuple(pieces), "text": data.get("text")}
    else:
        yield {**_prompt(data), "pieces": tuple(pieces), "text": data.get("text")}


def _harness(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    given = data["arguments"]
    requests = list(given.values()) if isinstance(given, dict) else _list(given, "arguments")
    for place, (request, answer) in enumerate(zip(requests, _list(data["resps"], "resps"), strict=False)):
        words = [*request.values()] if isinstance(request, dict) else _list(request, f"arguments[{place}]")
        while isinstance(answer, list) and answer and isinstance(answer[0], list):
            answer = answer[0]
        if len(words) < 2 or not isinstance(words[1], str) or not isinstance(answer, list) or not answer:
            raise UnfitShape(f"resps[{place}]", "a log-likelihood of a continuation", answer)
        total = _number(float(answer[0]) if isinstance(answer[0], str) else answer[0], f"resps[{place}][0]")
        yield {"prompt": _text(words[0], "arguments"), "pieces": (), "text": words[1], "total": total}


PROMPT_IDS = ("prompt_ids", "prompt_token_ids", "input_ids", "context_ids")
COMPLETION_IDS = (
    "completion_ids", "response_ids", "completion_token_ids", "response_token_ids", "output_ids", "output_token_ids",
    "token_ids", "responses",
)  # fmt: skip
LOGPROBS = (
    "logprobs", "completion_logprobs", "response_logprobs", "rollout_log_probs", "rollout_logprobs", "old_log_probs",
    "sampling_logprobs", "log_probs", "token_logprobs", "output_logprobs",
)  # fmt: skip
FIELDS = ("id", "prompt", "prompt_ids", "messages", "completion", "completion_ids", "logprobs", "top_logprobs")


def _trainer(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    ids_key = next((key for key in COMPLETION_IDS if isinstance(data.get(key), list)), "")
    values_key = next((key for key in LOGPROBS if isinstance(data.get(key), list)), "")
    if not ids_key:
        raise UnfitShape("completion_ids", "a list of token ids", data.get("completion_ids"))
    if not values_key:
        raise UnfitShape("logprobs", "a list of numbers", data.get("logprobs"))
    ids, values = data[ids_key], data[values_key]
    if ids and isinstance(ids[0], list) and len(ids) == 1:  # a batch of one
        ids, values = ids[0], values[0]
    ids = _ids(ids, ids_key)
    if len(_list(values, values_key)) != len(ids):
        raise UnfitShape(values_key, f"{len(ids)} numbers, one for each of {ids_key}", values)
    tops = data.get("top_logprobs") or [None] * len(ids)
    if len(_list(tops, "top_logprobs")) != len(ids):
        raise UnfitShape("top_logprobs", f"{len(ids)} lists, one for each of {ids_key}", tops)
    pieces = []
    for place, (id, value, top) in enumerate(zip(ids, values, tops, strict=True)):
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        path = f"top_logprobs[{place}]"
        pairs: Iterable[Any] = top.items() if isinstance(top, dict) else top or ()
        found = []
        for each in pairs:
            if isinstance(each, dict):
                found.append(
                    _listed(each.get("id", each.get("token_id")), each.get("token"), each.get("logprob"), path)
                )
            else:
                other, number = (*_list(list(each), path), None)[0], list(each)[-1]
                if isinstance(number, dict):  # vLLM's Logprob
                    number = number.get("logprob")
                other = int(other) if isinstance(other, str) and other.isdecimal() else other
                found.append(_listed(other, other, number, path))
        number = _number(value, f"{values_key}[{place}]")
        pieces.append(TracePiece(id, None, number, tuple(each for each in found if not math.isnan(each[2]))))
    text = data.get("completion", data.get("response"))
    yield {**_prompt(data), "pieces": tuple(pieces), "text": text if isinstance(text, str) else None}


_SHAPES: tuple[tuple[Callable[[dict[str, Any]], bool], Callable[[dict[str, Any]], Iterator[dict[str, Any]]]], ...] = (
    (lambda data: "choices" in data, _openai),
    (lambda data: "completion_probabilities" in data or ("probs" in data and "content" in data), _llama),
    (lambda data: "meta_info" in data, _sglang),
    (lambda data: data.get("schema") == "genctl/1", _record),
    (lambda data: "resps" in data and "arguments" in data, _harness),
    (lambda data: isinstance(data.get("output"), list) and any(
        isinstance(item, dict) and "content" in item for item in data["output"]), _responses),
    (lambda data: isinstance(data.get("logprobs"), list)
     and bool(data["logprobs"]) and isinstance(data["logprobs"][0], dict), _ollama),
    (lambda data: any(key in data for key in (*COMPLETION_IDS, *LOGPROBS)), _trainer),
)  # fmt: skip
SHAPES = (
    "fits: OpenAI's completions and chats with logprobs (batch files and streams, too), vLLM, SGLang, llama-server, "
    "Ollama, LM Studio; prompt_ids, completion_ids and logprobs (--field names them); genctl's records with "
    "--top-logprobs; samples of lm-evaluation-harness"
)


def rows_of(data: Any, where: str, id: str, fields: Mapping[str, str] = {}) -> list[TraceRow]:
    """The rows of one JSON value. Raises InputError with the first path that does not fit."""
    try:
        data, own = _dict(data, "the row"), False
        for key in ("custom_id", "id", "index"):
            if isinstance(data.get(key), (str, int)) and not isinstance(data.get(key), bool):
                id, own = str(data[key]), key != "index"
                break
        if isinstance(data.get("error"), dict) and "choices" not in data:
            raise UnfitShape("error", "an answer", data["error"])
        if isinstance(data.get("response"), dict) and "body" in data["response"]:
            data = _dict(data["response"]["body"], "response.body")
        elif isinstance(data.get("body"), dict):
            data = data["body"]
        for name, path in fields.items():
            value: Any = data
            for part in path.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is None:
                raise UnfitShape(path, f"{name}, as --field says", value)
            data = {**data, name: value}
        shape = next((shape for fits, shape in _SHAPES if fits(data)), None)
        if shape is None or fields:
            shape = _trainer if fields else None
        if shape is None:
            keys = ", ".join(printable(key[:40]) for key in [*data][:8]) or "nothing"
            raise InputError(f"{where}: no numbers of tokens: it has {keys}", hint=SHAPES)
        found = [*shape(data)]
    except UnfitShape as error:
        raise InputError(f"{where}: {error}", hint=SHAPES) from None
    names = [id if len(found) == 1 else f"{id}.{place}" for place in range(len(found))]
    return [TraceRow(id=name, own_id=own, **one) for name, one in zip(names, found, strict=True)]


# -- documents: one JSON value, JSON lines, or the events of a stream --------------------------------------------------


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
        for number, line in enumerate(reader.lines(path), 1):
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            value: Any = {"prompt": text}
            if text.startswith("{"):
                value = _dict(reader.loads(text), f"line {number}")
                id = next((str(value[key]) for key in ("custom_id", "id") if key in value), None)
                value = value["body"] if isinstance(value.get("body"), dict) else value
                if id is not None:
                    found[id] = _prompt(value)
            ordered.append(_prompt(value))
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
