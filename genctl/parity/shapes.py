"""The shapes in which servers, trainers and programs write tokens with their numbers.

A shape is a TypedDict, which `genctl.config.shapes` checks, and a function that makes rows of it. A document of no
shape is refused with the first path that does not fit. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypedDict

from genctl.config.reader import kind_of
from genctl.config.shapes import BadShape, Natural, Written, value_of
from genctl.errors import InputError, printable
from genctl.parity.trace_rows import (
    PROMPT_IDS,
    Count,
    Entry,
    Number,
    TraceRow,
    Word,
    best_of,
    fit,
    piece,
    piece_of,
    prompt_of,
    same_length,
    with_ids,
)

Row: TypeAlias = dict[str, Any]  # fields of a TraceRow


class WrittenMessage(TypedDict, total=False):
    """A message, or what a chunk adds to it."""

    content: Any  # a text, parts or null


class Logprobs(TypedDict, total=False):
    """Of a choice: `content` is of chats, all else of completions."""

    content: list[Entry] | None
    tokens: list[str] | None
    token_logprobs: list[Number] | None
    top_logprobs: list[dict[str, Number] | None] | None


class WrittenChoice(TypedDict, total=False):
    """A completion, or what a chunk adds to it."""

    index: Count
    text: Word
    message: WrittenMessage | None
    delta: WrittenMessage | None
    logprobs: Logprobs | None
    token_ids: list[Natural] | None


class OpenAI(TypedDict):
    """A completion or chat completion, or a chunk of one."""

    choices: list[WrittenChoice]


def _openai(data: OpenAI) -> Iterator[Row]:
    whole = prompt_of(data)
    for place, choice in enumerate(data["choices"]):
        path = f"choices.{place}.logprobs"
        logprobs: Logprobs = fit(Logprobs, choice.get("logprobs"), path)
        if (content := logprobs.get("content")) is not None:
            pieces = tuple(map(piece_of, content))
        else:
            texts = fit(list[str], logprobs.get("tokens"), f"{path}.tokens")
            values = fit(list[Number], logprobs.get("token_logprobs"), f"{path}.token_logprobs")
            tops = logprobs.get("top_logprobs") or [None] * len(texts)
            same_length(f"{path}.token_logprobs", values, texts)
            same_length(f"{path}.top_logprobs", tops, texts)
            pieces = tuple(
                piece(None, text, value, (piece(None, *pair) for pair in (top or {}).items()))
                for text, value, top in zip(texts, values, tops, strict=True)
            )
        text = choice.get("text", (choice.get("message") or choice.get("delta") or {}).get("content"))
        yield {
            **whole,
            **prompt_of(choice),
            "pieces": with_ids(pieces, choice.get("token_ids"), f"choices.{place}.token_ids"),
            "text": text if isinstance(text, str) else None,
            "is_chat": "text" not in choice,
        }


class Llama(TypedDict, total=False):
    """llama-server's own answer, or an event of it."""

    completion_probabilities: list[Entry] | None
    probs: list[Entry] | None
    tokens: list[Natural] | None
    content: Word
    tokens_evaluated: Count


def _llama(data: Llama) -> Iterator[Row]:
    pieces = [*map(piece_of, data.get("completion_probabilities") or data.get("probs") or ())]
    yield {
        **prompt_of(data),
        "prompt_tokens": data.get("tokens_evaluated"),
        "pieces": with_ids(pieces, data.get("tokens"), "tokens"),
        "text": data.get("content"),
    }


Place: TypeAlias = tuple[Number, Count, Word]


class Meta(TypedDict, total=False):
    """SGLang's numbers: of each token the number, the id and the text."""

    output_token_logprobs: list[Place]
    output_top_logprobs: list[list[Place] | None] | None


class SGLang(TypedDict, total=False):
    """An answer of SGLang's own interface, or an event of it."""

    meta_info: Meta
    text: Word


def _sglang(data: SGLang) -> Iterator[Row]:
    path = "meta_info.output_token_logprobs"
    chosen = fit(list[Place], data["meta_info"].get("output_token_logprobs"), path)
    tops = data["meta_info"].get("output_top_logprobs") or [None] * len(chosen)
    same_length("meta_info.output_top_logprobs", tops, chosen)
    pieces = tuple(
        piece(id, text, value, (piece(id, text, value) for value, id, text in top or ()))
        for (value, id, text), top in zip(chosen, tops, strict=True)
    )
    yield {**prompt_of(data), "pieces": pieces, "text": data.get("text")}


class Ollama(TypedDict, total=False):
    """An answer of Ollama's own interface, or an event of it: of a chat it has a message."""

    logprobs: list[Entry] | None
    message: WrittenMessage | None
    response: Word


def _ollama(data: Ollama) -> Iterator[Row]:
    message = data.get("message")
    text = data.get("response") if message is None else message.get("content")
    yield {
        **prompt_of(data),
        "pieces": tuple(map(piece_of, data.get("logprobs") or ())),
        "text": text if isinstance(text, str) else None,
        "is_chat": message is not None,
    }


