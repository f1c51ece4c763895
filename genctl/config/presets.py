"""Presets: TOML files with an `about` line and any knobs, found by name or path, which may extend one another."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from genctl.config.check import Wrong, accepted, check, did_you_mean, known, named, shown
from genctl.config.layers import SET, SPECIAL, Layer
from genctl.config.toml import decode, lines, parse, printable, read_bytes
from genctl.errors import PresetError

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
MAX_DEPTH = 16


def current_folder() -> Path:
    """Where we are. Raises PresetError if that folder has been removed meanwhile."""
    try:
        return Path.cwd()
    except OSError as error:
        raise PresetError("the current folder no longer exists") from error


@dataclass(frozen=True)
class Folder:
    """A place where presets are looked for by name."""

    where: str  # project | user | shipped
    path: Path


def config_home(environment: Mapping[str, str] | None = None) -> Path:
    """The user's folder for genctl: `$XDG_CONFIG_HOME/genctl`, `~/.config/genctl` by default."""
    said = (os.environ if environment is None else environment).get("XDG_CONFIG_HOME", "")
    # The specification asks that a relative path be passed over.
    base = Path(said) if Path(said).is_absolute() else Path("~/.config").expanduser()
    return base / "genctl"


def shipped_folder() -> Path:
    """Where the presets that come with genctl lie: inside the wheel, or at the root of a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_presets"
    return inside if inside.is_dir() else package.parent / "presets"


def folders(cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> list[Folder]:
    """Where a preset's name is looked up, in order."""
    return [
        Folder("project", (cwd or current_folder()) / "presets"),
        Folder("user", config_home(environment) / "presets"),
        Folder("shipped", shipped_folder()),
    ]


@dataclass(frozen=True)
class Found:
    """A preset that a name leads to."""

    name: str
    where: str
    path: Path


def available(places: Sequence[Folder] | None = None) -> list[Found]:
    """Every preset that has a name, sorted; where two share one, the one that the name leads to."""
    found: dict[str, Found] = {}
    for folder in folders() if places is None else places:
        try:
            paths = [path for path in folder.path.glob("*.toml") if NAME.fullmatch(path.stem) and path.is_file()]
        except OSError:  # a folder that may not be read offers nothing
            continue
        for path in paths:
            found.setdefault(path.stem, Found(path.stem, folder.where, path))
    return sorted(found.values(), key=lambda item: item.name)


def is_path(name: str) -> bool:
    """Whether `name` says which file, rather than naming a preset."""
    return name.endswith(".toml") or "/" in name or os.sep in name


def find(name: str, places: Sequence[Folder] | None = None) -> Path:
    """The file of a preset given by path or name.

    Raises PresetError if there is none, if the name is none, or if it leads out of the folders of presets.
    """
    if is_path(name):
        try:
            return Path(name).expanduser()
        except RuntimeError as error:  # ~ of a user whom nobody knows
            raise PresetError(f"{printable(name)}: no such file") from error
    if not NAME.fullmatch(name):
        raise PresetError(f"preset {shown(name)}: a name has only letters, digits, _, . and -")
    places = folders() if places is None else places
    for folder in places:
        path = folder.path / f"{name}.toml"
        if path.is_file():
            if not path.resolve().is_relative_to(folder.path.resolve()):
                raise PresetError(
                    f"preset {name}: {printable(str(path))} is a link that leads out of its folder",
                    hint="give the path of the file instead",
                )
            return path
    near = did_you_mean(name, [item.name for item in available(places)])
    looked = ", ".join(printable(str(folder.path)) for folder in places)
    meant = f"; did you mean {near}?" if near else ""
    raise PresetError(f"preset {name}: no such preset{meant} (looked in {looked})", hint="see: genctl presets list")


def load(names: Sequence[str], places: Sequence[Folder] | None = None) -> list[Layer]:
    """The layers of several presets, lowest first, each preset's own below it by what it extends.

    Raises PresetError where a file cannot be found or read, is no TOML, or extends itself.
    """
    places = folders() if places is None else places
    layers: list[Layer] = []
    for name in names:
        seen: set[Path] = set()
        layers += _load(find(name, places), (), seen, places)
    return layers


def load_text(text: str, name: str, places: Sequence[Folder] | None = None) -> list[Layer]:
    """The layers of a preset given as text; `name` is what its mistakes are told under."""
    return _layers(text, name, Path.cwd(), (), set(), folders() if places is None else places)


