"""Logs of engines, as values: completions with their tokens, numbers and prompts. Imports no torch."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypedDict

from genctl.config.shapes import BadShape, Natural, Written, value_of


class TracePiece(NamedTuple):
    """A token as an engine wrote it, chosen or listed. A chosen one may have a list of the most probable tokens.

    Its number is None if it is missing, and may be NaN or infinite.
    """

    id: int | None
    text: str | None
    number: float | None
    top: tuple[TracePiece, ...] = ()


@dataclass(frozen=True)
class TraceRow:
    """A completion with its numbers."""

    id: str  # of the request
    pieces: tuple[TracePiece, ...]
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    text: str | None = None
    is_chat: bool = False
    own_id: bool = True
    sequence: int = 0  # among the completions of the request
    prompt_tokens: int | None = None  # of `prompt`, as the engine counted them, if it reports both
    is_exact: bool = False  # the engine is genctl, which reads `prompt` just as the tokenizer does
    model: str = ""  # from a record of genctl
    request: int = 0  # the row's place in the file: among the requests, and among all rows
    place: int = 0

    @property
    def name(self) -> str:
        """Its id, with its number among the completions of a request."""
        return f"{self.id}.{self.sequence}" if self.sequence else self.id


Number: TypeAlias = Written | None
Count: TypeAlias = Natural | None
Word: TypeAlias = str | None


def fit(hint: Any, value: Any, path: str) -> Any:
    """The value at a path, checked against the type `hint`. Raises BadShape."""
    return value_of(dict[str, hint], {path: value})[path]


# -- tokens ------------------------------------------------------------------------------------------------------------

_AS_ID = re.compile(r"token_id:(\d{1,9})")  # vLLM with return_tokens_as_token_ids


class WrittenToken(TypedDict, total=False):
    """A token of OpenAI's chats, Ollama, llama-server (which has `prob` after its sampler), vLLM's `Logprob`."""

    id: Count
    token_id: Count
    token: Word
    logprob: Number
    prob: Number


class Entry(WrittenToken, total=False):
    """A chosen token, with the most probable ones."""

    top_logprobs: list[WrittenToken] | None
    top_probs: list[WrittenToken] | None


def piece(id: int | None, text: str | None, number: float | None, top: Iterable[TracePiece] = ()) -> TracePiece:
    """A token; its text may be an id (`token_id:N`)."""
    match = None if text is None else _AS_ID.fullmatch(text)
    return TracePiece(*((id, text) if match is None else (int(match[1]), None)), number, tuple(top))


def piece_of(one: WrittenToken, top: Iterable[TracePiece] = ()) -> TracePiece:
    """A token as servers write it."""
    number, share = one.get("logprob"), one.get("prob")
    if number is None and share is not None:
        number = math.log(share) if share > 0 else -math.inf if share == 0 else math.nan
    id = one.get("token_id") if one.get("id") is None else one["id"]
    return piece(id, one.get("token"), number, top)


Best: TypeAlias = Sequence[tuple[int | None, str | None, float | None]]


def pieces_of(
    path: str, ids: Sequence[int | None] | None, texts: Sequence[str | None] | None,
    values: Sequence[float | None], tops: Sequence[Best],
) -> tuple[TracePiece, ...]:  # fmt: skip
    """The tokens of parallel lists, some of which may be missing; the numbers are at `path`.

    `tops` has the most probable tokens of each, or nothing. Raises BadShape for lists of different lengths.
    """
    count = len((texts or ()) if ids is None else ids)
    for name, column in ((path, values), ("top_logprobs", tops or values)):
        if len(column) != count:
            raise BadShape(f"{name}: expected {count} items, one for each token, got {len(column)}")
    columns = zip(ids or [None] * count, texts or [None] * count, values, tops or [()] * count, strict=True)
    return tuple(piece(id, text, value, itertools.starmap(piece, top)) for id, text, value, top in columns)


def best_of(tops: Any, path: str) -> list[tuple[int | None, str | None, float | None]]:
    """A trainer's most probable tokens: an object by id, or a list of objects, pairs or triples. Raises BadShape."""
    if isinstance(tops, dict):
        are_ids = all(key.isdecimal() and len(key) < 19 for key in tops)
        tops = [[int(key) if are_ids else key, number] for key, number in tops.items()]
    found: list[Any] = []
    for place, each in enumerate(fit(list[Any] | None, tops, path) or ()):
        if isinstance(each, dict):
            found.append(piece_of(fit(WrittenToken, each, f"{path}.{place}"))[:3])
        elif isinstance(each, list) and len(each) in (2, 3):
            id, text, number = each if len(each) == 3 else (each[0], None, each[1])
            id, text = (None, id) if isinstance(id, str) else (id, text)
            found.append((id, text, number.get("logprob") if isinstance(number, dict) else number))  # vLLM's Logprob
        else:
            raise BadShape(f"{path}.{place}: expected a token and its number")
    return list(fit(list[tuple[Count, Word, Number]], found, path))


def with_ids(pieces: Sequence[TracePiece], ids: Sequence[int] | None, path: str) -> tuple[TracePiece, ...]:
    """Pieces with the ids of all tokens; a token without a piece has no number. Raises BadShape.

    llama-server leaves out tokens that end within a character.
    """
    if not ids or not pieces:
        return tuple(pieces)
    if any(piece.id is None for piece in pieces):
        if len(ids) < len(pieces):
            raise BadShape(f"{path}: expected {len(pieces)} items, one for each number, got {len(ids)}")
        return tuple(piece._replace(id=id) for piece, id in zip(pieces, ids, strict=False))
    found, at = [], 0
    for id in ids:
        is_listed = at < len(pieces) and pieces[at].id == id
        found.append(pieces[at] if is_listed else TracePiece(id, None, None))
        at += is_listed
    if at < len(pieces):
        raise BadShape(f"{path}: expected the ids of all tokens, but {pieces[at].id} is not at its place")
    return tuple(found)


# -- prompts -----------------------------------------------------------------------------------------------------------

PROMPT_IDS = ("prompt_ids", "prompt_token_ids", "input_ids", "context_ids")


class TemplateSettings(TypedDict, total=False):
    """The chat template settings of a request, or of a row of genctl."""

    chat: bool
    system: str
    tools: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any]
    enable_thinking: bool
    chat_template: str


def prompt_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a TraceRow for the prompt, as far as a document has them. Raises BadShape."""
    prompt, messages = data.get("prompt"), data.get("messages")
    key = next((key for key in PROMPT_IDS if data.get(key) is not None), "prompt")
    ids = None if key == "prompt" else data[key]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):  # a batch of one
        prompt = prompt[0]
    if isinstance(prompt, list):
        are_messages = bool(prompt) and isinstance(prompt[0], dict)
        ids = prompt if ids is None and not are_messages else ids
        messages, prompt = prompt if messages is None and are_messages else messages, None
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    found: dict[str, Any] = {}
    if ids is not None:
        found["prompt_ids"] = tuple(fit(list[Natural], ids, key))
    if messages is not None:
        found["messages"] = tuple(fit(list[dict[str, Any]], messages, "messages"))
    if prompt := fit(Word, prompt, "prompt"):
        found["prompt"] = prompt
    own = {**data, **params} if isinstance(params := data.get("params"), dict) else data
    settings = {name: own[name] for name in TemplateSettings.__annotations__ if own.get(name) is not None}
    return {**found, "settings": value_of(TemplateSettings, settings)} if settings else found
