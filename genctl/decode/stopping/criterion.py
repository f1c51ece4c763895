"""Stopping criteria: functions of a row after its newest token that return why the row ends.

Those on tokens, time and log-probabilities are here; those on its text are in `text` and `tail`.
"""

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


MIN_TOKENS = 5  # a mean over fewer tokens is too noisy

# Why a row ends after this token; None if it does not. A pair is (reason, what).
Criterion: TypeAlias = Callable[[Written], "Stop | tuple[str, str] | None"]


@dataclass(frozen=True)
class StopTokens:
    """Ends a row with one of these ids, which stays in the row."""

    ids: frozenset[int]

    def __call__(self, written: Written) -> Stop | None:
        return Stop("stop", str(written.token), "token") if written.token in self.ids else None


@dataclass(frozen=True)
class MaxTime:
    """Ends a row with the first token after more than `seconds` since the lane began."""

    seconds: float

    def __call__(self, written: Written) -> Stop | None:
        return Stop("time", f"max_time {self.seconds:g} s") if written.elapsed > self.seconds else None


@dataclass(frozen=True)
class MeanLogprob:
    """Ends a row whose mean log-probability (the model's own, in nats) over at least `min_tokens` is below `floor`."""

    floor: float
    min_tokens: int = MIN_TOKENS

    def __call__(self, written: Written) -> Stop | None:
        mean = written.logprob / written.count
        if written.count < self.min_tokens or not mean < self.floor:
            return None
        shown = f"{mean:.4g}" if float(f"{mean:.4g}") < self.floor else repr(mean)
        return Stop("stop", f"mean log-probability {shown} below {self.floor}", "floor")


@dataclass(frozen=True)
class Repetition:
    """Ends a row whose last tokens are the same n-gram `times` times in a row."""

    size: int
    times: int

    def __call__(self, written: Written) -> Stop | None:
        if written.count < self.size * self.times:
            return None
        tail = written.tail(self.size * self.times)
        # equal to itself shifted by one n-gram: all n-grams are equal
        if tail[self.size :] != tail[: -self.size]:
            return None
        return Stop("stop", f"the same {self.size}-gram {self.times} times", "repetition")
