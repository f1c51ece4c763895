"""What a server's answer, or one part of its stream, says of each sequence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genctl.engines.server.failure import MALFORMED, Trouble, one_line
from genctl.errors import InputError
from genctl.events import UNKNOWN_ID, Alternative, Token

LEAST = -3.5e38  # below the smallest 32-bit float, which servers write for the logarithm of 0
MOST_TOKENS = 2**53  # that every JSON reader keeps
NO_LOGPROB = "a log-probability that is not a number up to 0 counts as unknown"
NO_COUNT = "a number of tokens that is not a whole number from 0 counts as unknown"
NO_ID = "a token id that is not a whole number from 0 counts as unknown"


@dataclass(frozen=True)
class AnswerPiece:
    """The next part of one sequence. `finish` is why it ended, as the server says it; None while it goes on."""

    choice: int
    tokens: tuple[Token, ...]
    finish: str | None = None
    stop: str | int | None = None  # the stop string or token that ended it
    tells_stop: bool = False  # the server says what stopped a sequence
    counted: bool = False  # `tokens` are the tokens of the server, not pieces of text


@dataclass(frozen=True)
class Usage:
    """Tokens of a whole request, all its sequences together. None: the server does not say."""

    prompt: int | None = None
    new: int | None = None


def pieces_of(part: Mapping[str, Any], top: int, doubts: set[str]) -> list[AnswerPiece]:
    """The pieces of one part. Numbers that cannot be true are unknown, and `doubts` says so.

    Raises Trouble where it is not made as OpenAI's are.
    """
    choices = part.get("choices")
    if not isinstance(choices, list) and choices is not None:
        raise Trouble("the answer has no list of choices", again=True)
    try:
        return [_piece(choice, top, doubts) for choice in choices or ()]
    except MALFORMED:
        raise Trouble("the answer is not made as OpenAI's interface makes it", again=True) from None


def usage_of(part: Mapping[str, Any], doubts: set[str]) -> Usage | None:
    """The token counts of a part, if it has any."""
    usage = part.get("usage")
    if not isinstance(usage, Mapping):
        return None
    return Usage(_count(usage.get("prompt_tokens"), doubts), _count(usage.get("completion_tokens"), doubts))


def _count(value: Any, doubts: set[str]) -> int | None:
    if value is None or _is_whole(value, MOST_TOKENS):
        return None if value is None else int(value)
    doubts.add(NO_COUNT)
    return None


def _is_whole(value: Any, most: int) -> bool:
    """Whether a value is an integer from 0 to `most`. JSON's true is none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _logprob(value: Any, doubts: set[str]) -> float:
    """A log-probability; NaN where the server has none, or none that can be true."""
    if value is None:
        return math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool) and LEAST <= value <= 0:
        return float(value)
    doubts.add(NO_LOGPROB)
    return math.nan


def _ids(values: Any, doubts: set[str]) -> list[int]:
    """Token ids; an empty list where one of them is none."""
    if not isinstance(values, list) or all(_is_whole(value, 2**31) for value in values):
        return values if isinstance(values, list) else []
    doubts.add(NO_ID)
    return []


def ending_of(piece: AnswerPiece, *, could_stop: bool) -> tuple[str, str, str]:
    """Why a sequence ended: the reason, what stopped it, and what kind of thing that is.

    `could_stop`: stop strings or tokens were asked for. Most servers do not tell them from EOS.
    """
    if piece.finish == "length":
        return "length", "", ""
    if piece.finish != "stop":
        return "stop", one_line(str(piece.finish)), "server"
    if isinstance(piece.stop, str):
        return "stop", piece.stop, "string"
    if piece.stop is not None:
        return "stop", str(piece.stop), "token"
    return ("stop" if could_stop and not piece.tells_stop else "eos"), "", ""


def _piece(choice: Mapping[str, Any], top: int, doubts: set[str]) -> AnswerPiece:
    """The piece of one choice. Raises one of MALFORMED."""
    index = choice.get("index", 0)
    if "text" in choice:
        text = choice["text"] or ""
    else:
        said = choice.get("delta", choice.get("message"))
        text = (said or {}).get("content") or ""
    finish = choice.get("finish_reason") or None
    if not isinstance(text, str) or not _is_whole(index, 1 << 16) or not isinstance(finish, str | None):
        raise ValueError
    told = tokens_of(choice.get("logprobs"), top, doubts)
    ids = _ids(choice.get("token_ids"), doubts)
    if ids and len(ids) == len(told):
        told = [_with_id(token, id) for token, id in zip(told, ids, strict=True)]
    elif ids and not told:
        told = [Token(id, math.nan) for id in ids]
    stops = [key for key in ("stop_reason", "matched_stop") if key in choice]
    stop = choice[stops[0]] if stops else None
    known = isinstance(stop, str) or _is_whole(stop, 2**31)
    return AnswerPiece(index, _fitted(told, text), finish, stop if known else None, bool(stops), bool(told))


def _fitted(told: Sequence[Token], text: str) -> tuple[Token, ...]:
    """The tokens with texts that add up to `text`: a character may be spread over several tokens."""
    if not told:
        return (Token(UNKNOWN_ID, math.nan, text),) if text else ()
    if "".join(token.text for token in told) == text:
        return tuple(told)
    bare = [_with_text(token, "") for token in told]
    return (*bare[:-1], _with_text(told[-1], text))


