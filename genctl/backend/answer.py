"""What a server's answer, or one part of its stream, says of each sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genctl.backend.failure import Trouble
from genctl.events import UNKNOWN_ID, Alternative, Token


@dataclass(frozen=True)
class AnswerPiece:
    """The next part of one sequence. `finish` is why it ended, as the server says it; None while it goes on."""

    choice: int
    tokens: tuple[Token, ...]
    finish: str | None = None
    stop: str | int | None = None  # the stop string or token that ended it
    tells_stop: bool = False  # the server says what stopped a sequence


@dataclass(frozen=True)
class Usage:
    """Tokens of a whole request, all its sequences together. None: the server does not say."""

    prompt: int | None = None
    new: int | None = None


def pieces_of(part: Mapping[str, Any], top: int) -> list[AnswerPiece]:
    """The pieces of one part. Raises Trouble where it is not made as OpenAI's are."""
    choices = part.get("choices", [])
    if not isinstance(choices, list):
        raise Trouble("the answer has no list of choices", again=True)
    try:
        return [_piece(choice, top) for choice in choices]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise Trouble("the answer is not made as OpenAI's interface makes it", again=True) from None


def usage_of(part: Mapping[str, Any]) -> Usage | None:
    """The token counts of a part, if it has any."""
    usage = part.get("usage")
    if not isinstance(usage, Mapping):
        return None
    prompt, new = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return Usage(prompt if isinstance(prompt, int) else None, new if isinstance(new, int) else None)


def ending_of(piece: AnswerPiece, *, could_stop: bool) -> tuple[str, str, str]:
    """Why a sequence ended: the reason, what stopped it, and what kind of thing that is.

    `could_stop`: stop strings or tokens were asked for. Most servers do not tell them from EOS.
    """
    if piece.finish == "length":
        return "length", "", ""
    if piece.finish != "stop":
        return "stop", str(piece.finish), "server"
    if isinstance(piece.stop, str):
        return "stop", piece.stop, "string"
    if piece.stop is not None:
        return "stop", str(piece.stop), "token"
    return ("stop" if could_stop and not piece.tells_stop else "eos"), "", ""


def _piece(choice: Mapping[str, Any], top: int) -> AnswerPiece:
    index = choice.get("index", 0)
    if "text" in choice:
        text = choice["text"] or ""
    else:
        said = choice.get("delta", choice.get("message"))
        text = (said or {}).get("content") or ""
    if not isinstance(text, str) or not isinstance(index, int):
        raise ValueError
    told = tokens_of(choice.get("logprobs"), top)
    ids = choice.get("token_ids")
    if isinstance(ids, list) and ids and len(ids) == len(told):
        told = [_with_id(token, int(id)) for token, id in zip(told, ids, strict=True)]
    elif isinstance(ids, list) and ids and not told:
        told = [Token(int(id), math.nan) for id in ids]
    stops = [key for key in ("stop_reason", "matched_stop") if key in choice]
    stop = choice[stops[0]] if stops else None
    finish = choice.get("finish_reason")
    return AnswerPiece(index, _fitted(told, text), finish, stop if isinstance(stop, (str, int)) else None, bool(stops))


def _fitted(told: Sequence[Token], text: str) -> tuple[Token, ...]:
    """The tokens with texts that add up to `text`: a character may be spread over several tokens."""
    if not told:
        return (Token(UNKNOWN_ID, math.nan, text),) if text else ()
    if "".join(token.text for token in told) == text:
        return tuple(told)
    bare = [_with_text(token, "") for token in told]
    return (*bare[:-1], _with_text(told[-1], text))


def tokens_of(logprobs: Any, top: int) -> list[Token]:
    """The tokens of either form of log-probabilities; an empty list if there are none. Ids are unknown."""
    if not isinstance(logprobs, Mapping):
        return []
    if isinstance(logprobs.get("content"), list):  # of a chat
        return [
            _token(
                entry["token"],
                entry.get("logprob"),
                [(one["token"], float(one["logprob"])) for one in entry.get("top_logprobs") or ()],
                top,
            )
            for entry in logprobs["content"]
        ]
    texts = logprobs.get("tokens") or []
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    return [
        _token(text, logprob, list((alternatives or {}).items()), top)
        for text, logprob, alternatives in zip(texts, logprobs.get("token_logprobs") or [], tops, strict=True)
    ]


def _token(text: str, logprob: float | None, best: list[tuple[str, float]], top: int) -> Token:
    """A token of a server. Its rank is known where it is among the best ones that were asked for, at least one."""
    own = math.nan if logprob is None else float(logprob)
    ordered = sorted(best, key=lambda pair: -pair[1])
    best_ones = ordered[: max(top, 1)]  # an alternative beyond them is the token itself, wherever it ranks
    rank = next((place for place, (other, _) in enumerate(best_ones, 1) if other == text), None)
    entries: list[Alternative] = []
    for place, (other, value) in enumerate(ordered[:top]):
        entries.append((UNKNOWN_ID if other == text else UNKNOWN_ID - 1 - place, other, value))
    return Token(UNKNOWN_ID, own, text, rank, None, tuple(entries))


def _with_id(token: Token, id: int) -> Token:
    top = tuple((id if other == UNKNOWN_ID else other, text, value) for other, text, value in token.top)
    return Token(id, token.logprob, token.text, token.rank, token.entropy, top)


def _with_text(token: Token, text: str) -> Token:
    return Token(token.id, token.logprob, text, token.rank, token.entropy, token.top)
