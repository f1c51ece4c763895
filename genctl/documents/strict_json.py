"""JSON as the standard has it: keys once, finite numbers, bounded nesting. Python's reader is more generous."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from genctl.errors import quote, reason_of

DEEPEST = 64  # levels of nesting, so that recursive code is safe
MOST_VALUES = 4_000_000  # in one document: each takes up to a hundred bytes of memory


class BadJson(ValueError):
    """What is wrong with a JSON text, as a sentence without its place."""


class Incomplete(BadJson):
    """It is not JSON, as a text that is cut short is not."""


class DuplicateKey(ValueError):
    """An object has `key` twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key!r:.80} is given twice")
        self.key = key


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for `json.loads`. Raises DuplicateKey."""
    items = dict(pairs)
    if len(items) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKey(key)
            seen.add(key)
    return items


def loads(text: str | bytes, *, finite: bool = True) -> Any:
    """The value of a JSON text; bytes are UTF-8. Raises BadJson.

    Refused are a key that is given twice, numbers that are not finite or have thousands of digits, more than DEEPEST
    levels of nesting, and more than MOST_VALUES values. Unless `finite`, numbers may be NaN or infinite, as some
    servers write them.
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        if len(text) > MOST_VALUES and sum(map(text.count, ",[{")) > MOST_VALUES:
            raise BadJson(f"it holds more than {MOST_VALUES:,} values")
        if text.startswith("\ufeff"):
            raise Incomplete("not JSON: a byte order mark at column 1")
        value = (_DECODER if finite else _GENEROUS).decode(text)
    except UnicodeDecodeError as error:
        raise Incomplete(f"byte {error.start + 1} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise Incomplete(reason_of(error)) from None
    except RecursionError:
        raise BadJson(_TOO_DEEP) from None
    except DuplicateKey as error:
        raise BadJson(f"the key {quote(error.key)} occurs twice") from None
    except BadJson:
        raise
    except ValueError:  # the interpreter's limit on the digits of an integer
        raise BadJson("a number has too many digits") from None
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value):
        raise BadJson(_TOO_DEEP)
    return value


_TOO_DEEP = f"nested too deeply: more than {DEEPEST} levels"


def _is_deep(value: Any) -> bool:
    level = [value]  # the objects and lists of a level
    for _ in range(DEEPEST):
        parts = (item.values() if isinstance(item, dict) else item for item in level)
        level = [inner for part in parts for inner in part if isinstance(inner, (dict, list))]
    return bool(level)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise BadJson("a number is too large")
    return value


def _constant(name: str) -> NoReturn:
    raise BadJson(f"not JSON: {name} is not a JSON number")


_GENEROUS = json.JSONDecoder(object_pairs_hook=once)
_DECODER = json.JSONDecoder(object_pairs_hook=once, parse_float=_finite, parse_constant=_constant)


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {str: "a string", int: "an integer", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
