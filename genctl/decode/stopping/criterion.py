"""Stopping criteria on tokens, time and log-probabilities. Those on the text of a row are in `text` and `tail`."""

from __future__ import annotations

from dataclasses import dataclass

from genctl.decode.types import Stop, Written

MIN_TOKENS = 5  # a mean over fewer tokens is too noisy


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
