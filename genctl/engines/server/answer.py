"""Parse a server's response, or one part of its stream, into the pieces of each sequence or an error."""

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

LONGEST = 200  # most characters of a server's own text in a message
LEAST = -3.5e38  # below the smallest 32-bit float, which servers write for the logarithm of 0
MOST_TOKENS = 2**53  # the largest integer that every JSON reader keeps exact
MOST_ID = 2**31
MOST_CHOICES = 2**16
BAD_SHAPE = (AttributeError, LookupError, TypeError, ValueError)  # raised by reading a response of another shape
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # servers' names of the field for thinking
_LONE = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")

# -- errors ------------------------------------------------------------------------------------------------------------


class ServerError(BackendError):
    """A failed request: the error of its row or, if `fatal` (no other request can succeed), of the run."""

    def __init__(
        self,
        message: str,
        *,
        again: bool = False,  # the same request may succeed later
        wait_s: float | None = None,  # seconds until then, if the server sends them
        fatal: bool = False,
        status: int | None = None,  # of HTTP; None without a response
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.again, self.wait_s, self.fatal, self.status = again, wait_s, fatal, status


class TimedOut(Exception):
    """The time limit of a row has passed."""


class Disconnected(Exception):
    """The caller no longer waits for the response."""


def row_error(server: str, error: BaseException) -> GenctlError:
    """The error of a row: a GenctlError as it is, any other wrapped in a ServerError that names it."""
    if isinstance(error, GenctlError):
        return error
    return ServerError(f"{server}: unexpected {type(error).__name__}: {one_line(str(error))}")


def ends_run(error: GenctlError) -> bool:
    """Whether no other request can succeed."""
    return isinstance(error, BackendError) and (not isinstance(error, ServerError) or error.fatal)


def one_line(text: str, most: int = LONGEST) -> str:
    """The first line of a server's text, without control characters and keys, at most `most` characters."""
    line = re.split(r"[\r\n]", text.strip()[: 4 * most], maxsplit=1)[0]
    line = printable(without_secrets(line))
    return line if len(line) <= most else line[: most - 1] + "…"


def message_of(content: bytes, kind: str) -> str:
    """The message of a failed request, on one short line. `kind` is the content type."""
    try:
        return error_in(json.loads(content))
    except (ValueError, RecursionError):
        return "" if "html" in kind else one_line(content[:4096].decode("utf-8", "replace"))


def error_in(data: Any) -> str:
    """The message of a JSON error; "" if there is none."""
    if not isinstance(data, Mapping):
        return ""
    error = next((data[name] for name in ("error", "detail", "message") if data.get(name)), "")
    if isinstance(error, Mapping):
        error = error.get("message", "")
    return one_line(str(error))


# -- JSON --------------------------------------------------------------------------------------------------------------


def object_of(text: str, what: str = "the answer", instead: str = "") -> dict[str, Any]:
    """The JSON object of a response or of a part of it, called `what` in errors. Raises ServerError for anything else.

    `instead` follows "is not JSON" in the error. Lone surrogates, which no file can hold, become U+FFFD.
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
    stop: str = ""  # the stop string, token id or server's reason
    kind: str = ""  # of `stop`: string, token or server


class AnswerPiece(NamedTuple):
    """The next part of one sequence."""

    choice: int
    tokens: tuple[Token, ...]
    thought: str = ""  # thinking text that the server separates from the answer
    end: Ending | None = None  # None while it continues


class Usage(NamedTuple):
    """Token counts of a whole request with all its sequences. None: not reported by the server."""

    prompt: int | None = None
    new: int | None = None
    thought: int | None = None


def pieces_of(part: Mapping[str, Any], top: int, *, could_stop: bool = False) -> list[AnswerPiece]:
    """The pieces of one part. Impossible numbers count as unknown.

    `could_stop`: stop strings or tokens were set. Raises ServerError if the shape is not that of OpenAI's responses.
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
    """A string; null becomes "". Raises TypeError for anything else."""
    if not isinstance(value, (str, NoneType)):
        raise TypeError
    return value or ""


def _number(value: Any, most: int) -> int | None:
    """An integer from 0 to `most`, else None (also for JSON's true and false)."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else None


def _logprob(value: Any) -> float:
    """A log-probability; NaN if the server has none, or an impossible one."""
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
    return Ending("stop" if could_stop and not named else "eos")  # most servers do not distinguish the two


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
    """The tokens with texts that add up to `text`. Thinking tokens before it get no text.

    If a character is split over several tokens, the last one gets all of the text.
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

    Ids are unknown unless `ids` or the entries have them. Impossible log-probabilities become NaN. Raises
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
    """A token of a server. Its rank is known if it is among the best `top` tokens (at least one)."""
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
