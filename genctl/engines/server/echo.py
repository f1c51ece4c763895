"""A prompt that a server sends back, token by token, with its log-probabilities."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genctl.engines.server.answer import tokens_of
from genctl.errors import InputError
from genctl.events import Token


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