def _load(path: Path, chain: tuple[Path, ...], seen: set[Path], places: Sequence[Folder]) -> Iterator[Layer]:
    """What `path` extends, then `path`; a file that several extend is laid down once, the first time."""
    name = short(path)
    try:
        real = path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a NUL in the name
        raise PresetError(f"{name}: cannot be read: {printable(str(error))}") from error
    if real in chain:
        circle = [*chain[chain.index(real) :], real]
        raise PresetError(f"{name}: extends itself: {' -> '.join(printable(item.name) for item in circle)}")
    if len(chain) >= MAX_DEPTH:
        raise PresetError(f"{name}: more than {MAX_DEPTH} presets extend one another")
    if real in seen:
        return
    seen.add(real)
    yield from _layers(decode(read_bytes(path), name), name, path.parent, (*chain, real), seen, places)


def _layers(
    text: str, name: str, base: Path, chain: tuple[Path, ...], seen: set[Path], places: Sequence[Folder]
) -> list[Layer]:
    values = parse(text, name)
    numbers = lines(text)
    where = {key: f"{name}:{numbers[key]}" if key in numbers else name for key in values}
    parents = _names("extends", values.pop("extends", []), where.get("extends", name))
    layers: list[Layer] = []
    for parent in parents:
        layers += _load(_parent(parent, base, where["extends"], places), chain, seen, places)
    return [*layers, Layer(name, values, where, "user")]


def _names(key: str, value: Any, place: str) -> list[str]:
    """`"one"` or `["several"]` as a list. Raises PresetError for anything else."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(item, str) and item for item in names):
        raise PresetError(f"{place}: {key} = {shown(value)}: must be the name of a preset, or a list of names")
    return names


def preset_names(values: dict[str, Any], place: str) -> list[str]:
    """Take `preset = "name"` (or a list) out of the values of a settings file."""
    return _names("preset", values.pop("preset", []), place)


def _parent(name: str, base: Path, place: str, places: Sequence[Folder]) -> Path:
    """The file that `extends = name` means. A file leads only to presets by name and to files beside or below it."""
    if not is_path(name):
        try:
            return find(name, places)
        except PresetError as error:
            raise PresetError(f"{place}: extends: {error.message}", hint=error.hint) from None
    path = base / name
    try:
        inside = path.resolve().is_relative_to(base.resolve())
    except (OSError, ValueError, RuntimeError):
        inside = False
    if Path(name).is_absolute() or not inside:
        raise PresetError(f"{place}: extends = {shown(name)}: leads out of the folder of the file")
    return path


def short(path: Path) -> str:
    """A path as short as it can be said, safe on one line."""
    try:
        return printable(str(path.relative_to(Path.cwd())))
    except (ValueError, OSError):
        return printable(str(path))


def about(path: Path) -> str:
    """The `about` line of a preset. Raises PresetError where the file cannot be read or holds none that is text."""
    name = short(path)
    said = parse(decode(read_bytes(path), name), name).get("about", "")
    if not isinstance(said, str):
        raise PresetError(f"{name}: about = {shown(said)}: must be a string")
    return said


def parse_value(key: str, text: str) -> Any:
    """A value said on the command line or in the environment: TOML, else the bare text.

    A knob that takes text gets the text as it stands where TOML would make something else of it: the revision 1234567
    is no number.
    """
    try:
        table = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = table.get("value") if len(table) == 1 else text
    if key in known() and not isinstance(value, str):
        try:
            check(key, value)
        except Wrong:
            try:
                return check(key, text)
            except Wrong:
                pass
    return value


def parse_set(text: str) -> Layer:
    """One `--set key=value` as a layer. Raises PresetError, naming `--set`."""
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not key:
        raise PresetError(f"--set {shown(text)}: must be key=value, such as --set top_k=20")
    if key not in known() and (folded := key.replace("-", "_")) in known():
        key = folded
    if key == "extends":
        raise PresetError("--set extends: only a preset file extends another; use --preset")
    return Layer(SET, {key: parse_value(key, value.strip())}, {key: f"{SET} {named(key)}"}, "command")


def parse_sets(texts: Sequence[str]) -> list[Layer]:
    """Every `--set`, the later ones on top. Raises PresetError with all that are no key=value."""
    layers, mistakes = [], []
    for text in texts:
        try:
            layers.append(parse_set(text))
        except PresetError as error:
            mistakes.append(error.message)
    if mistakes:
        raise PresetError("\n".join(mistakes))
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= layer.values
    return [Layer(SET, merged, {key: f"{SET} {named(key)}" for key in merged}, "command")] if merged else []


def keys() -> list[str]:
    """Every key that a preset may hold."""
    return ["about", "extends", *accepted(), *SPECIAL[1:]]
