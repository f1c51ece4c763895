"""Precedence: layers of settings become one resolved job. Later layers win; all mistakes are reported at once.

The order, lowest first: built-in defaults, the model's generation_config, the user's file, the file of --config,
presets, environment variables GENCTL_*, flags and `--set`, the row's own params.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from genctl import params
from genctl.config.check import (
    Misfit,
    Wrong,
    check,
    did_you_mean,
    fit,
    known,
    named,
    names_file,
    shown,
)
from genctl.config.conflicts import Merged, Rulings, Setting, imply, notices, settle
from genctl.config.listed_knobs import LISTS, check_list
from genctl.config.names import BOOKKEEPING, FILES, OF_RUN, OUTWARD, REFUSED, UNSAFE
from genctl.config.toml import printable
from genctl.errors import PresetError
from genctl.params import Generation, Runtime

Kind: TypeAlias = Literal["model", "user", "command", "row"]

MODEL, FLAG, SET, ROW = "generation_config", "flag", "--set", "params"
KINDS: dict[str, Kind] = {
    MODEL: "model",
    f"{MODEL}.json": "model",
    FLAG: "command",
    "flags": "command",
    SET: "command",
    ROW: "row",
}
SPECIAL = ("about", *LISTS)


@dataclass(frozen=True)
class Layer:
    """Settings from one place.

    `origin` names the place; `where` gives the exact place of each key (`file.toml:3`, `flag --top-p`). `declared` is
    the kind of the layer; without it the first word of the origin decides (`generation_config`, `flag`, `--set`,
    `params`), and all other origins are files or the environment. `typed`: the user typed it for this job. `broken`
    holds errors of reading this place: `resolve` raises them with all other mistakes. `foreign`: it is a file outside
    the user's own folder; `is_user_file`: it is the user's config.toml, which may set the flags of trust (`UNSAFE`).
    """

    origin: str
    values: Mapping[str, Any]
    where: Mapping[str, str] = field(default_factory=dict)
    declared: Kind | None = None
    broken: tuple[PresetError, ...] = ()
    typed: bool = False
    foreign: bool = False
    is_user_file: bool = False

    @property
    def kind(self) -> Kind:
        """The kind of this layer."""
        return self.declared or KINDS.get(self.origin.partition(" ")[0], "user")

    def place(self, key: str) -> str:
        """Where `key` is set, in words."""
        if key in self.where:
            return printable(self.where[key])
        if self.origin in (FLAG, "flags"):
            negated = "no-" if self.values.get(key) is False else ""
            return printable(f"flag --{negated}{params.spelled(key)}")
        return printable(self.origin)


def model_layer(values: Mapping[str, Any], checkpoint: str = "", file: str = f"{MODEL}.json") -> Layer:
    """The settings of a checkpoint, and the file they come from; None counts as not set."""
    name = file.replace(f"{MODEL}.json", MODEL)
    return Layer(f"{name} of {checkpoint}" if checkpoint else name, values, declared="model")


def flags_layer(values: Mapping[str, Any], where: Mapping[str, str] | None = None) -> Layer:
    """The settings of flags; `where` may give the spelling that was used (`flag -n`)."""
    return Layer(FLAG, values, where or {}, "command")


def row_layer(values: Mapping[str, Any], place: str = "") -> Layer:
    """The `params` of a JSONL row; `place` names the row."""
    return Layer(f"{ROW} of {place}" if place else ROW, values, declared="row")


@dataclass(frozen=True)
class Resolved:
    """A job: every knob with its value and its origin.

    `origins` holds all knobs; the origin of a knob that nothing sets is "default". `notes` are remarks that are not
    mistakes, such as unknown keys of a generation_config; `notices` are always shown. `overlay`
    needs `settings` and `levels` to lay a row's params on top.
    """

    generation: Generation
    runtime: Runtime
    origins: dict[str, str]
    processors: tuple[dict[str, Any], ...] | None = None
    stopping: tuple[dict[str, Any], ...] | None = None
    about: str = ""
    notes: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    settings: Mapping[str, Setting] = field(default_factory=dict, repr=False, compare=False)
    levels: int = field(default=0, repr=False, compare=False)

    @property
    def sampling_note(self) -> str:
        """A note that the checkpoint turns sampling on; "" if it does not, or if another layer has sampling knobs."""
        sampling = {key for key, item in params.knobs().items() if item.metadata["sampling"] or key == "do_sample"}
        own = any(setting.kind != "model" for key, setting in self.settings.items() if key in sampling)
        if own or not self.generation.draws:
            return ""
        return f"do_sample = true ({self.origins['do_sample']}): tokens are drawn; --no-do-sample decodes greedily"

    @property
    def names_model(self) -> bool:
        """Whether a setting names the model; a server may have only one."""
        return self.origins.get("model", "default") != "default"


@dataclass
class _Reading:
    """The settings and the mistakes of the layers read so far."""

    settings: dict[str, Setting]
    notes: list[str]
    mistakes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    mistaken: set[str] = field(default_factory=set)
    incomplete: bool = False  # whether a file or a variable could not be read

    def read(self, layer: Layer, level: int) -> None:
        """Add `layer` on top."""
        for error in layer.broken:
            self.incomplete = True
            self.mistakes += [line for line in error.message.split("\n") if line not in self.mistakes]
            self.hints.append(error.hint)
        for key, value in layer.values.items():
            if layer.kind == "model" and _has_no_effect(key, value):
                continue
            place = layer.place(key)
            try:
                checked = _value(layer, key, value)
                typed = layer.typed or layer.kind == "command"
                earlier = self.settings.get(key)
                if earlier and earlier.level == level and earlier.value != checked:
                    raise Wrong(f"{key} = {shown(value)} contradicts {shown(earlier.value)} ({earlier.place})")
                if layer.kind == "row":
                    self._check_row(key, checked)
                self.settings[key] = Setting(checked, level, place, layer.kind, typed=typed, foreign=layer.foreign)
            except Wrong as wrong:
                if layer.kind == "model":
                    self.notes.append(f"{place}: {wrong}; not used")
                    continue
                self.mistaken |= {key, wrong.near}
                self.mistakes += [f"{place}: {line}" for line in str(wrong).split("\n")]
                self.hints.append(wrong.hint)

    def _check_row(self, key: str, value: Any) -> None:
        """Raises Wrong for a row that names a file, or code by a dotted path, unless the run has the same setting."""
        run = self.settings.get(key)
        if run is not None and run.value == value:
            return
        tables = value if key in LISTS else [{key: value}]
        if name := next((name for table in tables for name in table if names_file(name, table[name])), ""):
            raise Wrong(f"{name}: a row cannot name a file; use --{params.spelled(name)} {FILES[name]}")
        if code := next((table["use"] for table in tables if key in LISTS and table["use"] not in LISTS[key]), ""):
            raise Wrong(f"{key}: use = {shown(code)} is code, which only the settings of the run can choose")

    def finish(self, levels: int, *, tentative: bool = False) -> Resolved:
        """The job. Raises PresetError if anything is wrong."""
        settings = imply(self.settings)
        settled = settle(settings)
        clashes = [clash for clash in settled.clashes if not clash.keys & self.mistaken]
        if tentative or self.incomplete:
            clashes = [clash for clash in clashes if not clash.by_default]
        mistakes = self.mistakes + [clash.sentence for clash in clashes]
        if not mistakes:
            return _build(settings, settled, self.notes, levels)
        hints = dict.fromkeys(hint for hint in (*self.hints, *(clash.hint for clash in clashes)) if hint)
        raise PresetError("\n".join(mistakes), hint="; ".join(hints))


def _has_no_effect(key: str, value: Any) -> bool:
    """Whether an entry of a generation_config has no effect on the text."""
    if value is None or key.startswith("_") or key in BOOKKEEPING:
        return True
    return (key in REFUSED or key in params.knobs(Runtime)) and value in (False, 0, 1, "", [], {})


def _value(layer: Layer, key: str, value: Any) -> Any:
    """The value of a key, checked. Raises Wrong."""
    if key not in known():
        from genctl.config import removed

        if key in REFUSED:
            raise Wrong(f"{named(key)} is not supported: {REFUSED[key]}")
        if removed_error := removed.sentence("setting", key):
            raise Wrong(removed_error)
    if key in UNSAFE and layer.is_user_file:
        return _plain(key, bool, value)
    if key in UNSAFE:
        sentence = f"{key} runs code that others wrote; only the flag and your own config.toml can enable it"
        raise Wrong(sentence, hint=f"use --{key.replace('_', '-')}")
    if layer.kind == "model" and key in OUTWARD:
        raise Wrong(f"{key} names {OUTWARD[key]}, which a checkpoint may not choose")
    if key in LISTS:
        return check_list(key, value)
    if key == "about":
        return _plain(key, str, value)
    if key not in known():
        raise _unknown(layer, key, value)
    if layer.kind == "model" and known()[key][0] is Runtime:
        raise Wrong(f"{named(key)} is not for a checkpoint to choose")
    if layer.kind == "row" and (fixed := _fixed(key)):
        raise Wrong(f"{key} = {shown(value)}: {fixed}; use --{params.spelled(key)}")
    return check(key, value)


def _unknown(layer: Layer, key: str, value: Any) -> Wrong:
    sentence = f"unknown key {named(key)}"
    if layer.kind == "model":
        return Wrong(sentence)
    if key == "extends":
        return Wrong(f'{sentence}: only a preset file extends another (a settings file says preset = "NAME")')
    if key == "preset":
        return Wrong(f'{sentence}: a preset says extends = "NAME"')
    if key == "tool" and isinstance(value, dict) and "genctl" in value:
        return Wrong(f"{sentence}: write the settings of [tool.genctl] as top-level keys of a file of their own")
    if isinstance(value, dict) and any(inner in known() for inner in value):
        return Wrong(f"{sentence}: write settings as top-level keys, not in a table")
    near = did_you_mean(key, [*known(), *SPECIAL, *REFUSED])
    return Wrong(f"{sentence}; did you mean {near}?" if near else sentence, near=near)


def _fixed(key: str) -> str:
    """Why a row may not set `key`, or an empty string."""
    if known()[key][0] is not Runtime or key.startswith("assistant"):
        return ""
    if params.knobs(Runtime)[key].metadata["group"] == params.MODEL:
        return "all rows share one checkpoint, so a row cannot choose it"
    return "belongs to the whole run, not to a row" if key in OF_RUN else ""


def _plain(key: str, kind: type, value: Any) -> Any:
    """The value of a key that is no knob. Raises Wrong."""
    try:
        return fit(kind, value)
    except Misfit as misfit:
        raise Wrong(f"{key} = {shown(value)}: {misfit}") from None


def _build(settings: Merged, settled: Rulings, notes: Sequence[str], levels: int) -> Resolved:
    """The job, after later layers have switched off earlier settings."""
    pairs = {key: (setting.value, setting.place) for key, setting in settings.items()} | settled.moot
    values = {key: value for key, (value, _) in pairs.items()}
    places = {key: place for key, (_, place) in pairs.items()}
    return Resolved(
        generation=Generation(**{key: values[key] for key in params.knobs(Generation) if key in values}),
        runtime=Runtime(**{key: values[key] for key in params.knobs(Runtime) if key in values}),
        origins={key: places.get(key, "default") for key in known()},
        processors=values.get("processors"),
        stopping=values.get("stopping"),
        about=values.get("about", ""),
        notes=(*notes, *settled.notes),
        notices=tuple(notices(settings)),
        settings=settings,
        levels=levels,
    )


def _levelled(layers: Sequence[Layer]) -> Iterator[tuple[int, Layer]]:
    """Each layer with its level; flags and `--set` share one."""
    level = -1
    before: Kind | None = None
    for layer in layers:
        level += not (before == layer.kind == "command")
        before = layer.kind
        yield level, layer


def resolve(layers: Sequence[Layer], *, tentative: bool = False) -> Resolved:
    """Lay `layers`, lowest first, over the built-in defaults; later layers win.

    With `tentative` the model's generation_config is missing, because the model is itself a setting. Conflicts with a
    built-in default, which the model may change, are left to the final call.

    Raises
    ------
    PresetError
        With every mistake and every conflict between knobs (see `conflicts`), one line each: the place, the key, what
        is wrong, and the nearest name. A mistake in a generation_config becomes a note instead.
    """
    reading = _Reading({}, [])
    level = -1
    for level, layer in _levelled(layers):
        reading.read(layer, level)
    return reading.finish(level + 1, tentative=tentative)


def overlay(base: Resolved, layer: Layer) -> Resolved:
    """`base` with one more layer on top, such as a row's params. The result is that of `resolve` with all layers.

    An empty layer gives `base` itself. Raises PresetError as `resolve` does.
    """
    if not layer.values:
        return base
    settled = set(settle(base.settings).notes)
    reading = _Reading(dict(base.settings), [note for note in base.notes if note not in settled])
    reading.read(layer, base.levels)
    return reading.finish(base.levels + 1)