def tokens_of(logprobs: Any, top: int, doubts: set[str]) -> list[Token]:
    """The tokens of either form of log-probabilities; an empty list if there are none. Ids are unknown.

    Numbers that cannot be true are NaN, and `doubts` says so. Raises one of MALFORMED.
    """
    if not isinstance(logprobs, Mapping):
        return []
    if isinstance(logprobs.get("content"), list):  # of a chat
        return [
            _token(
                entry["token"],
                entry.get("logprob"),
                [(one["token"], one.get("logprob")) for one in entry.get("top_logprobs") or ()],
                top,
                doubts,
            )
            for entry in logprobs["content"]
        ]
    texts = logprobs.get("tokens") or []
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    return [
        _token(text, logprob, (alternatives or {}).items(), top, doubts)
        for text, logprob, alternatives in zip(texts, logprobs.get("token_logprobs") or [], tops, strict=True)
    ]


def _token(text: Any, logprob: Any, alternatives: Iterable[tuple[Any, Any]], top: int, doubts: set[str]) -> Token:
    """A token of a server. Its rank is known where it is among the best ones that were asked for, at least one."""
    best = [(other, _logprob(value, doubts)) for other, value in alternatives]
    if not all(isinstance(one, str) for one in (text, *(other for other, _ in best))):
        raise ValueError
    ordered = sorted((pair for pair in best if not math.isnan(pair[1])), key=lambda pair: -pair[1])
    best_ones = ordered[: max(top, 1)]  # an alternative beyond them is the token itself, wherever it ranks
    rank = next((place for place, (other, _) in enumerate(best_ones, 1) if other == text), None)
    entries: list[Alternative] = []
    for place, (other, value) in enumerate(ordered[:top]):
        entries.append((UNKNOWN_ID if other == text else UNKNOWN_ID - 1 - place, other, value))
    return Token(UNKNOWN_ID, _logprob(logprob, doubts), text, rank, None, tuple(entries))


def _with_id(token: Token, id: int) -> Token:
    top = tuple((id if other == UNKNOWN_ID else other, text, value) for other, text, value in token.top)
    return Token(id, token.logprob, token.text, token.rank, token.entropy, top)


def _with_text(token: Token, text: str) -> Token:
    return Token(token.id, token.logprob, text, token.rank, token.entropy, token.top)


# -- a prompt that a server sends back, token by token, with its log-probabilities -------------------------------------


@dataclass(frozen=True)
class EchoedPrompt:
    """The tokens of a prompt, each with the character at which it begins. BOS and what was generated are left out."""

    text: str
    tokens: tuple[tuple[int, Token], ...]


def echoed(answer: Mapping[str, Any], text: str, top: int = 0) -> EchoedPrompt:
    """The prompt `text` in an answer to `echo`.

    Raises InputError where its tokens are not those of the text or a number cannot be true, and one of MALFORMED.
    """
    doubts: set[str] = set()
    logprobs = answer["choices"][0]["logprobs"]
    tokens = tokens_of(logprobs, top, doubts)
    if doubts:
        raise InputError("the server gives a log-probability that is not a number up to 0")
    starts = _starts(tokens, text)
    if starts is None:
        said = logprobs.get("text_offset") or ()  # where a character is spread over several tokens
        starts = [int(offset) for offset in said] if len(said) == len(tokens) else None
    if starts is None or not tokens:
        raise InputError("the tokens that the server tells of do not add up to the text")
    inside = [(start, token) for start, token in zip(starts, tokens, strict=True) if 0 <= start < len(text)]
    if not inside or inside[0][0] != 0:
        raise InputError("the tokens that the server tells of do not add up to the text")
    return EchoedPrompt(text, tuple(inside))


def _starts(tokens: Sequence[Token], text: str) -> list[int] | None:
    """Where each token begins in the text, by their lengths; below 0 before it. None if they do not add up."""
    whole = "".join(token.text for token in tokens)
    before = whole.find(text)
    first = len(tokens[0].text) if tokens else 0
    if before not in (0, first):  # only BOS may come before
        return None
    starts, at = [], -before
    for token in tokens:
        starts.append(at)
        at += len(token.text)
    return starts


def scored_after(prompt: EchoedPrompt, begin: int) -> tuple[int, list[Token]]:
    """The scored tokens of what begins at a character, and the character at which the first of them begins.

    At the beginning of a text, tokens without a score are left out. Raises InputError where nothing is left, and where
    a token crosses `begin`.
    """
    own = [(start, token) for start, token in prompt.tokens if start >= begin]
    if begin and (not own or own[0][0] != begin):
        raise InputError("the server reads the end of the context and the beginning of the text as one token")
    if begin and any(math.isnan(token.logprob) for _, token in own):
        raise InputError("the server has no score for a token after the context")
    scored = list(itertools.dropwhile(lambda pair: math.isnan(pair[1].logprob), own))
    if any(math.isnan(token.logprob) for _, token in scored):
        raise InputError("the server has no score for a token in the middle of the text")
    if not scored:
        raise InputError(
            "the text is a single token, and the server has no score for the first one; "
            "give what comes before it with --context"
        )
    return scored[0][0], [token for _, token in scored]
