"""Check a value against a knob's type and bounds, for the `processors` list."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from genctl.errors import UsageError
from genctl.params import hints

_BOUNDS = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}


def checked(knob: str, value: Any) -> Any:
    """`value` in the type of `knob`; an int becomes a float if that is the type.

    Raises UsageError if it does not fit the type or its bounds.
    """
    fits, converted = _fit(hints()[knob], value)
    if not fits:
        raise UsageError(f"{knob}: must be {describe(hints()[knob])}, but is {value!r}")
    return converted


def fits(hint: Any, value: Any) -> bool:
    """Whether `value` has this type; an int counts as a float."""
    return bool(_fit(hint, value)[0])


def describe(hint: Any) -> str:
    """A type in words: `a number at least 0.0 and at most 1.0, or nothing`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = [
            f"{_BOUNDS[type(b)][1]} {getattr(b, _BOUNDS[type(b)][0])}" for b in arguments[1:] if type(b) in _BOUNDS
        ]
        return " ".join([describe(arguments[0]), " and ".join(bounds)]).strip()
    if origin in (Union, types.UnionType):
        return ", or ".join(describe(argument) for argument in arguments if argument is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is list:
        return f"a list, each {describe(arguments[0])}"
    if origin is tuple:
        return "[" + ", ".join(map(describe, arguments)) + "]"
    if origin is dict:
        return "a table"
    names: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, str(hint))


def _fit(hint: Any, value: Any) -> tuple[bool, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True, value
    if hint is None or hint is type(None):
        return value is None, None
    if origin is Annotated:
        fits, converted = _fit(arguments[0], value)
        return fits and all(_within(bound, converted) for bound in arguments[1:]), converted
    if origin in (Union, types.UnionType):
        return next(
            ((True, converted) for fits, converted in (_fit(a, value) for a in arguments) if fits), (False, value)
        )
    if origin is Literal:
        return value in arguments, value
    if origin in (list, tuple):
        return _fit_each(origin, arguments, value)
    if origin is dict:
        if not isinstance(value, dict):
            return False, value
        pairs = [(_fit(arguments[0], key), _fit(arguments[1], item)) for key, item in value.items()]
        return all(key[0] and item[0] for key, item in pairs), {key[1]: item[1] for key, item in pairs}
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool, value
    if hint is float:
        return isinstance(value, (int, float)) and value == value, float(value) if isinstance(value, int) else value
    return isinstance(value, hint), value


def _fit_each(origin: Any, arguments: tuple[Any, ...], value: Any) -> tuple[bool, Any]:
    if not isinstance(value, (list, tuple)) or (origin is tuple and len(arguments) != len(value)):
        return False, value
    kinds = arguments if origin is tuple else arguments * len(value)
    fitted = [_fit(kind, item) for kind, item in zip(kinds, value, strict=True)]
    return all(fits for fits, _ in fitted), origin(converted for _, converted in fitted)


def _within(bound: Any, value: Any) -> bool:
    if isinstance(bound, Ge):
        return bool(value >= bound.ge)
    if isinstance(bound, Gt):
        return bool(value > bound.gt)
    if isinstance(bound, Le):
        return bool(value <= bound.le)
    return not isinstance(bound, Lt) or bool(value < bound.lt)
