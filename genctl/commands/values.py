"""Values of options, made from what was typed. A wrong one is an error with fields: the value and what is expected."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import typer

from genctl.errors import nearest, printable

Reader = Callable[[Any], Any]  # what the parser found -> the value; raises WrongValue


class Mixed(str):
    """The value of a flag as it is typed: TOML (`true`, 3, `["a"]`), or bare text."""


class WrongValue(typer.BadParameter):
    """`value` is not what an option takes: one of its `choices`, or what is `expected`."""

    def __init__(self, value: str, expected: str = "", choices: Sequence[str] = ()) -> None:
        near = nearest(value.lower(), choices)
        among = f"must be one of {', '.join(choices)}"
        super().__init__((f"did you mean {near}? It {among}" if near else among) if choices else f"expected {expected}")
        self.value, self.expected, self.choices = value, expected, choices

    @property
    def flag(self) -> str:
        """The option, by its first flag."""
        return self.param.opts[0] if self.param else "value"

    def format_message(self) -> str:
        """The error as users see it."""
        shown = printable(self.value)
        if self.choices:
            return f'{self.flag} "{shown}": {self.message}'
        return f'{self.flag}: {self.message}, got "{shown}"'


def reader_of(hint: Any) -> Reader:
    """How a value of type `hint` is read.

    Typer would make a Pydantic adapter for each option of a command, given or not, and import Pydantic for the first
    one: a tenth of the time in which a run starts.
    """
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(choice for choice in get_args(hint) if choice is not type(None))
    if get_origin(hint) in (list, tuple):
        read = reader_of(get_args(hint)[0])
        return lambda typed: [read(one) for one in typed]
    if get_origin(hint) is Literal:
        return choice_of(get_args(hint))
    expected = {int: "a whole number", float: "a number"}.get(hint, "")

    def convert(typed: Any) -> Any:
        try:
            return hint(typed)
        except ValueError:
            raise WrongValue(typed, expected) from None

    return convert


def choice_of(choices: Sequence[str]) -> Reader:
    """A reader of one of `choices`."""

    def read(typed: str) -> str:
        if typed not in choices:
            raise WrongValue(typed, choices=choices)
        return typed

    return read
