"""Shell completion of presets, strategies, model names and values. Nothing here imports torch."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import get_args

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
    """Built-in checkpoints, and those in the local cache."""
    from genctl.models.resolve import available

    return [model.name for model in available() if model.error is None and model.name.startswith(typed)]


def among(values: Sequence[str]) -> Complete:
    """A completion of fixed values."""

    def complete(typed: str) -> list[str]:
        return [value for value in values if value.startswith(typed)]

    return complete


def settings(typed: str) -> list[str]:
    """Keys of --set with `=`; behind it the values of a key that has few."""
    from genctl import params

    key, equals, _ = typed.partition("=")
    hints = {**params.hints(params.Generation), **params.hints(params.Runtime)}
    if not equals:
        return [f"{name}=" for name in hints if name.startswith(key)]
    values = ["true", "false"] if hints.get(key) is bool else map(str, get_args(hints.get(key)))
    return [f"{key}={value}" for value in values if f"{key}={value}".startswith(typed)]


@contextmanager
def words_joined() -> Iterator[None]:
    """Join the words that bash splits at `:` and `=`; of each completion print what follows the last of them.

    Bash replaces only what stands behind it, so `builtin:st` is completed with `stories`.
    """
    words, place = os.environ.get("COMP_WORDS", "").split(), int(os.environ.get("COMP_CWORD", "0"))
    words += [""] * (place + 1 - len(words))
    joined: list[str] = []
    for number, word in enumerate(words[: place + 1]):
        if number and (word in (":", "=") or words[number - 1] in (":", "=")):
            joined[-1] += word
        else:
            joined.append(word)
    split = len(joined) <= place
    typed = joined[-1].partition("=")[2] if joined[-1].startswith("-") else joined[-1]
    prefix = typed[: max(typed.rfind(":"), typed.rfind("=")) + 1] if split else ""
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = " ".join(joined), str(len(joined) - 1)
    answer = io.StringIO()
    try:
        with redirect_stdout(answer):
            yield
    finally:
        sys.stdout.write("".join(line.removeprefix(prefix) for line in answer.getvalue().splitlines(keepends=True)))


COMPLETIONS: dict[str, Complete] = {
    "presets": presets,
    "strategy": strategies,
    "model": models,
    "assistant_model": models,
    "amateur_model": models,
    "device": among(("auto", "cpu", "cuda", "mps")),
    "set": settings,
}
