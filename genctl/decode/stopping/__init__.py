"""Stopping criteria: why a row ends, and where its text is cut. `build` makes the criteria of a lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from genctl.decode.stopping.row_text import RowText


@dataclass(frozen=True)
class Written:
    """The input of a criterion, built for each token."""

    token: int
    count: int  # new tokens, this one included
    logprob: float  # sum over the new tokens, nats
    tail: Callable[[int], list[int]]  # tail(n): the last n new tokens, this one included
    elapsed: float  # seconds since the lane began
    text: RowText | None = None  # of all new tokens; None if the lane produces no text


class Stop(NamedTuple):
    """Why a row ends."""

    reason: str  # eos | length | context (full before max_new_tokens) | stop | time | interrupted
    what: str = ""  # the stop string, pattern or limit that was reached
    kind: str = ""  # the criterion if `reason` is "stop": string, regex, token, floor, repetition, plugin


# Why a row ends after this token; None if it does not. A pair is (reason, what).
Criterion: TypeAlias = Callable[[Written], "Stop | tuple[str, str] | None"]
