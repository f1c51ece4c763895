"""Check one value against its knob, and the names of keys: strict types, bounds, suggestions."""

from __future__ import annotations

import datetime
import math
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from genctl import params
from genctl.config.names import ALIASES, CHOICES_ELSEWHERE, FILES, OF_RUN
from genctl.config.toml import printable, write_key, write_value
from genctl.errors import nearest

# -- check a value against a type with bounds: strict types, and a plain sentence for each mistake ---------------------
# The types are those of knobs: bool, int, float, str, Any, list, tuple, dict, Literal, unions, and Annotated bounds.


MOST_BITS = 64  # of a whole number: no id, count or seed is larger


class Misfit(ValueError):
    """A value that does not fit. `path` leads to the part that is wrong; `words` is the end of a sentence.

    `right_type`: only the value is wrong, so for a union the error of this branch is reported.
    """

    def __init__(self, words: str, *path: str, right_type: bool = False) -> None:
        super().__init__(" ".join([", ".join(path), words]).strip())
        self.words, self.path, self.right_type = words, path, right_type


def fit(hint: Any, value: Any) -> Any:
    """`value` in the type `hint`; a whole number becomes a float where a float is expected.

    Raises Misfit with the end of a sentence, such as "must be at least 0" or "item 2 must be a string, not a list".
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        check_plain(value)
        return value
    if origin is Annotated:
        whole = type(value) is int and args[0] in (int, float)
        fitted = value if whole else fit(args[0], value)
        for bound in args[1:]:
            name, words, holds = BOUNDS[type(bound)]
            limit = getattr(bound, name)
            if not holds(fitted, limit):
                shown_limit = f"{limit:g}" if isinstance(limit, float) else limit
                raise Misfit(f"must be {words} {shown_limit}", right_type=True)
        return fit(args[0], fitted)
    if origin in (Union, types.UnionType):
        return _fit_union(hint, args, value)
    if origin is Literal:
        for arg in args:
            if value == arg and isinstance(value, bool) == isinstance(arg, bool):
                return arg
        raise _not_a_choice(hint, value)
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        if origin is tuple and len(value) != len(args):
            amount = "many" if len(value) > len(args) else "few"
            raise Misfit(f"has too {amount} items; must be {describe(hint)}", right_type=True)
        kinds = args if origin is tuple else args * len(value)
        return origin(_fit_each((f"item {n}", *pair) for n, pair in enumerate(zip(kinds, value, strict=True), 1)))
    if origin is dict and isinstance(value, dict):
        for key in value:
            fit(args[0], key)
        return dict(
            zip(value, _fit_each((f"key {key[:40]}", args[1], item) for key, item in value.items()), strict=True)
        )
    if origin is None and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        check_plain(value)
        return value
    if hint is float and type(value) is int:
        check_plain(value)
        return float(value)
    raise Misfit(f"must be {describe(hint)}, not {kind_of(value)}")


def _fit_union(hint: Any, branches: tuple[Any, ...], value: Any) -> Any:
    misfits = []
    for branch in branches:
        try:
            return fit(branch, value)
        except Misfit as misfit:
            misfits.append(misfit)
    if isinstance(value, str) and any(get_origin(branch) is Literal for branch in branches):
        raise _not_a_choice(hint, value)
    best = max(misfits, key=lambda misfit: (misfit.right_type, len(misfit.path)))
    raise best if best.right_type or best.path else Misfit(f"must be {describe(hint)}, not {kind_of(value)}")


def _not_a_choice(hint: Any, value: Any) -> Misfit:
    expected = f"must be {describe(hint)}"
    if not isinstance(value, str):
        return Misfit(f"{expected}, not {kind_of(value)}")
    near = nearest(CHOICES_ELSEWHERE.get(value.lower(), value.lower()), _choices(hint))
    return Misfit(f"did you mean {near}? It {expected}" if near else expected, right_type=bool(near))


def _choices(hint: Any) -> Iterator[str]:
    for arg in get_args(hint):
        if isinstance(arg, str):
            yield arg
        else:
            yield from _choices(arg)


def _fit_each(parts: Iterable[tuple[str, Any, Any]]) -> list[Any]:
    """Fit the parts of a list or table, given as name, type and value."""
    fitted = []
    for name, hint, value in parts:
        try:
            fitted.append(fit(hint, value))
        except Misfit as misfit:
            raise Misfit(misfit.words, name, *misfit.path, right_type=misfit.right_type) from None
    return fitted


BOUNDS: dict[type, tuple[str, str, Callable[[Any, Any], bool]]] = {
    Ge: ("ge", "at least", operator.ge),
    Gt: ("gt", "above", operator.gt),
    Le: ("le", "at most", operator.le),
    Lt: ("lt", "below", operator.lt),
}


def check_plain(value: Any) -> None:
    """Raise Misfit unless `value` can be JSON: no dates, no nan, no halves of surrogate pairs, no huge numbers."""
    if isinstance(value, (list, tuple)):
        for item in value:
            check_plain(item)
    elif isinstance(value, dict):
        check_plain([*value.keys(), *value.values()])
    elif isinstance(value, float) and math.isnan(value):
        raise Misfit("must be a number, not nan", right_type=True)
    elif isinstance(value, str) and any("\ud800" <= mark <= "\udfff" for mark in value):
        raise Misfit("is not Unicode text", right_type=True)
    elif isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise Misfit("is too large", right_type=True)
    elif not isinstance(value, (bool, int, float, str, type(None))):
        raise Misfit(f"cannot be {kind_of(value)}", right_type=True)


KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "a boolean"),
    (int, "a whole number"),
    (float, "a decimal number"),
    (str, "a string"),
    (dict, "a table"),
    ((list, tuple), "a list"),
    ((datetime.date, datetime.time), "a date or time"),
    (type(None), "null"),
)


def kind_of(value: Any) -> str:
    """The kind of a value, in TOML's terms."""
    return next((name for kind, name in KINDS if isinstance(value, kind)), type(value).__name__)


