"""Stopping criteria of users: constructed and called.

A criterion is called as `criterion(written)` and returns None or False to continue, True, a text, or a pair of finish
reason and text; a subclass of transformers' StoppingCriteria is called with the new tokens as `input_ids` [1, T] and
`scores` None instead. Either must depend only on its arguments: rows are reordered, forked and rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from genctl.config import listed_knobs
from genctl.decode.stopping import Criterion, Stop, Written
from genctl.errors import UsageError, raised

REASONS = ("eos", "length", "stop", "time")


def make(use: str, arguments: Mapping[str, Any], offered: Mapping[str, Any], *, allowed: bool) -> Criterion:
    """A criterion from a user's class or function and the keys of its table (see `genctl.config.listed_knobs.make`).

    `offered` (the tokenizer, the decoder) is passed to parameters of that name. Raises UsageError.
    """
    criterion = listed_knobs.make("stopping criterion", use, arguments, allowed=allowed, offered=offered)
    # by name, so that transformers is not imported for other criteria
    names = {f"{base.__module__.split('.')[0]}.{base.__name__}" for base in type(criterion).__mro__}
    is_transformers = "transformers.StoppingCriteria" in names
    return partial(_call, use, partial(_with_tensors, criterion) if is_transformers else criterion)


def _call(use: str, criterion: Callable[[Written], Any], written: Written) -> Stop | None:
    try:
        answer = criterion(written)
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


def _with_tensors(criterion: Callable[..., Any], written: Written) -> bool:
    import torch

    answer = criterion(torch.tensor([written.tail(written.count)]), None)
    return bool(answer.all()) if isinstance(answer, torch.Tensor) else bool(answer)
