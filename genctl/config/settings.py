"""Settings from outside the command line: the user's file, the file of --config, presets, and the environment.

Nothing is read from the working directory unless it is named. Anyone may have written the file of a chat or a tree, so
it can only set how text is generated: it chooses no files, no code and no further checkpoints.

At the end: a resolved job as TOML (`--dry`), which is a preset again.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypedDict

from genctl import params
from genctl.config.check import did_you_mean, known, names_file
from genctl.config.layers import Layer, Resolved
from genctl.config.listed_knobs import LISTS
from genctl.config.names import UNSAFE
from genctl.config.presets import broken, expanded, file_layers, folders, in_this_folder, load, parse_value, user_file
from genctl.config.toml import printable, write_key, write_string, write_value
from genctl.errors import PresetError, hide_secrets, without_secrets
from genctl.params import Generation, Runtime

PREFIX = "GENCTL_"
CONFIG = "GENCTL_CONFIG"  # names a settings file, as --config does
OTHER_VARIABLES = (CONFIG, "GENCTL_UPDATE_SCREENS", "GENCTL_API_KEY", "GENCTL_PRODUCTS", "GENCTL_BUILD")
TEST_PREFIX = "GENCTL_TEST"
UNREAD = "genctl.toml"  # earlier versions read it unnamed


def config_layers(config: str | None = None) -> list[Layer]:
    """The user's file, and the one that `config` or else GENCTL_CONFIG names, lowest first, each above its presets.

    A file that cannot be read gives a `broken` layer, so that `resolve` reports all mistakes at once.
    """
    layers = file_layers(user_file(), key="preset") if os.path.lexists(user_file()) else []
    config = config or os.environ.get(CONFIG)
    try:
        return [*layers, *file_layers(expanded(config), key="preset")] if config else layers
    except PresetError as error:
        return [*layers, broken(str(config), error)]


def standing_layers(files: Sequence[Layer], presets: Sequence[str] = ()) -> list[Layer]:
    """The layers of `config_layers` (`files`), of the named presets and of the environment, lowest first.

    The caller adds the model's generation_config beneath, and flags and a row's params on top.
    """
    return [*files, *load(presets), environment_layer()]


def environment_layer(environment: Mapping[str, str] | None = None) -> Layer:
    """The variables `GENCTL_<KNOB>`, read as `--set` reads its values; an empty one counts as not set.

    Variables with that prefix that name no knob make the layer `broken`.
    """
    values: dict[str, Any] = {}
    mistakes: list[PresetError] = []
    for name, text in sorted((os.environ if environment is None else environment).items()):
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES or name.startswith(TEST_PREFIX) or not text:
            continue
        key = name.removeprefix(PREFIX).lower()
        if name == name.upper() and (key in known() or key in UNSAFE):
            values[key] = parse_value(key, text)
            continue
        near = did_you_mean(key, known())
        suggestion = f"; did you mean {PREFIX}{near.upper()}?" if near else ""
        mistakes.append(PresetError(f"environment: {printable(name, 60)} names no setting{suggestion}"))
    where = {key: f"{PREFIX}{key.upper()}" for key in values}
    return Layer("environment", values, where, "user", tuple(mistakes))


def unread_files(config: str | None, presets: Sequence[str] = ()) -> list[str]:
    """Notes on files in the working directory that earlier versions read even if they were not named."""
    named = config or os.environ.get(CONFIG)
    notes = []
    if os.path.lexists(UNREAD) and not (named and Path(named).absolute() == Path(UNREAD).absolute()):
        notes.append(f"{UNREAD} is not read; name it with --config {UNREAD}")
    for here in filter(None, map(in_this_folder, presets)):
        if any((folder / Path(here).name).is_file() for folder in folders().values()):  # else an error says so
            notes.append(f"{here.removeprefix('./')} is not read; name it with -p {here}")
    return notes


CHECKPOINTS = ("assistant_model", "amateur_model")


class SavedLayer(TypedDict):
    """Settings from one place, as `config.layers.Layer` has them."""

    origin: str
    kind: Literal["model", "user", "command", "row"]
    typed: bool
    values: dict[str, Any]


def saved_layers(layers: Iterable[Layer], allowed: Container[str]) -> tuple[SavedLayer, ...]:
    """The allowed settings of layers. A schema or grammar is saved as its text, so its file is not needed later."""
    saved: list[SavedLayer] = []
    for layer in layers:
        if values := {key: _text(key, value) for key, value in layer.values.items() if key in allowed}:
            saved.append({"origin": layer.origin, "kind": layer.kind, "typed": layer.typed, "values": values})
    return tuple(saved)


def _text(key: str, value: Any) -> Any:
    if key in ("json_schema", "grammar") and names_file(key, value):
        with suppress(OSError, ValueError, RuntimeError):
            return Path(value).expanduser().read_text(encoding="utf-8")
    return value


def objections(values: Mapping[str, Any], allowed: Container[str]) -> dict[str, str]:
    """The settings that a saved file may not have, each with the reason (`objection`)."""
    return {key: why for key, value in values.items() if (why := objection(key, value, allowed))}


def objection(key: str, value: Any, allowed: Container[str]) -> str:
    """Why a saved file may not set `key` to this value, as the end of "it …"; "" if it may."""
    if key not in allowed:
        return "is no setting of a saved file"
    if key in CHECKPOINTS and value is not None:
        return "names another checkpoint"
    if names_file(key, value):
        return "names a file"
    for table in value if key in LISTS and isinstance(value, (list, tuple)) else ():
        if not isinstance(table, dict) or table.get("use") not in LISTS[key]:
            return "names code that is no part of genctl"
        for name, inner in table.items():
            if name != "use" and (why := objection(name, inner, allowed)):
                return why
    return ""


def to_toml(resolved: Resolved, *, defaults: bool = True, always: Sequence[str] = ()) -> str:
    """`resolved` as a preset; without `defaults`, only the knobs that are set, and those of `always`.

    A comment gives the origin of every value. Values of None are left out. Passwords and keys in addresses are
    hidden; addresses of servers never have one.
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
            shown = hide_secrets(value) if kind is Runtime else value  # knobs of generation hold no addresses
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
