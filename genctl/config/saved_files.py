"""What a saved chat, tree, recording or golden file may set: how text is generated, and with which checkpoint.

Such a file may come from somebody else. It cannot choose code, a server, or a file to read or write: only the user sets
those, on the command line, in the environment, or in a settings file or preset that the command line names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from genctl.config.check import default, names_file, shown
from genctl.config.conflicts import Setting
from genctl.config.listed_knobs import LISTS, code_in
from genctl.config.names import CHECKPOINTS, DOWNLOADED, FILES, NEVER_SAVED, OTHER_MODELS, UNSAFE
from genctl.errors import UsageError


def objection(key: str, value: Any) -> str:
    """Why a saved file may not set `key` to this value, as a verb with its object; "" if it may."""
    if key in NEVER_SAVED:
        return NEVER_SAVED[key] if key in UNSAFE or value not in (None, default(key)) else ""
    if key in LISTS:
        tables = [table for table in value if isinstance(table, dict)] if isinstance(value, (list, tuple)) else []
        if code := code_in(key, tables):
            return f"names code ({code})"
        return next(filter(None, (objection(*item) for table in tables for item in table.items())), "")
    if not isinstance(value, str):
        return ""
    if key in CHECKPOINTS and value.startswith(("\\\\", "//")):
        return "names a folder of another machine"
    if key in OTHER_MODELS:
        return "names a checkpoint of the Hub" if may_download(value) else ""
    is_file = key in ("prompt_cache", "draft_corpus") or (key in FILES and names_file(key, value))
    return "names a file" if is_file else ""


def divided(
    values: Mapping[str, Any], yours: Mapping[str, Sequence[Any]], *, own: bool = False
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The settings of a saved file: those that hold, those that the user sets too, and why the others do not hold.

    `yours` has the values that the user sets, by knob. All settings of a user's `own` file hold.
    """
    held, named, refused = dict[str, Any](), dict[str, Any](), dict[str, str]()
    for key, value in values.items():
        if key == "offline" and value is False and not own:
            continue  # only the user switches the network on
        if _is_set(value, yours.get(key, ())):
            named[key] = value
        elif wrong := "" if own else objection(key, value):
            refused[key] = wrong
        else:
            held[key] = value
    return held, named, refused


def _is_set(value: Any, yours: Sequence[Any]) -> bool:
    """Whether the user has set each part of this value too."""
    try:
        parts = set(_parts(value))
        return parts <= set(_parts(yours)) if parts else value in yours
    except TypeError:  # tables cannot be compared as members of a set
        return value in yours


def _parts(value: Any) -> Iterable[Any]:
    """The parts of a value: those of a list, of lists in it, or the value itself."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _parts(item)
    else:
        yield value


def may_download(value: Any) -> bool:
    """Whether a checkpoint is no built-in one and no file of this machine."""
    if not isinstance(value, str):
        return False
    try:
        return not value.startswith("builtin:") and not Path(value).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def to_download(settings: Mapping[str, Setting]) -> str:
    """The first knob for which a saved file names a checkpoint that may be on the Hub alone; "" if none does."""
    named = (key for key in DOWNLOADED if key in settings and settings[key].found == "unnamed")
    return next((key for key in named if may_download(settings[key].value)), "")


def stay_offline(settings: Mapping[str, Setting]) -> Mapping[str, Setting]:
    """`settings` without downloads of what a saved file names, unless the user says whether the network is used."""
    served, offline = settings.get("backend"), settings.get("offline")
    key = to_download(settings)
    if not key or (offline is not None and not offline.found) or (served is not None and served.value is not None):
        return settings
    named = settings[key]
    return {**settings, "offline": Setting(True, named.level, f"{named.place}, which names {key}", named.kind)}


def check_trust(settings: Mapping[str, Setting], trust: Mapping[str, bool]) -> None:
    """Raises UsageError if a flag of trust would run code of a checkpoint that a saved file names."""
    problems = [
        f"--{flag.replace('_', '-')} would run code that {settings[key].place} names: {key} = {shown(setting.value)}"
        for flag in ("allow_pickle", "trust_remote_code")
        if trust.get(flag)
        for key in CHECKPOINTS
        if (setting := settings.get(key)) is not None and setting.found in ("unnamed", "kept")
    ]
    if problems:
        raise UsageError("\n".join(problems), hint="name the checkpoint on the command line, too")