class MessagePart(TypedDict, total=False):
    """A part of a message."""

    logprobs: list[Entry]
    text: Word


class Item(TypedDict, total=False):
    """An item of an answer; a message has content."""

    content: list[MessagePart] | None


class Responses(TypedDict):
    """An answer of OpenAI's interface of responses."""

    output: list[Item]


def _responses(data: Responses) -> Iterator[Row]:
    for part in (part for item in data["output"] for part in item.get("content") or ()):
        pieces = tuple(map(piece_of, fit(list[Entry], part.get("logprobs"), "output.content.logprobs")))
        yield {**prompt_of(data), "pieces": pieces, "text": part.get("text"), "is_chat": True}


class RecordToken(TypedDict, total=False):
    """A token of a record."""

    id: Count
    text: Word
    logprob: Number
    top: list[tuple[Count, Word, Number]] | None


class TokenCounts(TypedDict, total=False):
    """What was counted."""

    prompt_tokens: Count


class Record(TypedDict, total=False):
    """A record of genctl. Of `score`, `token_ids` has the whole text, and `tokens` is how many tokens were scored."""

    tokens: Any
    scores: list[RecordToken] | None
    token_ids: list[Natural] | None
    sequence: Natural
    usage: TokenCounts | None
    model: Word
    backend: Word
    text: Word


class NoLogprobs(BadShape):
    """What genctl wrote, without log-probabilities."""


def _record(data: Record) -> Iterator[Row]:
    scores = data.get("scores")
    if (tokens := scores or data.get("tokens")) is None or isinstance(tokens, int):
        raise NoLogprobs("the record has no log-probabilities of its tokens")
    pieces = [
        piece(one.get("id"), one.get("text"), one.get("logprob"), (piece(*top) for top in one.get("top") or ()))
        for one in fit(list[RecordToken], tokens, "tokens")
    ]
    own = {"pieces": tuple(pieces), "text": data.get("text"), "sequence": data.get("sequence", 0)}
    own["model"] = "" if data.get("backend") else data.get("model") or ""
    if scores is None:
        counted = (data.get("usage") or {}).get("prompt_tokens")
        yield {**prompt_of(data), **own, "prompt_tokens": counted, "is_exact": not data.get("backend")}
    else:
        ids = data.get("token_ids") or []
        if len(ids) < len(pieces):
            raise BadShape(f"token_ids: expected at least {len(pieces)} items, got {len(ids)}")
        yield {**own, "prompt_ids": tuple(ids[: len(ids) - len(pieces)])}


class Harness(TypedDict):
    """A sample of lm-evaluation-harness."""

    arguments: Any
    resps: list[Any]


def _harness(data: Harness) -> Iterator[Row]:
    given = data["arguments"]
    requests = [*given.values()] if isinstance(given, dict) else fit(list[Any], given, "arguments")
    for place, (request, answer) in enumerate(zip(requests, data["resps"], strict=False)):
        path = f"arguments.{place}"
        words = fit(list[str], [*request.values()][:2] if isinstance(request, dict) else request, path)
        if len(words) < 2:
            raise BadShape(f"{path}: expected a context and a continuation")
        while isinstance(answer, list) and answer:
            answer = answer[0]
        try:
            total = float(answer) if isinstance(answer, str) else fit(Written, answer, f"resps.{place}")
        except ValueError:
            raise BadShape(f"resps.{place}: expected the log-likelihood of a continuation") from None
        yield {"prompt": words[0], "pieces": (), "text": words[1], "total": total}


COMPLETION_IDS = (
    "completion_ids", "response_ids", "completion_token_ids", "response_token_ids", "output_ids", "output_token_ids",
    "token_ids", "responses",
)  # fmt: skip
LOGPROBS = (
    "logprobs", "completion_logprobs", "response_logprobs", "rollout_log_probs", "rollout_logprobs", "old_log_probs",
    "sampling_logprobs", "log_probs", "token_logprobs", "output_logprobs",
)  # fmt: skip


def _trainer(data: Row) -> Iterator[Row]:
    ids_key = next((key for key in COMPLETION_IDS if isinstance(data.get(key), list)), "completion_ids")
    values_key = next((key for key in LOGPROBS if isinstance(data.get(key), list)), "logprobs")
    ids, values = (fit(list[Any], data.get(key), key) for key in (ids_key, values_key))
    if len(ids) == len(values) == 1 and isinstance(ids[0], list):  # a batch of one
        ids, values = ids[0], fit(list[Any], values[0], values_key)
    ids = fit(list[Natural], ids, ids_key)
    values = [one[0] if isinstance(one, list) and len(one) == 1 else one for one in values]
    values = fit(list[Number], values, values_key)
    tops = fit(list[Any], data.get("top_logprobs") or [None] * len(ids), "top_logprobs")
    same_length(values_key, values, ids)
    same_length("top_logprobs", tops, ids)
    pieces = tuple(
        piece(id, None, value, best_of(top, f"top_logprobs.{place}"))
        for place, (id, value, top) in enumerate(zip(ids, values, tops, strict=True))
    )
    text = data.get("completion", data.get("response"))
    yield {**prompt_of(data), "pieces": pieces, "text": text if isinstance(text, str) else None}


