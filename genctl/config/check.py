"""Check one value against its knob, and the names of keys: strict types, bounds, suggestions."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from genctl import params
from genctl.config.fit import Misfit, fit
from genctl.config.toml import printable, write_key, write_value
from genctl.errors import nearest

# Switches that run code from a file: only a flag on the command line can set them.
UNSAFE = ("trust_remote_code", "allow_pickle", "allow_plugins")

# Names of knobs in other tools.
ALIASES = {
    "max_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "num_predict": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "num_samples": "num_return_sequences",
    "beams": "num_beams",
    "beam_size": "num_beams",
    "beam_width": "num_beams",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_last_n",
    "stop": "stop_strings",
    "sample": "do_sample",
    "sampling": "do_sample",
    "typical": "typical_p",
    "random_seed": "seed",
    "model_name": "model",
    "model_name_or_path": "model",
    "checkpoint": "model",
    "torch_dtype": "dtype",
    "system_prompt": "system",
    "cache": "cache_implementation",
}


class Wrong(ValueError):
    """The error of a value, as the end of a sentence; `near` is the nearest valid key, if one is close."""

    def __init__(self, words: str, *, near: str = "") -> None:
        super().__init__(words)
        self.near = near


class ListMistake(NamedTuple):
    """A mistake in a list: the number of its table, from 1, and the key there; 0 and "" where it has no such place."""

    sentence: str
    item: int = 0
    key: str = ""


class ListMistakes(Exception):
    """All mistakes in a list."""

    def __init__(self, mistakes: list[ListMistake]) -> None:
        super().__init__("; ".join(mistake.sentence for mistake in mistakes))
        self.mistakes = mistakes


@cache
def known() -> dict[str, tuple[type, Any]]:
    """Every knob: its dataclass and its type."""
    return {
        name: (kind, hint) for kind in (params.Generation, params.Runtime) for name, hint in params.hints(kind).items()
    }


@cache
def default(key: str) -> Any:
    """The built-in value of a knob."""
    return getattr(known()[key][0](), key)


def accepted() -> list[str]:
    """Every knob that a file may set."""
    return [key for key in known() if key not in UNSAFE]


def did_you_mean(key: str, choices: Iterable[str]) -> str:
    """The choice that is nearest to `key`, or an empty string."""
    choices = list(choices)
    folded = key.strip().lower().replace("-", "_").replace(" ", "_")
    return ALIASES[folded] if ALIASES.get(folded) in choices else nearest(folded, choices)


def shown(value: Any) -> str:
    """A value as the user would write it, on one short line."""
    if value is None:
        return "null"
    try:
        return printable(write_value(value), 60)
    except (TypeError, ValueError, RecursionError):
        return printable(str(value) if isinstance(value, (datetime.date, datetime.time)) else type(value).__name__, 60)


def named(key: str) -> str:
    """A key in quotes where necessary, safe on a terminal."""
    return printable(write_key(key), 60)


def check(key: str, value: Any) -> Any:
    """`value` in the type of its knob. Raises Wrong with a sentence: `top_k = -1: must be at least 0`."""
    try:
        return fit(known()[key][1], value)
    except Misfit as misfit:
        raise Wrong(f"{key} = {shown(value)}: {printable(str(misfit))}") from None
    except RecursionError:
        raise Wrong(f"{key}: is nested too deeply") from None
