"""Presets: TOML files with an `about` line and any knobs, found by name or path. A preset may extend others."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import tomli

from genctl.config import reader
from genctl.config.check import (
    Unparsed,
    Wrong,
    check,
    did_you_mean,
    known,
    named,
    shown,
    structured,
)
from genctl.config.layers import SET, Layer
from genctl.config.reader import BadJson
from genctl.config.toml import decode, lines_of, parse, printable, read_bytes
from genctl.errors import PresetError, cannot_read

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")


def config_home() -> Path:
    """The user's folder for genctl: `$XDG_CONFIG_HOME/genctl`, `~/.config/genctl` by default."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification says to ignore a relative path.
    base = Path(home) if Path(home).is_absolute() else Path("~/.config").expanduser()
    return base / "genctl"


def user_file() -> Path:
    """The user's settings: `$XDG_CONFIG_HOME/genctl/config.toml`."""
    return config_home() / "config.toml"


def shipped_folder() -> Path:
    """The folder of the presets that come with genctl: inside the wheel, or at the root of a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_presets"
    return inside if inside.is_dir() else package.parent / "presets"


def folders() -> dict[str, Path]:
    """The folders where a preset's name is looked up, in order."""
    return {"user": config_home() / "presets", "shipped": shipped_folder()}


class NamedPreset(NamedTuple):
    """A preset with a name. `where` is a key of `folders`."""

    name: str
    where: str
    path: Path


def available() -> list[NamedPreset]:
    """Every preset with a name, sorted; of two with the same name, the first in the order of the folders."""
    presets: dict[str, NamedPreset] = {}
    for where, folder in folders().items():
        with contextlib.suppress(OSError):  # no permission to read the folder
            for path in folder.glob("*.toml"):
                if NAME.fullmatch(path.stem) and path.is_file():
                    presets.setdefault(path.stem, NamedPreset(path.stem, where, path))
    return sorted(presets.values(), key=lambda item: item.name)


def is_path(name: str) -> bool:
    """Whether `name` is the path of a file, not the name of a preset."""
    return name.endswith(".toml") or "/" in name or os.sep in name


def title(name: str) -> str:
    """The title of a preset: the stem of a path, else its name."""
    return (name.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".toml") if is_path(name) else name) or name


def is_below(path: Path, folder: Path) -> bool:
    """Whether a file is in a folder or below it. Links are not followed: those in the user's folder are the user's."""
    return Path(os.path.abspath(path)).is_relative_to(folder)  # noqa: PTH100


def is_foreign(path: Path) -> bool:
    """Whether a file that the command line names is neither in the user's own folder nor one of genctl's."""
    return not is_below(path, config_home()) and not is_below(path, shipped_folder())


