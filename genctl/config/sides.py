"""A side, one way to run, as given on the command line: `[NAME=]WHAT[@setting=value,…]`.

WHAT is a checkpoint, a preset, a decoding mode (`greedy`, `beam`), a server (`openai:URL`) or a file of results. It
ends at the first @ before a name and `=`; other @ belong to it. Without WHAT, the side is its settings. Values are
TOML or JSON; commas inside quotes and brackets belong to the value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from genctl import params
from genctl.config import modes, presets
from genctl.config.check import known
from genctl.config.layers import Layer, Resolved, resolve
from genctl.errors import GenctlError, UsageError, joined
from genctl.params import Runtime

Kind: TypeAlias = Literal["checkpoint", "preset", "mode", "server", "file"]

SERVER = "openai:"
FORM = "[NAME=]WHAT[@setting=value,…]"
_OTHERS: dict[Kind, str] = {
    "preset": "a preset",
    "checkpoint": "a checkpoint (builtin:NAME, ORG/NAME, a folder, or @model=NAME)",
    "server": "a server (openai:URL)",
    "file": "a file of results (.json, .jsonl)",
}

# The settings that decide how a checkpoint is loaded: sides with equal ones share it.
LOADING = tuple(
    name for name, item in params.knobs(Runtime).items() if item.metadata["group"] == params.MODEL and name != "offline"
)
_SPECIAL = ("extends", "cache")
_SETTINGS = re.compile(r"@(?=\s*[A-Za-z_][\w-]*\s*=)")
_NAME = re.compile(r"\w[\w.+-]{0,59}")
_COLON = re.compile(r"([^:]*):(\s*(?:[A-Za-z_][\w-]*\s*(?:[=,].*)?)?)", re.DOTALL)  # NAME:setting=value,…
_COLON_NAME = re.compile(r"[\w@][\w .@+-]{0,59}")
_SCHEMES = ("builtin", "openai")
_QUOTED = re.compile(r"""\"(?:[^"\\]|\\.)*"|([=\[,:{]\s*)'[^']*'""")  # an apostrophe inside a word is no quote
_QUOTE = re.compile(r"\"|[=\[,:{]\s*'")  # one that is not closed


@dataclass(frozen=True)
class Side:
    """One way to run. `layers` are lowest first, without the checkpoint's generation_config; a command sets them."""

    name: str
    layers: tuple[Layer, ...] = ()
    kind: Kind | None = None  # None: settings alone
    what: str = ""
    presets: tuple[str, ...] = ()  # WHAT if it is one, and those of `extends`
    settings: Mapping[str, Any] = field(default_factory=dict)  # those of WHAT and those after @
    origin: str = ""  # of `settings`
    mode: str | None = None  # the decoding mode that it names (`modes.NAMED`)
    word: str = "run"  # in messages

    @property
    def place(self) -> str:
        """Its name in messages."""
        return f"{self.word} {self.name}"

    def own(self, *without: str) -> tuple[Layer, ...]:
        """The layer of its settings, `without` some; none if there are none."""
        values = {key: value for key, value in self.settings.items() if key not in without}
        return (Layer(self.origin, values, declared="user", typed=True),) if values else ()

    @cached_property
    def early(self) -> Resolved:
        """The settings without the checkpoint's own. Raises PresetError."""
        return self.resolve(())

    @property
    def is_server(self) -> bool:
        """Whether its settings name a server. Raises PresetError."""
        return self.early.runtime.backend is not None

    def resolve(self, beneath: Sequence[Layer]) -> Resolved:
        """All layers above those of the checkpoint (`beneath`). Raises PresetError."""
        return resolve([*beneath, *self.layers], tentative=not beneath)


Answer = TypeVar("Answer")


def check(sides: Iterable[Side], errors: Sequence[GenctlError] = ()) -> None:
    """Raises `errors` and the mistakes in the settings of all sides as one error."""
    each(sides, lambda side: side.early, errors)


