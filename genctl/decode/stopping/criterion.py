"""Stopping criteria on tokens, text, time and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from genctl.config import listed_knobs
from genctl.decode.stopping import Criterion, Stop, Written
from genctl.decode.stopping.stops import Pattern, first
from genctl.decode.stopping.thoughts import Thoughts
from genctl.errors import UsageError, raised

# -- stopping criteria of users: constructed and called ----------------------------------------------------------------
# A criterion is called as `criterion(written)` and returns None or False to continue, True, a text, or a pair of finish
# reason and text; a subclass of transformers' StoppingCriteria is called with the new tokens as `input_ids` [1, T] and
# `scores` None instead. Either must depend only on its arguments: rows are reordered, forked and rolled back.


REASONS = ("eos", "length", "stop", "time")


def make(use: str, arguments: Mapping[str, Any], offered: Mapping[str, Any], *, allowed: bool) -> Criterion:
    """A criterion from a user's class or function and the keys of its table (see `genctl.config.listed_knobs.make`).

    `offered` (the tokenizer, the decoder) is passed to parameters of that name. Raises UsageError.
    """
    criterion = listed_knobs.make("stopping criterion", use, arguments, allowed=allowed, offered=offered)
    ask = partial(_tensors, criterion) if _is_transformers(criterion) else criterion
    return partial(_call, use, ask)


def _call(use: str, ask: Callable[[Written], Any], written: Written) -> Stop | None:
    try:
        answer = ask(written)
    except Exception as error:
        raise UsageError(f"the stopping criterion {use} failed at token {written.count}: {raised(error)}") from error
    if answer is None or answer is False:
        return None
    if answer is True:
        return Stop("stop", use, "plugin")
    if isinstance(answer, str):
        return Stop("stop", answer, "plugin")
    if isinstance(answer, tuple) and len(answer) == 2 and answer[0] in REASONS and isinstance(answer[1], str):
        return Stop(*answer, "plugin" if answer[0] == "stop" else "")
    raise UsageError(
        f"the stopping criterion {use} answered {answer!r}, not None, a truth value, a text, "
        f"or a pair of {'|'.join(REASONS)} and a text"
    )


def _tensors(criterion: Callable[..., Any], written: Written) -> bool:
    import torch

    answer = criterion(torch.tensor([written.tail(written.count)]), None)
    return bool(answer.all()) if isinstance(answer, torch.Tensor) else bool(answer)


def _is_transformers(criterion: Any) -> bool:
    # by name, so that transformers is not imported for other criteria
    names = {f"{base.__module__.split('.')[0]}.{base.__name__}" for base in type(criterion).__mro__}
    return "transformers.StoppingCriteria" in names


MIN_TOKENS = 5  # a mean over fewer tokens is too noisy


@dataclass(frozen=True)
class StopTokens:
    """Ends a row with one of these ids, which stays in the row."""

    ids: frozenset[int]

    def __call__(self, written: Written) -> Stop | None:
        return Stop("stop", str(written.token), "token") if written.token in self.ids else None


@dataclass(frozen=True)
class StopStrings:
    """Ends a row with the first token after which its text holds one of `stops`, wherever the tokens begin and end.

    `stops`: searched string -> its stop string (see `Marks`). They do not count in `thoughts`.
    """

    stops: Mapping[str, str]
    thoughts: Thoughts | None = None

    def __call__(self, written: Written) -> Stop | None:
        assert written.text is not None
        found = first(written.text.whole(), tuple(self.stops), written.text.since, self.thoughts)
        return None if found is None else Stop("stop", self.stops[found[1]], "string")


@dataclass(frozen=True)
class StopRegex:
    """Ends a row with the first token after which `pattern` matches in the last 4096 characters of its text.

    The pattern sees only the text so far: `$` matches after every token. It does not count in `thoughts`.
    """

    pattern: Pattern
    thoughts: Thoughts | None = None

    def __call__(self, written: Written) -> Stop | None:
        assert written.text is not None
        found = self.pattern.find(written.text.whole(), self.thoughts)
        return None if found is None else Stop("stop", self.pattern.source, "regex")


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
