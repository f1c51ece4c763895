"""`[[processors]]` and `[[stopping]]`: lists of tables, each with a name and the knobs of the named processor or
criterion.
"""

from __future__ import annotations

from typing import Any

from genctl.config.check import Wrong, check, did_you_mean, known, named, shown
from genctl.config.toml import printable
from genctl.errors import nearest
from genctl.fit import Misfit, check_plain, kind_of
from genctl.listed_knobs import CRITERIA, PROCESSORS
from genctl.plugins import installed

LISTS: dict[str, dict[str, tuple[str, ...]]] = {"processors": PROCESSORS, "stopping": CRITERIA}
WHAT = {"processors": "processor", "stopping": "stopping criterion"}


class ListMistakes(Exception):
    """All mistakes in a list, one sentence each."""

    def __init__(self, sentences: list[str]) -> None:
        super().__init__("; ".join(sentences))
        self.sentences = sentences


def check_list(key: str, value: Any) -> tuple[dict[str, Any], ...]:
    """The tables of a list, with values in the types of their knobs. Raises ListMistakes."""
    if not isinstance(value, (list, tuple)):
        found = "" if isinstance(value, dict) else f" = {shown(value)}:"
        raise ListMistakes([f"{key}{found} must be a list of tables ([[{key}]])"])
    mistakes: list[str] = []
    tables = [_table(key, number, item, mistakes) for number, item in enumerate(value, 1)]
    if mistakes:
        raise ListMistakes(mistakes)
    return tuple(tables)


def _table(key: str, number: int, item: Any, mistakes: list[str]) -> dict[str, Any]:
    """One checked table; its mistakes are added to `mistakes`."""
    place = f"{key}, item {number}"
    if not isinstance(item, dict):
        mistakes.append(f'{place}: must be a table with use = "NAME", not {shown(item)}')
        return {}
    use = item.get("use")
    if not isinstance(use, str) or not use.strip():
        near = "" if "use" in item else did_you_mean(next(iter(item), ""), ["use"])
        found = f", not {kind_of(use)}" if use is not None and not isinstance(use, str) else ""
        mistakes.append(f'{place}: needs use = "NAME"{found}' + (f"; did you mean {near}?" if near else ""))
        return {}
    if use in LISTS[key]:
        return {"use": use, **_values(f"{place}: {use}", LISTS[key][use], item, mistakes)}
    if ":" not in use and use not in (others := installed(WHAT[key])):
        near = nearest(use.strip().lower(), names := [*LISTS[key], *(printable(name, 60) for name in sorted(others))])
        meant = f"did you mean {near}?" if near else f"there are {', '.join(names)}, and package.module:Class"
        mistakes.append(f"{place}: unknown {WHAT[key]} {shown(use)}; {meant}")
    try:
        check_plain(item)
    except Misfit as misfit:
        mistakes.append(f"{place}: {misfit}")
    except RecursionError:
        mistakes.append(f"{place}: is nested too deeply")
    return dict(item)


def _values(place: str, knobs: tuple[str, ...], item: dict[str, Any], mistakes: list[str]) -> dict[str, Any]:
    values = {}
    for name, value in item.items():
        if name == "use":
            continue
        if name not in knobs:
            near = nearest(name, knobs)
            meant = f"did you mean {near}?" if near else f"it takes {' and '.join(knobs)}"
            mistakes.append(f"{place} has no key {named(name)}; {meant}")
            continue
        try:
            if name in known():
                value = check(name, value)
            else:
                check_plain(value)
        except Wrong as wrong:
            mistakes.append(f"{place}: {wrong}")
        except Misfit as misfit:
            mistakes.append(f"{place}: {name} = {shown(value)}: {misfit}")
        values[name] = value
    return values
