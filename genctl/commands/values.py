"""Values of options: parsed from the command line, and completed by the shell. Nothing here imports torch.

A wrong value raises an error with fields: the value and what is expected.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import typer

from genctl.errors import nearest, printable

Reader = Callable[[Any], Any]  # the parser's result -> the value; raises WrongValue


class Mixed(str):
    """The value of a flag as typed: TOML (`true`, 3, `["a"]`), or bare text."""


class WrongValue(typer.BadParameter):
    """`value` is neither one of the option's `choices` nor what is `expected`."""

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
        """The error message for users."""
        shown = printable(self.value)
        if self.choices:
            return f'{self.flag} "{shown}": {self.message}'
        return f'{self.flag}: {self.message}, got "{shown}"'


def reader_of(hint: Any) -> Reader:
    """The reader of values of type `hint`.

    Typer would make a Pydantic adapter for each option of a command, given or not, and import Pydantic for the first
    one: a tenth of the start-up time of a run.
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
    """A reader that accepts one of `choices`."""

    def read(typed: str) -> str:
        if typed not in choices:
            raise WrongValue(typed, choices=choices)
        return typed

    return read


Complete = Callable[[str], list[str]]


def presets(typed: str) -> list[str]:
    """Names of presets."""
    from genctl.config.presets import available

    return [preset.name for preset in available() if preset.name.startswith(typed)]


def strategies(typed: str) -> list[str]:
    """Names of decoding modes."""
    from genctl.config.modes import NAMED

    return [name for name in NAMED if name.startswith(typed)]


def models(typed: str) -> list[str]:
    """Names of built-in checkpoints, and of those in the local cache."""
    from genctl.models.resolve import available

    return [model.name for model in available() if model.error is None and model.name.startswith(typed)]


def among(values: Sequence[str]) -> Complete:
    """A completion of fixed values."""

    def complete(typed: str) -> list[str]:
        return [value for value in values if value.startswith(typed)]

    return complete


def settings(typed: str) -> list[str]:
    """Keys of --set with `=`; after the `=`, values of a key with fixed choices."""
    from genctl import params

    key, equals, _ = typed.partition("=")
    hints = {**params.hints(params.Generation), **params.hints(params.Runtime)}
    if not equals:
        return [f"{name}=" for name in hints if name.startswith(key)]
    values = ["true", "false"] if hints.get(key) is bool else map(str, get_args(hints.get(key)))
    return [f"{key}={value}" for value in values if f"{key}={value}".startswith(typed)]


COMPLETIONS: dict[str, Complete] = {
    "presets": presets,
    "strategy": strategies,
    "model": models,
    "assistant_model": models,
    "amateur_model": models,
    "device": among(("auto", "cpu", "cuda", "mps")),
    "set": settings,
}
