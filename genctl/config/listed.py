"""`[[processors]]` and `[[stopping]]`: lists of tables, each with a name and the knobs of the named processor or
criterion.
"""

from __future__ import annotations

from typing import Any

from genctl.config.check import (
    ListMistake,
    ListMistakes,
    Misfit,
    Wrong,
    check,
    check_plain,
    did_you_mean,
    kind_of,
    known,
    named,
    shown,
)
from genctl.config.listed_knobs import LISTS
from genctl.config.toml import printable
from genctl.errors import nearest

WHAT = {"processors": "processor", "stopping": "stopping criterion"}


def check_list(key: str, value: Any) -> tuple[dict[str, Any], ...]:
    """The tables of a list, with values in the types of their knobs. Raises ListMistakes."""
    if not isinstance(value, (list, tuple)):
        shown_value = "" if isinstance(value, dict) else f" = {shown(value)}:"
        raise ListMistakes([ListMistake(f"{key}{shown_value} must be a list of tables ([[{key}]])")])
    mistakes: list[ListMistake] = []
    tables = [_table(key, number, item, mistakes) for number, item in enumerate(value, 1)]
    if mistakes:
        raise ListMistakes(mistakes)
    return tuple(tables)


def _table(key: str, number: int, item: Any, mistakes: list[ListMistake]) -> dict[str, Any]:
    """One checked table; its mistakes are added to `mistakes`."""
    place = f"{key}, item {number}"
    if not isinstance(item, dict):
        mistakes.append(ListMistake(f'{place}: must be a table with use = "NAME", not {shown(item)}', number))
        return {}
    use = item.get("use")
    if not isinstance(use, str) or not use.strip():
        near = "" if "use" in item else did_you_mean(next(iter(item), ""), ["use"])
        actual = f", not {kind_of(use)}" if use is not None and not isinstance(use, str) else ""
        suggestion = f"; did you mean {near}?" if near else ""
        mistakes.append(ListMistake(f'{place}: needs use = "NAME"{actual}{suggestion}', number, "use"))
        return {}
    if use in LISTS[key]:
        return {"use": use, **_values(key, number, use, item, mistakes)}
    from genctl.config.plugins import installed

    if ":" not in use and use not in (others := installed(WHAT[key])):
        near = nearest(use.strip().lower(), names := [*LISTS[key], *(printable(name, 60) for name in sorted(others))])
        suggestion = f"did you mean {near}?" if near else f"there are {', '.join(names)}, and package.module:Class"
        mistakes.append(ListMistake(f"{place}: unknown {WHAT[key]} {shown(use)}; {suggestion}", number, "use"))
    try:
        check_plain(item)
    except Misfit as misfit:
        mistakes.append(ListMistake(f"{place}: {misfit}", number))
    except RecursionError:
        mistakes.append(ListMistake(f"{place}: is nested too deeply", number))
    return dict(item)


def _values(key: str, number: int, use: str, item: dict[str, Any], mistakes: list[ListMistake]) -> dict[str, Any]:
    """The knobs of a table, in their types."""
    knobs, place = LISTS[key][use], f"{key}, item {number}: {use}"
    values = {}
    for name, value in item.items():
        if name == "use":
            continue
        if name not in knobs:
            near = nearest(name, knobs)
            suggestion = f"did you mean {near}?" if near else f"it takes {' and '.join(knobs)}"
            mistakes.append(ListMistake(f"{place} has no key {named(name)}; {suggestion}", number, name))
            continue
        try:
            if name in known():
                value = check(name, value)
            else:
                check_plain(value)
        except Wrong as wrong:
            mistakes.append(ListMistake(f"{place}: {wrong}", number, name))
        except Misfit as misfit:
            mistakes.append(ListMistake(f"{place}: {name} = {shown(value)}: {misfit}", number, name))
        values[name] = value
    return values
