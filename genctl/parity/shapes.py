"""What engines wrote: tokens with their numbers, in the shapes in which servers, trainers and programs write them.

A shape is a function from a JSON object to rows. A document that has none of them is refused with the first path that
did not fit. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from genctl.documents.reader import kind_of
from genctl.errors import InputError, printable

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


def _object(one: dict[str, Any], path: str) -> Listed:
    """A token that is an object; llama-server has `prob` for `logprob` where it drew."""
    if (value := one.get("logprob")) is None and isinstance(one.get("prob"), (int, float)):
        value = math.log(one["prob"]) if one["prob"] > 0 else None
    text = one.get("token", one.get("tok_str", one.get("content")))
    return _listed(one.get("id", one.get("token_id")), text, value, path)


def _list_of(value: Any, path: str, *, ids: bool = False) -> tuple[Listed, ...]:
    """The numbers of the best tokens: an object of texts (or `ids`), or a list of objects, pairs or triples."""
    found = []
    each: Any
    for place, each in enumerate(value.items() if isinstance(value, dict) else _list(value or [], path)):
        where = f"{path}[{place}]"
        if isinstance(each, dict):
            found.append(_object(each, where))
            continue
        if not isinstance(each, (list, tuple)) or len(each) not in (2, 3):
            raise UnfitShape(where, "a token and its number", each)
        id, *text, number = each
        number = number.get("logprob") if isinstance(number, dict) else number  # vLLM's Logprob
        id = int(id) if ids and isinstance(id, str) and id.isdecimal() else id
        found.append(_listed(id, text[0] if text else id, number, where))
    return tuple(one for one in found if not math.isnan(one[2]))


def _entry(entry: Any, path: str) -> TracePiece:
    """An object of a token: OpenAI's chats, Ollama, llama-server."""
    one = _dict(entry, path)
    tops: Any = next((one[key] for key in ("top_logprobs", "top_probs", "probs") if one.get(key)), [])
    top = _list_of(tops, f"{path}.top_logprobs")
    if "logprob" not in one and "prob" not in one and top:  # llama-server's older form has a list alone
        text = one.get("token", one.get("content"))
        one = {**one, "logprob": next((value for _, other, value in top if other == text), None)}
    return TracePiece(*_object(one, path), top)


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


def prompt_of(data: Mapping[str, Any]) -> dict[str, Any]:
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
        yield {**prompt_of(data), **prompt_of(choice), **row, "text": text if isinstance(text, str) else None}


def _plain_piece(text: Any, value: Any, top: Any, path: str) -> TracePiece:
    return TracePiece(*_listed(None, text, value, path), _list_of(top if isinstance(top, dict) else None, path))


def _llama(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    key = "completion_probabilities" if "completion_probabilities" in data else "probs"
    ids = data.get("tokens") or None
    yield {**prompt_of(data), "pieces": _with_ids(_pieces(data[key], key), ids, "tokens"), "text": data.get("content")}


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
    yield {**prompt_of(data), "pieces": tuple(pieces), "text": data.get("text")}


def _ollama(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    message = data.get("message")
    text = message.get("content") if isinstance(message, dict) else data.get("response")
    pieces = _pieces(data["logprobs"], "logprobs")
    yield {**prompt_of(data), "pieces": pieces, "text": text, "is_chat": message is not None}


def _responses(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for place, item in enumerate(_list(data["output"], "output")):
        for number, part in enumerate(_dict(item, f"output[{place}]").get("content") or ()):
            path = f"output[{place}].content[{number}].logprobs"
            pieces = _pieces(_dict(part, path).get("logprobs"), path)
            yield {**prompt_of(data), "pieces": pieces, "text": part.get("text"), "is_chat": True}


def _record(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    key = "tokens" if "tokens" in data else "scores"
    pieces = []
    for place, one in enumerate(_list(data.get(key), key, "tokens with log-probabilities (--top-logprobs)")):
        path = f"{key}[{place}]"
        one = _dict(one, path)
        top = _list_of(one.get("top"), path)
        pieces.append(TracePiece(*_listed(one.get("id"), one.get("text"), one.get("logprob"), path), top))
    if key == "scores":
        ids = _ids(data.get("token_ids"), "token_ids")
        yield {"prompt_ids": ids[: len(ids) - len(pieces)], "pieces": tuple(pieces), "text": data.get("text")}
    else:
        yield {**prompt_of(data), "pieces": tuple(pieces), "text": data.get("text")}


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
        top = _list_of(top, f"top_logprobs[{place}]", ids=True)
        pieces.append(TracePiece(id, None, _number(value, f"{values_key}[{place}]"), top))
    text = data.get("completion", data.get("response"))
    yield {**prompt_of(data), "pieces": tuple(pieces), "text": text if isinstance(text, str) else None}


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
