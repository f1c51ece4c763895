"""OpenAI's batch files: rows as requests, and their results as records of this program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from genctl import events
from genctl.config.layers import Resolved
from genctl.documents import reader
from genctl.documents.reader import BadJson, Unreadable
from genctl.engines.server.answer import AnswerPiece, Usage, ending_of, pieces_of, usage_of
from genctl.engines.server.body import known, messages_of, sampling_fields, seed_field, unused_default
from genctl.engines.server.failure import RowFailure, Trouble, one_line
from genctl.engines.server.reading import without_surrogates
from genctl.engines.server.server import logprob_fields
from genctl.errors import InputError
from genctl.io.records import error_record, finite, record
from genctl.io.rows import InputRow

# -- OpenAI's batch files: rows as requests, one JSON object on each line ----------------------------------------------


Kind: TypeAlias = Literal["openai", "vllm", "sglang"]
MOST = 50_000  # requests that OpenAI takes in one file


def checked(resolved: Resolved, kind: Kind) -> tuple[list[str], str]:
    """Why settings cannot be said in a request, and a note on a default that is not said; "" if there is none."""
    chat = is_chat(None, resolved)
    fields = known(kind, chat=chat)
    return sampling_fields(resolved, fields, chat=chat, kind=kind)[1], unused_default(resolved, fields)


def is_chat(row: InputRow | None, resolved: Resolved) -> bool:
    """Whether a row is sent as a chat."""
    return resolved.runtime.is_chat or (row is not None and row.messages is not None)


def request_line(row: InputRow, resolved: Resolved, seed: int, kind: Kind, top: int | None) -> dict[str, Any]:
    """One line of a batch file. `top`: alternatives of each token; None asks for no log-probabilities.

    Raises RowFailure for settings that no request can say, and InputError for token ids in a chat.
    """
    chat = is_chat(row, resolved)
    fields = known(kind, chat=chat)
    chosen, problems = sampling_fields(resolved, fields, chat=chat, kind=kind)
    if problems:
        raise RowFailure("; ".join(problems))
    body: dict[str, Any] = {"model": resolved.runtime.model}
    if not chat:
        body["prompt"] = row.prompt if row.prompt_ids is None else list(row.prompt_ids)
    elif row.prompt_ids is not None:
        raise InputError("token ids cannot be sent as a chat: the server makes the ids of its own template")
    else:
        body["messages"] = messages_of(row.prompt, row.messages, resolved.runtime.system)
    body |= {**chosen, **seed_field(seed, fields, resolved.generation)}
    if resolved.generation.num_return_sequences > 1:
        body["n"] = resolved.generation.num_return_sequences
    if top is not None:
        body |= logprob_fields(top, chat=chat)
    url = "/v1/chat/completions" if chat else "/v1/completions"
    return {"custom_id": row.id, "method": "POST", "url": url, "body": body}


BACKEND = "openai:batch"  # what records name in place of a server
Line = Mapping[str, Any]


@dataclass(frozen=True)
class BatchLine:
    """One line of a file. `where` is its place, for messages."""

    id: str
    data: Line
    where: str


def read_lines(name: str) -> Iterator[BatchLine]:
    """The lines of a file of requests or results. Raises InputError for what is none, naming the line."""
    try:
        for number, line in enumerate(reader.lines(name), 1):
            if not line.strip():
                continue
            where = f"{name}, line {number}"
            try:
                data = without_surrogates(reader.loads(line, finite=False))
            except BadJson as error:
                raise InputError(f"{where}: {error}") from None
            id = data.get("custom_id") if isinstance(data, dict) else None
            if not isinstance(id, str):
                raise InputError(f"{where}: no line of a batch file: it has no custom_id")
            yield BatchLine(id, data, where)
    except Unreadable as error:
        raise InputError(f"cannot read {name}: {error}") from None


def by_id(names: Sequence[str]) -> dict[str, BatchLine]:
    """The lines of several files. Raises InputError where two have the same custom_id."""
    lines: dict[str, BatchLine] = {}
    for name in names:
        for line in read_lines(name):
            if line.id in lines:
                raise InputError(f"{line.where}: the custom_id {line.id} was used before, at {lines[line.id].where}")
            lines[line.id] = line
    return lines


def imported(
    results: Sequence[str], requests: str | None, say: Callable[[str], object] = lambda line: None
) -> Iterator[list[dict[str, Any]]]:
    """The records of each request, in the order of `requests`, or else of the results.

    `say` reports results that are not as they should be, a line for each kind of them. A request without a result gives
    an error record. Raises InputError for files that do not fit together.
    """
    found = by_id(results)
    asked = {} if requests is None else by_id([requests])
    if requests is not None:
        for id, line in found.items():
            if id not in asked:
                raise InputError(f"{line.where}: the custom_id {id} is not in {requests}")
    reported: set[str] = set()
    for id in asked or found:
        body = asked[id].data.get("body") if id in asked else None
        if id not in found:
            yield [error_record(id, RowFailure.code, "the results have no line for this request")]
            continue
        doubts: set[str] = set()
        try:
            records = _records(id, found[id], body if isinstance(body, Mapping) else None, doubts)
        except Exception as error:  # whatever a result holds may cost its row, never the others
            message = f"the result cannot be read: unexpected {type(error).__name__}: {one_line(str(error))}"
            records = [error_record(id, RowFailure.code, message)]
        for doubt in sorted(doubts - reported):
            say(f"{found[id].where}: {doubt}")
        reported |= doubts
        yield records


def add_columns(records: Iterable[list[dict[str, Any]]], columns: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Put the columns of rows, by their ids, into the records of requests. Raises InputError for one without a row."""
    for each in records:
        if (id := each[0]["id"]) not in columns:
            raise InputError(f"{name} has no row with the id {id}")
        for one in each if columns[id] else ():
            one["input"] = finite(columns[id])


