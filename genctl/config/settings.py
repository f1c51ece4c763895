"""Settings from outside the command line: the user file, the project file, presets, and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from genctl.config.check import UNSAFE, accepted, did_you_mean, known, shown
from genctl.config.conflicts import Found
from genctl.config.layers import Layer
from genctl.config.presets import (
    Folder,
    broken,
    config_home,
    current_folder,
    find,
    is_own,
    is_path,
    load,
    parse_value,
    reached,
    short,
    take_names,
)
from genctl.config.toml import decode, item_lines, lines, parse, printable, read_bytes
from genctl.errors import PresetError

PREFIX = "GENCTL_"
OTHER_VARIABLES = ("GENCTL_UPDATE_SCREENS", "GENCTL_API_KEY", "GENCTL_PRODUCTS", "GENCTL_BUILD")
TEST_PREFIX = "GENCTL_TEST"


def user_file(environment: Mapping[str, str] | None = None) -> Path:
    """The user's settings: `$XDG_CONFIG_HOME/genctl/config.toml`."""
    return config_home(environment) / "config.toml"


def project_file(cwd: Path | None = None) -> Path | None:
    """The nearest `genctl.toml`, or `pyproject.toml` with a table `tool.genctl`, from `cwd` upwards.

    The search ends at the root of the repository or at the home folder. Outside both only `cwd` counts, because a
    shared folder above it may belong to another user. Raises PresetError if one folder holds both kinds of file,
    or if a pyproject.toml that mentions genctl is not valid TOML.
    """
    here = (cwd or current_folder()).absolute()
    home = Path("~").expanduser()
    climb = [here, *here.parents]
    end = next((n for n, folder in enumerate(climb) if folder == home or (folder / ".git").exists()), 0)
    for folder in climb[: end + 1]:
        own, shared = folder / "genctl.toml", folder / "pyproject.toml"
        candidates = [path for path in (own, shared) if path.is_file() and (path == own or _mentions_genctl(path))]
        if len(candidates) == 2:
            raise PresetError(f"{short(own)} and [tool.genctl] in {short(shared)} both hold settings; keep one of them")
        if candidates:
            return candidates[0]
    return None


def _mentions_genctl(path: Path) -> bool:
    data = read_bytes(path)
    return b"genctl" in data and _tool_table(parse(decode(data, short(path)), short(path))) is not None


def _tool_table(document: Mapping[str, Any]) -> Any:
    tool = document.get("tool")
    return tool.get("genctl") if isinstance(tool, dict) else None


def file_layers(path: Path, places: Sequence[Folder] | None = None, *, found: Found = "") -> list[Layer]:
    """A settings file above the presets that it names; `broken` if it cannot be read or is not valid TOML.

    `found`: how the file was reached, if it is not the user's own. The presets that it names have the same origin.
    """
    name = short(path)
    table = ("tool", "genctl") if path.name == "pyproject.toml" else ()
    try:
        text = decode(read_bytes(path), name)
        values: Any = parse(text, name)
        if table:
            values = _tool_table(values)
        if not isinstance(values, dict):
            raise PresetError(f"{name}: tool.genctl must be a table")
    except PresetError as error:
        return [broken(name, error)]
    numbers = lines(text, table)
    where = {key: f"{name}:{numbers[key]}" if key in numbers else name for key in values}
    try:
        names = take_names("preset", values, where)
        if found:
            _check_paths(names, path, where["preset"] if names else name)
        presets = load(names, places)
    except PresetError as error:
        presets = [broken(name, error)]
    if found:
        presets = reached(presets, name, found)
    items = {place: f"{name}:{line}" for place, line in item_lines(text, table).items()}
    return [*presets, Layer(name, values, where, "user", found=found, folder=path.parent, items=items)]


def _check_paths(names: Sequence[str], file: Path, place: str) -> None:
    """Raises PresetError for a path of a found file that leads out of the folder of the file."""
    for each in filter(is_path, names):
        try:
            inside = find(each).resolve().is_relative_to(file.parent.resolve())
        except (OSError, ValueError, RuntimeError):
            inside = False
        if not inside:
            raise PresetError(f"{place}: preset = {shown(each)}: leads out of the folder of the file")


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
        near = did_you_mean(key, accepted())
        suggestion = f"; did you mean {PREFIX}{near.upper()}?" if near else ""
        mistakes.append(PresetError(f"environment: {printable(name, 60)} names no setting{suggestion}"))
    where = {key: f"{PREFIX}{key.upper()}" for key in values}
    return Layer("environment", values, where, "user", tuple(mistakes))


def standing_layers(
    presets: Sequence[str] = (),
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    places: Sequence[Folder] | None = None,
) -> list[Layer]:
    """User file, project file, the named presets and the environment, lowest first.

    The caller adds the model's generation_config beneath, and flags and a row's params on top. Unreadable files are
    `broken` layers, so that `resolve` reports all mistakes at once.
    """
    user = user_file(environment)
    layers = file_layers(user, places) if os.path.lexists(user) else []
    try:
        project = project_file(cwd)
        layers += [] if project is None else file_layers(project, places, found="" if is_own(project) else "unnamed")
    except PresetError as error:
        layers.append(broken("project file", error))
    return [*layers, *load(presets, places), environment_layer(environment)]