def describe(hint: Any, *, plural: bool = False) -> str:
    """A type in words: `int | list[int] | None` is "a whole number or a list of whole numbers"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return describe(args[0], plural=plural)
    if origin in (Union, types.UnionType):
        words = [describe(arg, plural=plural) for arg in args if arg is not type(None)]
        return " or ".join(dict.fromkeys(words))
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(map(str, args))
    if hint is Any:
        return "values" if plural else "a value"
    if origin is list:
        return ("lists of " if plural else "a list of ") + describe(args[0], plural=True)
    if origin is tuple:
        inner = ", ".join(describe(arg) for arg in args)
        return f"lists ({inner})" if plural else f"a list of {len(args)} ({inner})"
    if origin is dict:
        return ("tables of " if plural else "a table of ") + describe(args[1], plural=True)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", type(None): "null"}
    name = names.get(hint, "a table")
    return f"{name.removeprefix('a ')}s" if plural and name.startswith("a ") else name


# -- values that may be the names of files -----------------------------------------------------------------------------

# the start rule of a grammar: in llama.cpp's GBNF, in Lark
_GRAMMAR = re.compile(r"^[ \t]*(?:root\s*::=|\??start[ \t]*(?:\[[^\]\n]{0,200}\][ \t]*)?:)", re.MULTILINE)
_HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")


def names_file(key: str, value: Any) -> bool:
    """Whether the value of a knob names a file or a folder. A schema or a grammar may be given inline."""
    if key not in FILES or not isinstance(value, str):
        return False
    if key == "json_schema":
        return not value.lstrip().startswith("{") and value.strip() not in ("true", "false")
    if key == "grammar":
        return _GRAMMAR.search(value) is None
    return not value.startswith("builtin:") and (_HUB_ID.fullmatch(value) is None or Path(value).exists())


class Wrong(ValueError):
    """The error of a value, without its place, or the errors of a list, one a line.

    `near` is the nearest valid key, if one is close.
    """

    def __init__(self, words: str, *, near: str = "", hint: str = "") -> None:
        super().__init__(words)
        self.near, self.hint = near, hint


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


def _folded(name: str) -> str:
    """A name in the spelling of knobs: `--top-p` and `topP` are top_p."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip(" -")).lower().replace("-", "_").replace(" ", "_")


def setting_of(name: str) -> str:
    """The knob that `name` means in an input row, with dashes or in another tool's spelling; "" if there is none."""
    folded = _folded(name)
    knob = ALIASES.get(folded, folded)
    if knob not in known() or params.knobs(known()[knob][0])[knob].metadata["group"] == params.MODEL:
        return ""
    return "" if knob in OF_RUN else knob


def did_you_mean(key: str, choices: Iterable[str]) -> str:
    """The choice that is nearest to `key`, or an empty string."""
    choices = list(choices)
    folded = _folded(key)
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


class Unparsed(NamedTuple):
    """A text that begins like a list or a table, but cannot be parsed as one."""

    text: str
    reason: str


def structured(hint: Any) -> bool:
    """Whether values of a type may be lists or tables."""
    return get_origin(hint) in (list, tuple, dict) or any(map(structured, get_args(hint)))


def check(key: str, value: Any) -> Any:
    """`value` in the type of its knob. Raises Wrong with a sentence: `top_k = -1: must be at least 0`."""
    if isinstance(value, Unparsed):
        raise Wrong(f"{key} = {shown(value.text)}: {value.reason}")
    try:
        return fit(known()[key][1], value)
    except Misfit as misfit:
        raise Wrong(f"{key} = {shown(value)}: {printable(str(misfit))}") from None
    except RecursionError:
        raise Wrong(f"{key}: is nested too deeply") from None
