"""Processors of users: a dotted path (`package.module:Class`) or an installed entry point `genctl.processors`."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from genctl.decode.processors.context import one_line
from genctl.errors import UsageError

GROUP = "genctl.processors"


def installed() -> dict[str, EntryPoint]:
    """The installed entry points `genctl.processors`, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def load(use: str, arguments: dict[str, Any], *, allowed: bool) -> Callable[..., Any]:
    """The processor that `use` names, with `arguments`.

    A class is constructed with the arguments as keywords (a transformers LogitsProcessor, or anything whose instances
    take history and scores); a function receives them after history and scores. Raises UsageError if it is not allowed,
    not found or cannot be constructed.
    """
    points = installed()
    point = points.get(use) or next((point for point in points.values() if point.value == use), None)
    if point is None and not allowed:
        raise UsageError(
            f"processor {use}: code from outside needs --allow-plugins", hint=f"or an installed entry point {GROUP}"
        )
    target = _entry(use, point) if point is not None else _path(use)
    if inspect.isclass(target):
        try:
            processor = target(**arguments)
        except Exception as error:
            raise UsageError(f"processor {use} could not be made: {type(error).__name__}: {one_line(error)}") from error
    else:
        processor = target
    if not callable(processor):
        raise UsageError(f"processor {use}: {type(processor).__name__} cannot be called with history and scores")
    later = {} if inspect.isclass(target) else arguments
    try:
        inspect.signature(processor).bind(None, None, **later)
    except TypeError as error:
        raise UsageError(f"processor {use} does not take history and scores: {one_line(error)}") from error
    except ValueError:  # no signature to look at (C code): the call will tell
        pass
    return functools.partial(processor, **later) if later else processor


def _entry(use: str, point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise UsageError(
            f"processor {use} ({point.value}) could not be loaded: {type(error).__name__}: {one_line(error)}"
        ) from error


def _path(use: str) -> Any:
    module_name, _, attributes = use.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:  # anything may go wrong in a user's module
        raise UsageError(
            f"processor {use}: module {module_name} could not be loaded: {type(error).__name__}: {one_line(error)}"
        ) from error
    for attribute in attributes.split("."):
        try:
            target = getattr(target, attribute)
        except AttributeError as error:
            raise UsageError(f"processor {use}: module {module_name} has no {attributes}") from error
    return target
