"""Stopping criteria of users: found by entry point or dotted path, constructed and called.

A criterion is called as `criterion(written)` and returns None or False to continue, True, a text, or a pair of finish
reason and text; a subclass of transformers' StoppingCriteria is called with the new tokens as `input_ids` [1, T] and
`scores` None instead. Either must depend only on its arguments: rows are reordered, forked and rolled back.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from genctl.decode.stopping.criterion import Criterion, Stop, Written
from genctl.errors import UsageError

GROUP = "genctl.stopping"
REASONS = ("eos", "length", "stop", "time")


def load(use: str, allow_plugins: bool) -> Any:
    """The class or function that `use` names: an entry point of `genctl.stopping`, or `package.module:Class`.

    Raises UsageError if there is none, if it does not load, or if a path is given without `allow_plugins`.
    """
    if ":" not in use:
        try:
            return next(iter(entry_points(group=GROUP, name=use))).load()
        except Exception as error:
            raise UsageError(f"the installed criterion {use!r} does not load: {_said(error)}") from error
    if not allow_plugins:
        raise UsageError(f"{use!r} is code of your own, which runs only with --allow-plugins")
    module, _, path = use.partition(":")
    try:
        target = importlib.import_module(module)
    except Exception as error:
        raise UsageError(f"the module {module!r} of {use!r} does not load: {_said(error)}") from error
    for name in path.split("."):
        if not hasattr(target, name):
            raise UsageError(f"there is no {path!r} in the module {module!r}")
        target = getattr(target, name)
    return target


def make(use: str, target: Any, arguments: Mapping[str, Any], offered: Mapping[str, Any]) -> Criterion:
    """A criterion from a user's class or function and the keys of its table.

    `offered` (the tokenizer, the decoder) is passed to parameters of that name. Raises UsageError if the keys do not
    fit or the result cannot be called.
    """
    try:
        extra = {name: offered[name] for name in _asked(target) if name in offered and name not in arguments}
        criterion = target(**extra, **arguments) if isinstance(target, type) else partial(target, **arguments)
    except Exception as error:
        raise UsageError(f"{use!r} cannot be made with {sorted(arguments) or 'no keys'}: {_said(error)}") from error
    if not callable(criterion):
        raise UsageError(f"{use!r} is no stopping criterion: it cannot be called")
    ask = partial(_tensors, criterion) if _is_transformers(criterion) else criterion
    return partial(_call, use, ask)


def _asked(target: Any) -> list[str]:
    """The parameters of a class; unknown for some written in C."""
    try:
        return list(inspect.signature(target).parameters) if isinstance(target, type) else []
    except ValueError:
        return []


def _call(use: str, ask: Callable[[Written], Any], written: Written) -> Stop | None:
    try:
        answer = ask(written)
    except Exception as error:
        raise UsageError(f"the stopping criterion {use!r} failed at token {written.count}: {_said(error)}") from error
    if answer is None or answer is False:
        return None
    if answer is True:
        return Stop("stop", use, "plugin")
    if isinstance(answer, str):
        return Stop("stop", answer, "plugin")
    if isinstance(answer, tuple) and len(answer) == 2 and answer[0] in REASONS and isinstance(answer[1], str):
        return Stop(*answer, "plugin" if answer[0] == "stop" else "")
    raise UsageError(
        f"the stopping criterion {use!r} answered {answer!r}, not None, a truth value, a text, "
        f"or a pair of {'|'.join(REASONS)} and a text"
    )


def _tensors(criterion: Callable[..., Any], written: Written) -> bool:
    import torch

    answer = criterion(torch.tensor([written.tail(written.count)]), None)
    return bool(answer.all()) if isinstance(answer, torch.Tensor) else bool(answer)


def _is_transformers(criterion: Any) -> bool:
    # by name, so that nothing is imported for criteria that have nothing to do with it
    names = {f"{base.__module__.split('.')[0]}.{base.__name__}" for base in type(criterion).__mro__}
    return "transformers.StoppingCriteria" in names


def _said(error: BaseException) -> str:
    """The error in one line."""
    return ": ".join([type(error).__name__, " ".join(str(error).split())]).removesuffix(": ")
