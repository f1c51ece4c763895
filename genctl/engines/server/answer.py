"""What a server's answer, or one part of its stream, holds of each sequence, or which error it is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any, NamedTuple

from genctl.config import reader
from genctl.config.reader import BadJson
from genctl.errors import BackendError, GenctlError, printable, without_secrets
from genctl.events import UNKNOWN_ID, Alternative, Token

LONGEST = 200  # characters of a server's own words in a message
LEAST = -3.5e38  # below the smallest 32-bit float, which servers write for the logarithm of 0
MOST_TOKENS = 2**53  # that every JSON reader keeps
MOST_ID = 2**31
MOST_CHOICES = 2**16
BAD_SHAPE = (AttributeError, LookupError, TypeError, ValueError)  # of reading an answer that has another shape
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # the names that servers have for it
_LONE = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")

# -- errors ------------------------------------------------------------------------------------------------------------


class ServerError(BackendError):
    """A request that failed: the error of its row, or of the run if it is `fatal`: no other request can succeed."""

    def __init__(
        self,
        message: str,
        *,
        again: bool = False,  # the same request may succeed later
        wait_s: float | None = None,  # seconds until then, if the server names them
        fatal: bool = False,
        status: int | None = None,  # of HTTP; None where there was no answer
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.again, self.wait_s, self.fatal, self.status = again, wait_s, fatal, status


class TimedOut(Exception):
    """The time that a row may take is over."""


class Disconnected(Exception):
    """Nobody waits for the answer any more."""


def row_error(server: str, error: BaseException) -> GenctlError:
    """The error of a row: one that is expected, else one that says what was raised."""
    if isinstance(error, GenctlError):
        return error
    return ServerError(f"{server}: unexpected {type(error).__name__}: {one_line(str(error))}")


def ends_run(error: GenctlError) -> bool:
    """Whether no other request can succeed."""
    return isinstance(error, BackendError) and (not isinstance(error, ServerError) or error.fatal)


def one_line(text: str, most: int = LONGEST) -> str:
    """The first line of a text from a server, harmless for a terminal and free of keys."""
    line = re.split(r"[\r\n]", text.strip()[: 4 * most], maxsplit=1)[0]
    line = printable(without_secrets(line))
    return line if len(line) <= most else line[: most - 1] + "…"


def message_of(content: bytes, kind: str) -> str:
    """The message of a failed request, on one short line. `kind` is the type of the content."""
    try:
        return error_in(json.loads(content))
    except (ValueError, RecursionError):
        return "" if "html" in kind else one_line(content[:4096].decode("utf-8", "replace"))


def error_in(data: Any) -> str:
    """The message of a JSON error; "" where there is none."""
    if not isinstance(data, Mapping):
        return ""
    error = next((data[name] for name in ("error", "detail", "message") if data.get(name)), "")
    if isinstance(error, Mapping):
        error = error.get("message", "")
    return one_line(str(error))


# -- JSON --------------------------------------------------------------------------------------------------------------


def object_of(text: str, what: str = "the answer", instead: str = "") -> dict[str, Any]:
    """The JSON object of an answer or of a part of it. Raises ServerError, which calls it `what`, for anything else.

    `instead`: what it is, if it is not JSON. Lone surrogates, which no file can hold, become U+FFFD.
    """
    try:
        value = reader.loads(text.removeprefix("\ufeff"), finite=False)
    except reader.Incomplete:
        raise ServerError(f"{what} is not JSON{instead}", again=True) from None
    except BadJson as error:
        raise ServerError(f"{what}: {error}") from None
    if not isinstance(value, dict):
        raise ServerError(f"{what} is JSON, but no object", again=True)
    whole: dict[str, Any] = value
    if _ESCAPED.search(text):
        whole = json.loads(_LONE.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    return whole


# -- sequences ---------------------------------------------------------------------------------------------------------


class Ending(NamedTuple):
    """Why a sequence ended."""

    reason: str
    stop: str = ""  # what stopped it
    kind: str = ""  # and what that is


class AnswerPiece(NamedTuple):
    """The next part of one sequence."""

    choice: int
    tokens: tuple[Token, ...]
    thought: str = ""  # that the server keeps apart from the answer
    end: Ending | None = None  # None while it continues


class Usage(NamedTuple):
    """Tokens of a whole request, all its sequences together. None: the server does not report it."""

    prompt: int | None = None
    new: int | None = None
    thought: int | None = None


def pieces_of(part: Mapping[str, Any], top: int, *, could_stop: bool = False) -> list[AnswerPiece]:
    """The pieces of one part. Numbers that cannot be true are unknown.

    `could_stop`: stop strings or tokens were set. Raises ServerError for another shape than that of OpenAI's answers.
    """
    try:
        return [_piece(choice, top, could_stop) for choice in part.get("choices") or ()]
    except BAD_SHAPE:
        raise ServerError("the answer has another shape than OpenAI's", again=True) from None


def usage_of(part: Mapping[str, Any]) -> Usage | None:
    """The token counts of a part, if it has any."""
    usage = part.get("usage")
    if not isinstance(usage, Mapping):
        return None
    details = usage.get("completion_tokens_details")
    thought = details.get("reasoning_tokens") if isinstance(details, Mapping) else None
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"), thought)
    return Usage(*(_number(count, MOST_TOKENS) for count in counts))


def _text(value: Any) -> str:
    """A text; null is none. Raises TypeError for anything else."""
    if not isinstance(value, (str, NoneType)):
        raise TypeError
    return value or ""


def _number(value: Any, most: int) -> int | None:
    """An integer from 0 to `most`, else None. JSON's true is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else None


