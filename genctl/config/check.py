"""One value against its knob: strict types, bounds, and a sentence that says what was meant."""

from __future__ import annotations

import datetime
import difflib
import json
import math
import types
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from genctl import params
from genctl.config.toml import printable, write_key, write_value

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

# Switches that run code from a file somebody else wrote; the person at the keyboard says them, each time.
UNSAFE = ("trust_remote_code", "allow_pickle", "allow_plugins")

# What other tools call it.
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
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}


class Wrong(ValueError):
    """What is wrong with one value, as the end of a sentence."""


@cache
def known() -> dict[str, tuple[type, Any]]:
    """Every knob: its dataclass and its type."""
    return {
        name: (kind, hint) for kind in (params.Generation, params.Runtime) for name, hint in params.hints(kind).items()
    }


@cache
def default(key: str) -> Any:
    """The built-in setting of a knob."""
    return getattr(known()[key][0](), key)


@cache
def adapter(key: str) -> TypeAdapter[Any]:
    """The strict validator of a knob."""
    from pydantic import TypeAdapter  # help needs none of it, and it takes a tenth of a second

    return TypeAdapter(known()[key][1])


@cache
def refused() -> dict[str, str]:
    """Keys of transformers that genctl does not take, each with the reason."""
    return params.REFUSED


def accepted() -> list[str]:
    """Every knob that a file may hold."""
    return [key for key in known() if key not in UNSAFE]


def did_you_mean(key: str, choices: Iterable[str]) -> str:
    """The choice that `key` comes nearest to, or an empty string."""
    choices = list(choices)
    folded = key.strip().lower().replace("-", "_").replace(" ", "_")
    if ALIASES.get(folded) in choices:
        return ALIASES[folded]
    if len(folded) > 64:
        return ""
    return next(iter(difflib.get_close_matches(folded, choices, n=1, cutoff=0.65)), "")


def shown(value: Any) -> str:
    """A value as the user would write it, on one short line."""
    if value is None:
        return "null"
    try:
        return printable(write_value(value), 60)
    except (TypeError, ValueError, RecursionError):
        return printable(str(value) if isinstance(value, (datetime.date, datetime.time)) else type(value).__name__, 60)


def kind_of(value: Any) -> str:
    """What sort of value this is, in TOML's terms."""
    if value is None:
        return "null"
    names: list[tuple[type | tuple[type, ...], str]] = [
        (bool, "a boolean"),
        (int, "a whole number"),
        (float, "a decimal number"),
        (str, "a string"),
        (dict, "a table"),
        ((list, tuple), "a list"),
        ((datetime.date, datetime.time), "a date or time"),
    ]
    return next((name for sort, name in names if isinstance(value, sort)), type(value).__name__)


