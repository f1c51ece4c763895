"""Settings that stand without being said: the user file, the project file, and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from genctl.config.check import UNSAFE, accepted, did_you_mean, known
from genctl.config.layers import Layer
from genctl.config.presets import Folder, config_home, current_folder, load, parse_value, preset_names, short
from genctl.config.toml import decode, lines, parse, printable, read_bytes
from genctl.errors import PresetError

PREFIX = "GENCTL_"
OTHER_VARIABLES = ("GENCTL_UPDATE_SCREENS",)
TEST_PREFIX = "GENCTL_TEST"


def user_file(environment: Mapping[str, str] | None = None) -> Path:
    """The user's settings: `$XDG_CONFIG_HOME/genctl/config.toml`."""
    return config_home(environment) / "config.toml"


def project_file(cwd: Path | None = None) -> Path | None:
    """The nearest `genctl.toml`, or `pyproject.toml` with a table `tool.genctl`, from `cwd` upwards.

    The search ends at the root of the repository or at the home folder; outside both, only `cwd` is looked at, so that
    nobody else's file in a shared folder above it counts. Raises PresetError where one folder holds both kinds, or
    where a pyproject.toml that speaks of genctl is no TOML.
    """
    here = (cwd or current_folder()).absolute()
    home = Path("~").expanduser()
    climb = [here, *here.parents]
    end = next((n for n, folder in enumerate(climb) if folder == home or (folder / ".git").exists()), 0)
    for folder in climb[: end + 1]:
        own, shared = folder / "genctl.toml", folder / "pyproject.toml"
        found = [path for path in (own, shared) if path.is_file() and (path == own or _speaks_of_genctl(path))]
        if len(found) == 2:
            raise PresetError(f"{short(own)} and [tool.genctl] in {short(shared)} both hold settings; keep one of them")
        if found:
            return found[0]
    return None


def _speaks_of_genctl(path: Path) -> bool:
    data = read_bytes(path)
    return b"genctl" in data and _tool_table(parse(decode(data, short(path)), short(path))) is not None


def _tool_table(document: Mapping[str, Any]) -> Any:
    tool = document.get("tool")
    return tool.get("genctl") if isinstance(tool, dict) else None


def file_layers(path: Path, places: Sequence[Folder] | None = None) -> list[Layer]:
    """A settings file, above the presets that it names. Raises PresetError where it cannot be read or is no TOML."""
    name = short(path)
    text = decode(read_bytes(path), name)
    values: Any = parse(text, name)
    table = ("tool", "genctl") if path.name == "pyproject.toml" else ()
    if table:
        values = _tool_table(values)
        if not isinstance(values, dict):
            raise PresetError(f"{name}: tool.genctl must be a table")
    numbers = lines(text, table)
    where = {key: f"{name}:{numbers[key]}" if key in numbers else name for key in values}
    presets = preset_names(values, where.get("preset", name))
    return [*load(presets, places), Layer(name, values, where, "user")]


def environment_layer(environment: Mapping[str, str] | None = None) -> Layer:
    """The variables `GENCTL_<KNOB>`, read as `--set` reads its values; an empty one is not set.

    Raises PresetError for every variable of that prefix that names no knob, with the knob that was meant.
    """
    values: dict[str, Any] = {}
    mistakes = []
    for name, text in sorted((os.environ if environment is None else environment).items()):
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES or name.startswith(TEST_PREFIX) or not text:
            continue
        key = name.removeprefix(PREFIX).lower()
        if name != name.upper() or (key not in known() and key not in UNSAFE):
            near = did_you_mean(key, accepted())
            meant = f"; did you mean {PREFIX}{near.upper()}?" if near else ""
            mistakes.append(f"environment: {printable(name, 60)} names no knob{meant}")
            continue
        values[key] = parse_value(key, text)
    if mistakes:
        raise PresetError("\n".join(mistakes))
    return Layer("environment", values, {key: f"{PREFIX}{key.upper()}" for key in values}, "user")


def standing_layers(
    presets: Sequence[str] = (),
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    places: Sequence[Folder] | None = None,
) -> list[Layer]:
    """User file, project file, the presets named and the environment, lowest first; all their mistakes at once.

    What is left to the caller: the model's generation_config beneath, flags and a row's params on top.
    """
    layers: list[Layer] = []
    mistakes: list[str] = []
    hints: list[str] = []

    def add(read: Any) -> None:
        try:
            layers.extend(read())
        except PresetError as error:
            if error.message not in mistakes:
                mistakes.append(error.message)
            hints.append(error.hint)

    def project() -> list[Layer]:
        path = project_file(cwd)
        return [] if path is None else file_layers(path, places)

    def user() -> list[Layer]:
        path = user_file(environment)
        return file_layers(path, places) if os.path.lexists(path) else []

    add(user)
    add(project)
    for name in presets:
        add(lambda name=name: load([name], places))
    add(lambda: [environment_layer(environment)])
    if mistakes:
        raise PresetError("\n".join(mistakes), hint="; ".join(dict.fromkeys(hint for hint in hints if hint)))
    return layers