def each(sides: Iterable[Side], ask: Callable[[Side], Answer], errors: Sequence[GenctlError] = ()) -> list[Answer]:
    """Call `ask` for every side. Raises `errors` and the sides' errors as one; the latter name their side."""
    results, mistakes = [], list(errors)
    for side in sides:
        try:
            results.append(ask(side))
        except GenctlError as error:
            lines = error.message.split("\n")
            error.message = "\n".join(
                line if line.startswith(side.place) else f"{side.place}: {line}" for line in lines
            )
            mistakes.append(error)
    if mistakes:
        raise joined(mistakes)
    return results


def loaded_with(runtime: Runtime, *more: str) -> tuple[str, ...]:
    """The settings that a checkpoint is loaded with, and `more`: sides with equal ones share the checkpoint."""
    return tuple(str(getattr(runtime, name)) for name in (*LOADING, *more))


# -- reading -----------------------------------------------------------------------------------------------------------


def is_results(text: str) -> bool:
    """Whether a side is a file of results, by its name."""
    plain = exists(text) or not set(text) & {":", "="}  # json_schema=FILE.json is a setting
    return text.endswith((".json", ".jsonl")) and plain and not Path(text).is_dir()


def exists(path: str) -> bool:
    """Whether there is a file or folder of this name."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


_IS: dict[Kind, Callable[[str], bool]] = {
    "server": lambda what: what.startswith(SERVER),
    "mode": modes.NAMED.__contains__,
    "preset": lambda what: what.endswith(".toml") or any(one.name == what for one in presets.available()),
    "file": is_results,
    "checkpoint": lambda what: (
        not what.endswith(".toml") and (what.startswith("builtin:") or "/" in what or os.sep in what or exists(what))
    ),
}


def split(text: str) -> tuple[str, str]:
    """The text before the settings, and the settings. An existing file or folder may have `@` in its name."""
    if (first := _SETTINGS.search(text)) is None or exists(text):
        return text, ""
    found = next((found for found in _SETTINGS.finditer(text) if exists(text[: found.start()])), first)
    return text[: found.start()], text[found.end() :]


def read(
    text: str,
    option: str,
    kinds: Sequence[Kind],
    *,
    refused: Mapping[Kind, str] = {},
    bare: Kind | None = None,
    colon: bool = False,
) -> Side:
    """The side that follows `option`. If WHAT could be of several kinds, it is the first of these in `kinds`.

    `refused` has a sentence for each of `kinds` that the command does not take. `bare` is the kind of a name that is
    none of them; None: it is refused. With `colon`, `NAME:setting=value,…` is read as `NAME=@setting=value,…`. `early`
    checks whether the settings exist. Raises UsageError and PresetError.
    """
    name, what, rest = _parts(text, option, colon=colon)
    place = f"{option} {name or text}"
    if kinds[1:] and not (name or what or rest):
        raise UsageError(f"{place}: names neither a model nor a setting")
    guess = next((kind for kind in kinds if _IS[kind](what)), bare) if what and kinds[1:] else None
    kind = guess if kinds[1:] else kinds[0]
    if what and kind is None:
        names = [one.name for one in presets.available()] if "preset" in kinds else []
        here = presets.in_this_folder(what) if "preset" in kinds else ""
        hint = f"name the file: {here}" if here else _what(kinds, refused)
        raise UsageError(modes.unknown(what, f"{option} {text}", names), hint=hint)
    if kind is not None and kind in refused:
        raise UsageError(f"{place}: {refused[kind]}")
    settings = read_settings(rest, place, _SPECIAL)
    if "cache" in settings:  # the flag of this setting
        settings.setdefault("cache_implementation", settings.pop("cache"))
    if kind == "file" and (name or settings):
        raise UsageError(f"{place}: a file of results was run already, so it takes neither a name nor settings")
    extended = presets.take_names("extends", settings, {"extends": place})
    key = {"checkpoint": "model", "server": "backend"}.get(kind or "")
    if key is not None and key in settings:
        raise UsageError(f"{place}: the {key} is given twice, as {what} and as {key} = {settings[key]}")
    own = {key: what} if key is not None else modes.NAMED[what] if kind == "mode" else {}
    return Side(
        name or (presets.title(what) if kind == "preset" and not settings else text),
        kind=kind,
        what=what,
        presets=(*([what] if kind == "preset" else []), *extended),
        settings={**own, **settings},
        origin=place,
        mode=what if kind == "mode" else None,
    )


def _what(kinds: Iterable[Kind], refused: Container[Kind]) -> str:
    """A hint: the values that WHAT may have."""
    names = ", ".join(modes.NAMED)
    *others, last = [words for kind, words in _OTHERS.items() if kind in kinds and kind not in refused]
    return f"there are: {names}; WHAT of {FORM} is one of these, {', '.join(others)} or {last}"


def _parts(text: str, option: str, *, colon: bool) -> tuple[str, str, str]:
    """The name ("" without one), WHAT, and the settings."""
    found = _COLON.fullmatch(text) if colon else None
    if found and found[1] not in _SCHEMES and ("/" not in found[1] or "=" in found[2]) and "=" not in found[1]:
        name, what, rest, allowed = found[1].strip(), "", found[2], _COLON_NAME
    else:
        head, rest = split(text)
        name, equals, what = (part.strip() for part in head.partition("="))
        if not equals or "/" in name or exists(head.strip()):  # a path may hold an equals sign
            return "", head.strip(), rest
        allowed = _NAME
    if not name or name in known():
        raise UsageError(
            f"{option} {text!r}: begins with no name",
            hint='write it as "NAME=@setting=value,setting=value", such as "cold=@temperature=0.5"',
        )
    if not allowed.fullmatch(name):
        raise UsageError(f"{option} {text!r}: a name has letters, digits and . + - _, at most 60")
    return name, what, rest


def read_list(text: str, option: str, *, refused: Mapping[Kind, str] = {}) -> list[Side]:
    """Checkpoints and servers as `A,B@setting=value,…`: the settings are those of the last. Raises UsageError."""
    head, rest = split(text)
    names = head.split(",")
    if not all(name.strip() for name in names):
        raise UsageError(f"{option}: a name is empty; give them as A,B")
    texts = [*names[:-1], names[-1] + (f"@{rest}" if rest else "")]
    kinds: tuple[Kind, ...] = ("server", "checkpoint")
    return [read(name.strip(), option, kinds, refused=refused, bare="checkpoint") for name in texts]


def read_settings(text: str, place: str, special: tuple[str, ...] = ()) -> dict[str, Any]:
    """Parse `setting=value,setting=value` into values by name; `special` are further names that are not settings.

    Names are not checked, but - may be used for _. `place` begins every message. Raises UsageError.
    """
    values: dict[str, Any] = {}
    for part in split_pairs(text, place):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UsageError(f"{place}: {part.strip()!r} is not setting=value")
        names = (*known(), *special)
        if key not in names and (folded := key.replace("-", "_")) in names:
            key = folded
        if key in values:
            raise UsageError(f"{place}: {key} is given twice")
        values[key] = None if value.strip() == "null" else presets.parse_value(key, value.strip())
    return values


def split_pairs(text: str, place: str) -> list[str]:
    """The parts between commas outside quotes and brackets. Raises UsageError if one is not closed."""
    parts: list[str] = []
    pieces: list[str] = []
    kind = ""
    for piece in text.split(","):
        pieces.append(piece)
        part = ",".join(pieces)
        bare = _QUOTED.sub(r"\1", part)
        is_open = sum(map(bare.count, "[{(")) > sum(map(bare.count, "]})"))
        kind = "quote" if _QUOTE.search(bare) else "bracket" if is_open else ""
        if not kind:
            parts.append(part)
            pieces = []
    if kind:
        raise UsageError(f"{place}: a {kind} is not closed in {text!r}")
    return parts if "".join(parts).strip() else []
