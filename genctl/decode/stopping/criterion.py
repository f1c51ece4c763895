"""What a stopping criterion is: a function of a row just after its newest token, that says why the row ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


@dataclass(frozen=True)
class Written:
    """What a criterion looks at. Built anew for each token."""

    token: int
    count: int  # new tokens, this one included
    logprob: float  # sum over them, nats
    tail: Callable[[int], list[int]]  # tail(n): the last n new tokens, this one included
    elapsed: float  # seconds since the lane began


class Stop(NamedTuple):
    """Why a row ends."""

    reason: str  # eos | length | stop | time | interrupted
    what: str = ""  # what exactly: the stop string, the pattern, the limit
    kind: str = ""  # which criterion, where `reason` is "stop": string, regex, token, floor, repetition, plugin


# Why a row ends after this token; None if it does not. A pair is (reason, what).
Criterion: TypeAlias = Callable[[Written], "Stop | tuple[str, str] | None"]
