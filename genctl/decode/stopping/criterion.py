"""The type of a stopping criterion: a function of a row after its newest token that returns why the row ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


@dataclass(frozen=True)
class Written:
    """The input of a criterion, built for each token."""

    token: int
    count: int  # new tokens, this one included
    logprob: float  # sum over them, nats
    tail: Callable[[int], list[int]]  # tail(n): the last n new tokens, this one included
    elapsed: float  # seconds since the lane began


class Stop(NamedTuple):
    """Why a row ends."""

    reason: str  # eos | length | stop | time | interrupted
    what: str = ""  # the stop string, the pattern or the limit
    kind: str = ""  # the criterion if `reason` is "stop": string, regex, token, floor, repetition, plugin


# Why a row ends after this token; None if it does not. A pair is (reason, what).
Criterion: TypeAlias = Callable[[Written], "Stop | tuple[str, str] | None"]
