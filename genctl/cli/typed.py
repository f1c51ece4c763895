"""Values of options that are what was typed, or nearly: Typer need not convert them.

Typer makes a Pydantic adapter for each option of a command, given or not, and imports Pydantic for the first one: a
tenth of the time in which a run starts.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

Reader = Callable[[Any], Any]  # what the parser found -> the value, or None where Typer has to read it or to refuse it


class Mixed(str):
    """The value of a flag as it is typed: TOML (`true`, 3, `["a"]`), or bare text."""


def readers(parameters: Iterable[inspect.Parameter]) -> dict[str, Reader]:
    """How the values of Typer's parameters are read; those of other types are not in it."""
    found = {parameter.name: _reader(get_args(parameter.annotation)[0]) for parameter in parameters}
    return {name: reader for name, reader in found.items() if reader is not None}


def _reader(hint: Any) -> Reader | None:
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(choice for choice in get_args(hint) if choice is not type(None))
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return lambda value: value if value in choices else None
    return _READERS.get(hint)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _mixed(value: Any) -> Mixed | None:
    return Mixed(value) if isinstance(value, str) else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _texts(value: Any) -> list[str] | None:
    return list(value) if isinstance(value, (list, tuple)) else None


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value) else None


_READERS: Mapping[Any, Reader] = {str: _text, Mixed: _mixed, bool: _flag, list[str]: _texts, int: _whole}