def expanded(name: str) -> Path:
    """The path with ~ expanded. Raises PresetError."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~ of an unknown user
        raise PresetError(cannot_read(printable(name), "no such file")) from error


def find(name: str) -> Path:
    """The file of a preset given by path or name. Raises PresetError for an unknown or malformed name."""
    prompt = f"-p is --preset; a prompt is an argument: genctl run {shown(name)}" if " " in name else ""
    if is_path(name):
        if prompt and not os.path.exists(expanded(name)):  # noqa: PTH110 — a long name, too
            raise PresetError(cannot_read(printable(name), "no such file"), hint=prompt)
        return expanded(name)
    if not NAME.fullmatch(name):
        raise PresetError(f"preset {shown(name)}: a name has only letters, digits, _, . and -", hint=prompt)
    paths = [folder / f"{name}.toml" for folder in folders().values()]
    if path := next((path for path in paths if path.is_file()), None):
        return path
    here = in_this_folder(name) or (f"./{name}.toml" if os.path.lexists(f"{name}.toml") else "")
    near = "" if here else did_you_mean(name, [item.name for item in available()])
    searched = ", ".join(printable(str(path.parent)) for path in paths)
    advice = f"; did you mean {near}?" if near else ""
    hint = (
        f"name the file: -p {here}" if here else "genctl presets list lists them; a prompt is an argument, without -p"
    )
    raise PresetError(f"preset {name}: no such preset{advice} (looked in {searched})", hint=hint)


def in_this_folder(name: str) -> str:
    """The file in `./presets`, where earlier versions also looked; "" if there is none, or `name` is a path."""
    path = f"./presets/{name}.toml"
    return path if not is_path(name) and os.path.lexists(path) else ""


def load(names: Sequence[str]) -> list[Layer]:
    """The layers of several presets, lowest first; those that a preset extends are below it.

    A preset that cannot be found or read, is not valid TOML, or extends itself gives a layer that is `broken`, so that
    `resolve` raises all mistakes together.
    """
    return [layer for name in names for layer in _named(name, "", (), set())]


def broken(name: str, error: PresetError, place: str = "") -> Layer:
    """A layer for a file that could not be read; `place` is where it was named."""
    if place:
        error = PresetError("\n".join(f"{place}: {line}" for line in error.message.split("\n")), hint=error.hint)
    return Layer(name, {}, declared="user", broken=(error,))


def _named(name: str, place: str, chain: tuple[Path, ...], seen: set[Path]) -> list[Layer]:
    """The layers of the preset `name`, which is named at `place`."""
    try:
        return file_layers(find(name), chain, seen)
    except PresetError as error:
        return [broken(name, error, place)]


def file_layers(
    path: Path,
    chain: tuple[Path, ...] = (),
    seen: set[Path] | None = None,
    *,
    key: Literal["extends", "preset"] = "extends",
) -> list[Layer]:
    """The layers of the presets that the file `path` names under `key`, then its own.

    `chain` are the files that extend this one, and `seen` those already read: each appears once. By path a preset
    extends only files in or below its folder; a settings file (`key` is "preset") may name any file.
    """
    name = path.stem if is_below(path, shipped_folder()) else short(path)
    seen = set() if seen is None else seen
    try:
        real = _real(path, name, chain)
        if real in seen:
            return []
        seen.add(real)
        table = read_table(path, name)
    except PresetError as error:
        return [broken(name, error)]
    layers: list[Layer] = []
    mistakes: list[PresetError] = []
    try:
        parents = take_names(key, table.values, table.where)
    except PresetError as error:
        parents, mistakes = [], [error]
    for parent in parents:
        place = table.where[key]
        if not is_path(parent):
            layers += _named(parent, f"{place}: {key}", (*chain, real), seen)
        elif key == "preset":
            from_here = parent if parent.startswith("~") else str(path.parent / parent)
            layers += _named(from_here, f"{place}: preset", (*chain, real), seen)
        elif _beside(parent, path.parent):
            layers += file_layers(path.parent / parent, (*chain, real), seen)
        else:
            mistakes.append(PresetError(f"{place}: extends = {shown(parent)}: leads out of the folder of the file"))
    own = Layer(
        name,
        table.values,
        table.where,
        "user",
        tuple(mistakes),
        foreign=is_foreign(path),
        is_user_file=path == user_file(),
    )
    return [*layers, own]


def _real(path: Path, name: str, chain: tuple[Path, ...]) -> Path:
    """`path` without links. Raises PresetError if its links form a loop, or if it extends itself (is in `chain`)."""
    try:
        real = path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a NUL in the name
        raise PresetError(cannot_read(name, "a loop of links" if isinstance(error, RuntimeError) else error)) from error
    if real in chain:
        circle = [*chain[chain.index(real) :], real]
        raise PresetError(f"{name}: extends itself: {' -> '.join(printable(item.name) for item in circle)}")
    return real


class SettingsTable(NamedTuple):
    """The settings of a file, and the place of each."""

    values: dict[str, Any]
    where: dict[str, str]


def read_table(path: Path, name: str) -> SettingsTable:
    """The table that a TOML file holds; messages call the file `name`. Raises PresetError."""
    text = decode(read_bytes(path), name)
    values = parse(text, name)
    lines = lines_of(text)
    return SettingsTable(values, {key: f"{name}:{lines[key]}" if key in lines else name for key in values})


def take_names(key: str, values: dict[str, Any], where: Mapping[str, str]) -> list[str]:
    """Take `key = "name"` or `key = ["name", …]` out of `values`. Raises PresetError for anything else."""
    value = values.pop(key, [])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(item, str) and item for item in names):
        raise PresetError(f"{where[key]}: {key} = {shown(value)}: must be the name of a preset, or a list of names")
    return names


def _beside(name: str, base: Path) -> bool:
    """Whether a path leads to a file in or below the folder `base`: a preset may extend no other files."""
    try:
        return not Path(name).is_absolute() and (base / name).resolve().is_relative_to(base.resolve())
    except (OSError, ValueError, RuntimeError):
        return False


def short(path: Path) -> str:
    """A path on one line, relative to the current folder if possible."""
    try:
        return printable(str(path.relative_to(Path.cwd())))
    except (ValueError, OSError):
        return printable(str(path))


def about(path: Path) -> str:
    """The `about` line of a preset. Raises PresetError if the file cannot be read or the line is not text."""
    name = short(path)
    text = parse(decode(read_bytes(path), name), name).get("about", "")
    if not isinstance(text, str):
        raise PresetError(f"{name}: about = {shown(text)}: must be a string")
    return text


_OF_TEXTS = re.compile(r'\s*[\[{][\s\[{]*"')  # the beginning of a list or table of texts, never of plain text


def parse_value(key: str, text: str) -> Any:
    """A value from the command line or the environment: a JSON list or object, TOML, else the bare text.

    The first reading that fits the knob counts: the revision 1234567 is text, the temperature .5 a number, the stop
    string [INST] not a list. For a knob of lists or tables, a list or table that cannot be read is `Unparsed`.
    """
    readings, reason = list[Any](), ""
    is_bracketed = text.lstrip()[:1] in ("[", "{") and key != "json_schema"  # a schema may be text, and is parsed later
    if is_bracketed:
        try:
            readings.append(reader.loads(text))
        except BadJson as error:
            reason = str(error).removeprefix("not JSON: ")
    try:
        table = tomli.loads(f"value = {text}")
        readings += [table["value"]] if len(table) == 1 else []
    except (ValueError, RecursionError):
        with contextlib.suppress(ValueError):  # 007, .5 and 1. are not TOML
            readings.append(int(text) if text.isdecimal() else float(text))
    if key not in known():
        return [*readings, text][0]
    hint = known()[key][1]
    of_texts = bool(_OF_TEXTS.match(text))
    for reading in (*readings, *([] if is_bracketed and of_texts and structured(hint) else [text])):
        with contextlib.suppress(Wrong):
            check(key, reading)
            return reading
    if is_bracketed and not readings and structured(hint):
        reason = f"neither JSON nor TOML: {reason}"
        if list[str] in (hint, *get_args(hint)):
            reason += f"; put a text that begins like this in a list: {json.dumps([text])}"
        return Unparsed(text, reason)
    return [*readings, text][0]


def parse_texts(key: str, texts: Sequence[str]) -> Any:
    """The value of a flag that may be repeated: texts as they are, and the items of JSON lists."""
    items = list[Any]()
    for text in texts:
        value = parse_value(key, text) if text.lstrip()[:1] in ("[", "{") else text
        if isinstance(value, (Unparsed, dict)):
            return value
        items += value if isinstance(value, list) else [text]
    return items


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
    """Every `--set` as one layer; later ones win, and those that are not key=value make it `broken`."""
    values: dict[str, Any] = {}
    mistakes: list[PresetError] = []
    for text in texts:
        try:
            values |= parse_set(text).values
        except PresetError as error:
            mistakes.append(error)
    if not values and not mistakes:
        return []
    return [Layer(SET, values, {key: f"{SET} {named(key)}" for key in values}, "command", tuple(mistakes))]