def _records(id: str, line: BatchLine, asked: Line | None, doubts: set[str]) -> list[dict[str, Any]]:
    response, error = line.data.get("response"), line.data.get("error")
    body = response.get("body") if isinstance(response, Mapping) else None
    status = response.get("status_code") if isinstance(response, Mapping) else None
    if error or status != 200 or not isinstance(body, Mapping):
        return [error_record(id, RowFailure.code, _why(error, status, body))]
    try:
        pieces = sorted(pieces_of(body, _top(asked), doubts), key=lambda piece: piece.choice)
        if not pieces:
            raise Trouble("the result has no choices")
    except Trouble as trouble:
        return [error_record(id, RowFailure.code, trouble.message)]
    usage = usage_of(body, doubts)
    new = usage.new if usage is not None and len(pieces) == 1 else None
    if _is_too_long(asked, pieces, usage):
        doubts.add("the text has more tokens than were asked for")
    prompt_tokens = None if usage is None else usage.prompt
    return [_record(id, piece, one_line(str(body.get("model", ""))), prompt_tokens, new, asked) for piece in pieces]


def _is_too_long(asked: Line | None, pieces: Sequence[AnswerPiece], usage: Usage | None) -> bool:
    """Whether a result has more tokens than its request allows."""
    limits = [(asked or {}).get(name) for name in ("max_tokens", "max_completion_tokens")]
    most = next((one for one in limits if isinstance(one, int)), None)
    if most is None:
        return False
    counted = max((len(piece.tokens) for piece in pieces if piece.counted), default=0)
    return counted > most or (usage is not None and (usage.new or 0) > most * len(pieces))


def _record(
    id: str, piece: AnswerPiece, model: str, prompt_tokens: int | None, new: int | None, asked: Line | None
) -> dict[str, Any]:
    stops = asked is None or "stop" in asked or "stop_token_ids" in asked
    reason, stop, kind = ending_of(piece, could_stop=stops)
    total = math.fsum(token.logprob for token in piece.tokens)
    told = any(token.logprob == token.logprob for token in piece.tokens)
    length = new if new is not None else len(piece.tokens) if told else 0  # 0: nobody counts them
    text = "".join(token.text for token in piece.tokens)
    score = total / max(length, 1)
    hypothesis = events.Hypothesis((), total, total, reason, score, piece.choice, stop, text, kind, counted=length)
    drawn = asked is not None and bool(asked.get("temperature", 1.0))
    fields = record(
        InputRow(id, 0),
        piece.choice,
        hypothesis,
        prompt_text=_prompt(asked),
        model=model,
        strategy="" if asked is None else "sample" if drawn else "greedy",
        seed=0,
        prompt_tokens=prompt_tokens,
        tokens=piece.tokens if told else None,
        extra={"backend": BACKEND, "exact": False},
    )
    seed = None if asked is None else asked.get("seed")
    unknown = {} if asked is not None else {"prompt": None, "strategy": None}
    return {**fields, "seed": seed, **unknown}


def _top(asked: Line | None) -> int:
    """Alternatives that were asked for."""
    wanted = (asked or {}).get("top_logprobs", (asked or {}).get("logprobs"))
    return wanted if isinstance(wanted, int) and not isinstance(wanted, bool) else 20 if asked is None else 0


def _prompt(asked: Line | None) -> str:
    """The prompt of a request: as `genctl run` shows it."""
    if asked is None:
        return ""
    prompt = asked.get("prompt")
    if isinstance(prompt, str):
        return prompt
    messages = asked.get("messages")
    said = [message for message in messages if isinstance(message, Mapping)] if isinstance(messages, list) else []
    return "\n".join(str(message.get("content", "")) for message in said if message.get("role") != "system")


def _why(error: Any, status: Any, body: Any) -> str:
    """Why a request failed."""
    for said in (error, body.get("error") if isinstance(body, Mapping) else None):
        if isinstance(said, Mapping) and said.get("message"):
            words = one_line(str(said["message"]))
            return words if status in (None, 200) else f"{one_line(str(status))} {words}"
        if isinstance(said, str) and said:
            return one_line(said)
    return f"the answer has status {one_line(str(status))}" if status not in (None, 200) else "the result has no answer"
