"""A resolved job as TOML, with the origin of every value: the output of `--dry`, which is a preset again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genctl import params
from genctl.config.check import known
from genctl.config.layers import Resolved
from genctl.config.listed_knobs import LISTS
from genctl.config.toml import printable, write_key, write_string, write_value
from genctl.errors import hide_secrets, without_secrets
from genctl.params import Generation, Runtime


def to_toml(resolved: Resolved, *, defaults: bool = True, always: Sequence[str] = ()) -> str:
    """`resolved` as a preset; without `defaults`, only the knobs that are set, and those of `always`.

    A comment gives the origin of every value. Values of None are left out. Passwords and keys in addresses are
    hidden; no server is named by an address with one.
    """
    blocks: list[str] = []
    if resolved.about:
        blocks.append(f"about = {write_string(without_secrets(resolved.about))}")
    for kind, values in ((Generation, resolved.generation), (Runtime, resolved.runtime)):
        groups: dict[str, list[tuple[str, str]]] = {}
        for key, item in params.knobs(kind).items():
            value, origin = getattr(values, key), resolved.origins.get(key, "default")
            if value is None or (origin == "default" and not defaults and key not in always):
                continue
            shown = hide_secrets(value) if kind is Runtime else value  # no text to be generated is an address
            entry = f"{key} = {write_value(shown)}", printable(origin)
            groups.setdefault(str(item.metadata["group"]), []).append(entry)
        for group, entries in groups.items():
            width = min(max(len(code) for code, _ in entries), 44)
            blocks.append("\n".join([f"# {group}", *(f"{code:<{width}}  # {origin}" for code, origin in entries)]))
    # An empty list means "no processors at all" and must come before the first table.
    places = {key: resolved.settings[key].place if key in resolved.settings else "default" for key in LISTS}
    blocks += [f"{key} = []  # {place}" for key, place in places.items() if getattr(resolved, key) == ()]
    for key, place in places.items():
        for table in getattr(resolved, key) or ():
            lines = [f"{write_key(name)} = {write_value(value)}" for name, value in table.items() if value is not None]
            blocks.append("\n".join([f"[[{key}]]  # {place}", *lines]))
    return "\n\n".join(blocks) + "\n" if blocks else ""


def settings_of(resolved: Resolved) -> dict[str, Any]:
    """Every knob that has a value, as a flat dictionary (for records and `Began.settings`)."""
    both = {**vars(resolved.generation), **vars(resolved.runtime)}
    return {key: value for key, value in both.items() if key in known() and value is not None}