def describe(hint: Any, *, plural: bool = False) -> str:
    """A type in words: `int | list[int] | None` is "a whole number or a list of whole numbers"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return describe(args[0], plural=plural)
    if origin in (Union, types.UnionType):
        words = [describe(arg, plural=plural) for arg in args if arg is not type(None)]
        return " or ".join(dict.fromkeys(words))
    if origin is Literal:
        return "one of " + ", ".join(shown(arg) if not isinstance(arg, str) else arg for arg in args)
    if hint is Any:
        return "values" if plural else "a value"
    if origin in (list, set, frozenset) or (origin is tuple and len(args) == 2 and args[1] is Ellipsis):
        return ("lists of " if plural else "a list of ") + describe(args[0], plural=True)
    if origin is tuple:
        inner = ", ".join(describe(arg) for arg in args)
        return f"lists ({inner})" if plural else f"a list of {len(args)} ({inner})"
    if origin in (dict, Mapping):
        return ("tables of " if plural else "a table of ") + describe(args[1], plural=True)
    singular, several = {
        bool: ("true or false", "true or false"),
        int: ("a whole number", "whole numbers"),
        float: ("a number", "numbers"),
        str: ("a string", "strings"),
        list: ("a list", "lists"),
        type(None): ("null", "null"),
    }.get(hint, ("a table", "tables"))
    return several if plural else singular


def plain(value: Any) -> None:
    """Raise Wrong unless `value` is made of what JSON has: no dates, no nan, no number without end."""
    if isinstance(value, float) and math.isnan(value):
        raise Wrong("must be a number, not nan")
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        raise Wrong("is too large")
    if isinstance(value, (list, tuple)):
        for item in value:
            plain(item)
    elif isinstance(value, dict):
        for item in value.values():
            plain(item)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise Wrong(f"cannot be {kind_of(value)}")


def check(key: str, value: Any) -> Any:
    """`value` as its knob has it. Raises Wrong with the end of a sentence: `must be at least 0`."""
    from pydantic import ValidationError

    hint = known()[key][1]
    if value is None and default(key) is not None:
        raise Wrong(f"must be {describe(hint)}, not null")
    try:
        if isinstance(value, float):
            plain(value)
        found = adapter(key).validate_json(json.dumps(value), strict=True)
        plain(value)
    except ValidationError as error:
        raise Wrong(_explain(error, value, hint)) from None
    except TypeError:
        if isinstance(value, (dict, list, tuple)):
            plain(value)
        raise Wrong(f"must be {describe(hint)}, not {kind_of(value)}") from None
    except RecursionError:
        raise Wrong("is nested too deeply") from None
    except Wrong:
        raise
    except ValueError:
        raise Wrong("is too large") from None
    return found


def _walk(value: Any, loc: tuple[int | str, ...]) -> tuple[str, Any]:
    """Where in `value` an error lies, in words; parts of `loc` that name a branch of a union are passed over."""
    words = []
    for part in loc:
        if isinstance(value, (list, tuple)) and isinstance(part, int) and part < len(value):
            words.append(f"item {part + 1}")
            value = value[part]
        elif isinstance(value, dict) and part in value:
            words.append(f"key {printable(str(part), 40)}")
            value = value[part]
    return ", ".join(words), value


TYPE_ERRORS = {"int_type": int, "float_type": float, "string_type": str, "bool_type": bool, "list_type": list}


def _explain(error: ValidationError, value: Any, hint: Any) -> str:
    """One sentence for a failed value: the bound it broke, or the part that is wrong, or what was expected."""
    found = error.errors(include_url=False, include_context=True, include_input=False)
    if any(item["type"] == "json_invalid" for item in found):
        return "is not Unicode text"
    nested = sorted(
        ((_walk(value, item["loc"]), item) for item in found), key=lambda pair: -len(pair[0][0].split(", "))
    )
    deepest = [pair for pair in nested if pair[0][0]] or nested
    # In a union the branch that got furthest is the one that was meant; a broken bound means the type was right.
    (where, part), item = next((pair for pair in deepest if _bound(pair[1])), deepest[0])
    prefix = f"{where} " if where else ""
    bound = _bound(item)
    if bound:
        return f"{prefix}must be {bound}"
    if item["type"] in ("missing", "too_short", "too_long"):
        amount = "many" if item["type"] == "too_long" else "few"
        return f"{prefix}has too {amount} items" + ("" if where else f"; must be {describe(hint)}")
    if item["type"] == "literal_error" and isinstance(part, str):
        near = did_you_mean(part, [arg for arg in _literals(hint) if isinstance(arg, str)])
        return f"{prefix}must be {describe(hint)}" + (f" (did you mean {near}?)" if near else "")
    if where and item["type"] in TYPE_ERRORS:
        return f"{prefix}must be {describe(TYPE_ERRORS[item['type']])}, not {kind_of(part)}"
    if not where and kind_of(value) not in describe(hint):
        return f"must be {describe(hint)}, not {kind_of(value)}"
    message = printable(str(item["msg"]))
    if where:
        return f"{where}: {message[:1].lower() + message[1:]}"
    return f"must be {describe(hint)} ({message[:1].lower() + message[1:]})"


def _literals(hint: Any) -> list[Any]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [found for arg in get_args(hint) for found in _literals(arg)]


def _bound(item: Any) -> str:
    """The bound that a pydantic error names, in words, or an empty string."""
    context = item.get("ctx") or {}
    words = {
        "greater_than_equal": ("at least {}", "ge"),
        "greater_than": ("above {}", "gt"),
        "less_than_equal": ("at most {}", "le"),
        "less_than": ("below {}", "lt"),
        "multiple_of": ("a multiple of {}", "multiple_of"),
        "string_too_short": ("of at least {} characters", "min_length"),
        "string_too_long": ("of at most {} characters", "max_length"),
    }.get(item["type"])
    if words is None:
        return ""
    limit = context.get(words[1])
    return words[0].format(f"{limit:g}" if isinstance(limit, float) else limit)


def named(key: str) -> str:
    """A key as it would be written, safe on a terminal."""
    return printable(write_key(key), 60)
