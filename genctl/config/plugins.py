"""Code of users: an installed entry point, or a dotted path (`package.module:Class`)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from genctl.errors import UsageError, raised

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUPS = {"processor": "genctl.processors", "stopping criterion": "genctl.stopping"}


def installed(kind: str) -> dict[str, EntryPoint]:
    """The installed entry points of a kind (a key of `GROUPS`), by name."""
    from importlib.metadata import entry_points  # slow, and seldom needed

    return {point.name: point for point in entry_points(group=GROUPS[kind])}


def make(
    kind: str, use: str, arguments: Mapping[str, Any], *, allowed: bool, offered: Mapping[str, Any] | None = None
) -> Any:
    """What `use` names: a class constructed with `arguments`, or a function that is called with them each time.

    Parameters of a class that are called as something in `offered` receive it. Raises UsageError if it is not
    installed and not `allowed`, not found, or cannot be constructed or called.
    """
    target = _target(kind, use, allowed)
    try:
        if isinstance(target, type):
            extra = {name: value for name, value in (offered or {}).items() if name in _parameters(target)}
            made = target(**{**extra, **arguments})
        else:
            made = partial(target, **arguments) if arguments else target
    except Exception as error:
        raise UsageError(f"{kind} {use} could not be made: {raised(error)}") from error
    if not callable(made):
        raise UsageError(f"{kind} {use}: {type(made).__name__} cannot be called")
    return made


def _target(kind: str, use: str, allowed: bool) -> Any:
    points = installed(kind)
    point = points.get(use) or next((point for point in points.values() if point.value == use), None)
    if point is not None:
        try:
            return point.load()
        except Exception as error:
            raise UsageError(f"{kind} {use} ({point.value}) could not be loaded: {raised(error)}") from error
    if not allowed:
        hint = f"or an installed entry point {GROUPS[kind]}"
        raise UsageError(f"{kind} {use}: code from outside needs --allow-plugins", hint=hint)
    module, _, path = use.partition(":")
    try:
        target: Any = importlib.import_module(module)
    except Exception as error:
        raise UsageError(f"{kind} {use}: module {module} could not be loaded: {raised(error)}") from error
    for name in path.split("."):
        try:
            target = getattr(target, name)
        except AttributeError as error:
            raise UsageError(f"{kind} {use}: module {module} has no {path}") from error
    return target


def _parameters(target: type) -> list[str]:
    """The parameters of a class; unknown for some written in C."""
    import inspect

    try:
        return list(inspect.signature(target).parameters)
    except ValueError:
        return []