def _logprob(value: Any) -> float:
    """A log-probability; NaN where the server has none, or none that can be true."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and LEAST <= value <= 0 else math.nan


def _ending(choice: Mapping[str, Any], could_stop: bool) -> Ending | None:
    if not (finish := _text(choice.get("finish_reason"))):
        return None
    if finish == "length":
        return Ending("length")
    if finish != "stop":
        return Ending("stop", one_line(finish), "server")
    named = [choice[key] for key in ("stop_reason", "matched_stop") if key in choice]
    if named and isinstance(named[0], str):
        return Ending("stop", named[0], "string")
    if named and (id := _number(named[0], MOST_ID)) is not None:
        return Ending("stop", str(id), "token")
    return Ending("stop" if could_stop and not named else "eos")  # most servers do not distinguish them


def _piece(choice: Mapping[str, Any], top: int, could_stop: bool) -> AnswerPiece:
    """The piece of one choice. Raises BAD_SHAPE."""
    if (index := _number(choice.get("index", 0), MOST_CHOICES)) is None:
        raise ValueError
    message = choice if "text" in choice else choice.get("delta") or choice.get("message") or {}
    text = _text(message.get("text" if message is choice else "content"))
    thought = next((one for name in THOUGHTS if (one := message.get(name)) and isinstance(one, str)), "")
    tokens = tokens_of(choice.get("logprobs"), top, choice.get("token_ids"))
    return AnswerPiece(index, _fitted(tokens, text), thought, _ending(choice, could_stop))


def _fitted(tokens: Sequence[Token], text: str) -> tuple[Token, ...]:
    """The tokens with texts that add up to `text`. Those of a thought before it have none.

    A character may be spread over several tokens: then the last one has all of the text.
    """
    if not tokens:
        return (Token(UNKNOWN_ID, math.nan, text),) if text else ()
    first, length = len(tokens), 0
    while first and length < len(text):
        first -= 1
        length += len(tokens[first].text)
    if "".join(token.text for token in tokens[first:]) != text:
        first, tokens = len(tokens) - 1, [*tokens[:-1], replace(tokens[-1], text=text)]
    return (*(replace(token, text="") for token in tokens[:first]), *tokens[first:])


def tokens_of(logprobs: Any, top: int, ids: Any = None) -> list[Token]:
    """The tokens of either form of log-probabilities; an empty list if there are none.

    Ids are unknown unless `ids` has them, or the tokens themselves. Numbers that cannot be true are NaN. Raises
    BAD_SHAPE.
    """
    if not isinstance(logprobs, Mapping):
        return []
    entries = logprobs.get("content")  # of a chat, and of llama-server
    if entries is None:
        numbers = logprobs.get("token_logprobs") or ()
        tops = logprobs.get("top_logprobs") or [None] * len(numbers)
        lists = ([{"token": text, "logprob": value} for text, value in (one or {}).items()] for one in tops)
        columns = zip(logprobs.get("tokens") or (), numbers, lists, strict=True)
        entries = [{"token": text, "logprob": number, "top_logprobs": best} for text, number, best in columns]
    if not isinstance(ids, list) or len(ids) != len(entries):
        ids = [entry.get("id") for entry in entries]
    return [_token(_number(id, MOST_ID), entry, top) for id, entry in zip(ids, entries, strict=True)]


def _token(id: int | None, entry: Mapping[str, Any], top: int) -> Token:
    """A token of a server. Its rank is known where it is among the best ones that were requested, at least one."""
    text, own = _text(entry["token"]), UNKNOWN_ID if id is None else id
    fields = ((one.get("id"), _text(one["token"]), one.get("logprob")) for one in entry.get("top_logprobs") or ())
    listed = [(_number(other, MOST_ID), name, _logprob(value)) for other, name, value in fields]
    listed = sorted((one for one in listed if not math.isnan(one[2])), key=lambda one: -one[2])
    best, rank = list[Alternative](), None
    for place, (other, name, value) in enumerate(listed[: max(top, 1)], 1):
        is_own = other == id if None not in (other, id) else name == text
        rank = place if is_own and rank is None else rank
        unknown = own if is_own else UNKNOWN_ID - place
        best.append((unknown if other is None else other, name, value))
    return Token(own, _logprob(entry.get("logprob")), text, rank, None, tuple(best[:top]))