class Shape(NamedTuple):
    """How a document is recognised, what it has to be, and the rows that it has."""

    fits: Callable[[Row], bool]
    hint: Any
    rows: Callable[[Any], Iterator[Row]]


def _first_has(data: Row, key: str, inner: str = "") -> bool:
    """Whether there is a list of objects, and one of these has a part."""
    found = data.get(key)
    objects = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return any(inner in one for one in objects) if inner else bool(objects)


TRAINER = Shape(lambda data: any(key in data for key in (*COMPLETION_IDS, *LOGPROBS)), dict[str, Any], _trainer)
SHAPES = (
    Shape(lambda data: "choices" in data, OpenAI, _openai),
    Shape(lambda data: "completion_probabilities" in data or ("probs" in data and "content" in data), Llama, _llama),
    Shape(lambda data: "meta_info" in data, SGLang, _sglang),
    Shape(lambda data: data.get("schema") == "genctl/1", Record, _record),
    Shape(lambda data: "resps" in data and "arguments" in data, Harness, _harness),
    Shape(lambda data: _first_has(data, "output", "content"), Responses, _responses),
    Shape(lambda data: _first_has(data, "logprobs"), Ollama, _ollama),
    TRAINER,
)
FITTING = (
    "fits: OpenAI's completions and chats with logprobs (batch files and streams, too), vLLM, SGLang, llama-server, "
    "Ollama, LM Studio; prompt_ids, completion_ids and logprobs (--field names them); genctl's records with --scores "
    "or --top-logprobs; samples of lm-evaluation-harness"
)
WRITING = "genctl writes them with --scores (or --top-logprobs K, with alternatives): record the run once more with it"

# -- documents ---------------------------------------------------------------------------------------------------------

OF_PROMPTS = ("prompt", "prompt_ids", "messages")
FIELDS = ("id", *OF_PROMPTS, "completion", "completion_ids", "logprobs", "top_logprobs")


def id_of(data: Mapping[str, Any]) -> str | None:
    """The id of a row or of a request; None if it has none. Raises BadShape."""
    key = next((key for key in ("custom_id", "id") if data.get(key) is not None), None)
    if key is not None and (isinstance(data[key], bool) or not isinstance(data[key], (str, int))):
        raise BadShape(f"{key}: expected a string or an integer, got {kind_of(data[key])}")
    return None if key is None else str(data[key])


def body_of(data: Row) -> Row:
    """The request or the answer in a line of a batch file; else the line."""
    found = (part.get("body") for part in (data.get("response"), data) if isinstance(part, dict))
    return next((body for body in found if isinstance(body, dict)), data)


def _at(data: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(data, list) and part.isdecimal() and len(part) < 9:
            data = next(iter(data[int(part) :][:1]), None)
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data


def rows_of(data: Any, where: str, id: str, fields: Mapping[str, str] = {}) -> list[TraceRow]:
    """The rows of one JSON value. Raises InputError with the first path that does not fit. `fields`: of --field."""
    try:
        data = fit(Row, data, "the row")
        if isinstance(data.get("error"), dict) and "choices" not in data:
            raise BadShape("error: expected an answer, got an object")
        body = body_of(data)
        named = {name: _at(body if _at(data, path) is None else data, path) for name, path in fields.items()}
        if missing := next((name for name, value in named.items() if value is None), None):
            raise BadShape(f"{fields[missing]}: expected {missing}, as --field says, got null")
        own = id_of({"id": named.pop("id")} if "id" in named else data)
        if not named.keys().isdisjoint(OF_PROMPTS):
            body = {key: value for key, value in body.items() if key not in (*OF_PROMPTS, *PROMPT_IDS, "input")}
        # what is named of a completion is that of a trainer
        shapes = (shape for shape in SHAPES if shape.fits(body)) if named.keys() <= {*OF_PROMPTS} else iter([TRAINER])
        if (shape := next(shapes, None)) is None:
            if "event" in body and "lane" in body:  # of --events
                raise NoLogprobs("an event of a run, in place of its record with log-probabilities")
            keys = ", ".join(printable(key[:40]) for key in [*body][:8]) or "nothing"
            raise BadShape(f"no numbers of tokens: it has {keys}")
        rows = [*shape.rows(value_of(shape.hint, {**body, **named}))]
    except BadShape as error:
        raise InputError(f"{where}: {error}", hint=WRITING if isinstance(error, NoLogprobs) else FITTING) from None
    given = {"id": id if own is None else own, "own_id": own is not None}
    return [TraceRow(**{**given, "sequence": place, **row}) for place, row in enumerate(rows)]
