"""The settings that a saved chat or tree brings along, and which of them hold when it is opened.

A file in the user's own folder of sessions, which nobody else can write to, was written by genctl for the user: its
settings hold. Any other file may come from somebody else: `genctl.config.saved_files` says what it may set. The rest is
left out, unless the user sets the same value.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from genctl.config import presets
from genctl.config.check import shown
from genctl.config.conflicts import Found
from genctl.config.layers import Layer
from genctl.config.saved_files import divided
from genctl.config.toml import printable
from genctl.errors import InputError
from genctl.params import spelled
from genctl.tree.journal import sessions_folder

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def flag_for(key: str, value: Any) -> str:
    """How the command line sets a knob to a value of a file, in words."""
    texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    shown_texts = (f" {shlex.quote(printable(each, 60))}" for each in texts if isinstance(each, str))
    flag = f"--{spelled(key)}"
    return " ".join(f"{flag}{text}" for text in shown_texts or ("",)) + " sets it"


@dataclass
class FileSettings:
    """Which settings of a file hold. `left_out` collects a sentence for each one that does not, by knob.

    `found`: "" for a file that this process began, "kept" for the user's own, "unnamed" for any other. `yours` are the
    values that the user sets, by knob; those of `overriding` lie above the file's. `how` says how one is set.
    """

    what: str = "tree"
    found: Found = ""
    yours: dict[str, list[Any]] = field(default_factory=dict)
    overriding: frozenset[str] = frozenset()
    how: Callable[[str, Any], str] = flag_for
    left_out: dict[str, str] = field(default_factory=dict)
    typed: set[tuple[str, str]] = field(default_factory=set)  # steps of a chat that the user typed in this process
    _told: set[str] = field(default_factory=set)

    def layers(self, layer: Layer) -> list[Layer]:
        """A layer of the file without what it may not set; values that the user sets too are a layer of their own."""
        held, named, refused = divided(layer.values, self.yours, own=self.found != "unnamed")
        for key, wrong in refused.items():
            self._leave_out(key, layer.values[key], wrong)
        found = self.found or layer.found
        parts = replace(layer, values=held, found=found), replace(layer, values=named, found="")
        return [part for part in parts if part.values or part.broken]

    def name(self, values: Mapping[str, Any]) -> None:
        """The user has typed these values: they hold from now on, in the file too."""
        for key, value in values.items():
            self.yours.setdefault(key, []).append(value)

    def preset(self, name: str) -> list[Layer]:
        """The layers of a preset that the file names, without what neither the file nor the preset may set."""
        if self.found == "unnamed" and presets.is_path(name):
            self._leave_out("preset", name, "names a file")
            return []
        return [part for layer in presets.load([name]) for part in self.layers(layer)]

    def _leave_out(self, key: str, value: Any, why: str) -> None:
        if key in self.overriding:
            return
        how = "" if key == "preset" else f"; {self.how(key, value)}"
        self.left_out[key] = f"the {self.what}'s {key} = {shown(value)} is not used: it {why}{how}"

    def news(self) -> list[str]:
        """The sentences that were not told yet."""
        lines = [line for line in self.left_out.values() if line not in self._told]
        self._told |= set(lines)
        return lines


def found_of(path: Path) -> Found:
    """Whose a file is: "kept" in the user's own folder of sessions, else "unnamed"."""
    folder = sessions_folder()
    try:
        if path.parent.resolve() != folder.resolve():
            return "unnamed"
        own = all(_is_mine(each) for each in (folder.resolve(), path))
    except (OSError, ValueError, RuntimeError):
        return "unnamed"
    return "kept" if own else "unnamed"


def _is_mine(path: Path) -> bool:
    """Whether a file or folder is the user's, no link, and nobody else can write to it."""
    state = path.lstat()
    mine = not hasattr(os, "getuid") or (state.st_uid == os.getuid() and not state.st_mode & _OTHERS)
    return mine and (stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode))


def to_save(layers: Iterable[Layer], keys: Container[str] | None = None) -> tuple[dict[str, Any], ...]:
    """Layers as `Opened` has them, as far as they have values; `keys`: of these alone."""
    kept = (
        (layer, {key: value for key, value in layer.values.items() if keys is None or key in keys}) for layer in layers
    )
    return tuple(
        {"origin": layer.origin, "said": layer.kind, "typed": layer.typed, "values": values}
        for layer, values in kept
        if values
    )


def saved_layers(saved: Iterable[Mapping[str, Any]], what: str) -> list[Layer]:
    """The layers that a file has, as they were saved. Raises InputError."""
    try:
        return [Layer(each["origin"], each["values"], said=each["said"], typed=each["typed"]) for each in saved]
    except (KeyError, TypeError):
        raise InputError(f"the settings of the {what} are damaged") from None
