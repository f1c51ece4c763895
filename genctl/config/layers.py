"""Precedence: layers of settings become one resolved job. Later wins; every mistake is told at once.

The order, lowest first: built-in defaults, the model's generation_config, user file, project file, preset(s),
environment GENCTL_*, flags (and `--set`), the row's own params.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from genctl import params
from genctl.config.check import (
    UNSAFE,
    Wrong,
    accepted,
    check,
    did_you_mean,
    known,
    named,
    plain,
    refused,
    shown,
)
from genctl.config.conflicts import Clash, Setting, find_clashes, settle
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
LISTS = ("processors", "stopping")
SPECIAL = ("about", *LISTS)
MOST_MISTAKES = 100

# What a checkpoint's generation_config says of itself rather than of the text.
BOOKKEEPING = frozenset({"transformers_version", "generation_kwargs", "is_assistant", "trust_remote_code"})


# Keys that lead elsewhere: a checkpoint that somebody downloaded must not say what else is read or run.
OUTWARD = {
    **dict.fromkeys(("json_schema", "grammar"), "a file"),
    **dict.fromkeys(("assistant_model", "amateur_model"), "another checkpoint"),
    **dict.fromkeys(LISTS, "code"),
}


@dataclass(frozen=True)
class Layer:
    """Settings that came from one place.

    `origin` names the place; `where` may say more exactly, key by key, where each setting stands (`file.toml:3`,
    `flag --top-p`). `said` is what sort of layer it is; without it, origins that begin with the words
    `generation_config`, `flag`, `--set` and `params` are what they say, and all others files or the environment.
    """

    origin: str
    values: Mapping[str, Any]
    where: Mapping[str, str] = field(default_factory=dict)
    said: Kind | None = None

    @property
    def kind(self) -> Kind:
        """What sort of layer this is: as said, else by the first word of its origin."""
        return self.said or KINDS.get(self.origin.partition(" ")[0], "user")

    def place(self, key: str) -> str:
        """Where `key` was set, in words."""
        if key in self.where:
            return printable(self.where[key])
        if self.origin in (FLAG, "flags"):
            negated = "no-" if self.values.get(key) is False else ""
            return printable(f"flag --{negated}{params.spelled(key)}")
        return printable(self.origin)


def model_layer(values: Mapping[str, Any], origin: str = MODEL) -> Layer:
    """A checkpoint's generation_config: what it leaves as None is not set."""
    return Layer(origin if origin.startswith(MODEL) else f"{MODEL} of {origin}", values, said="model")


def flags_layer(values: Mapping[str, Any], where: Mapping[str, str] | None = None) -> Layer:
    """What was said with flags; `where` may give the spelling used (`flag -n`)."""
    return Layer(FLAG, values, where or {}, "command")


def row_layer(values: Mapping[str, Any], place: str = "") -> Layer:
    """The `params` of a JSONL row; `place` says which row."""
    return Layer(f"{ROW} of {place}" if place else ROW, values, said="row")


@dataclass(frozen=True)
class Resolved:
    """A job: every knob with its value, and where each came from.

    `origins` holds all knobs; those that nobody set come from "default". `notes` are things worth telling that are no
    mistakes (keys of a generation_config that genctl does not know). `settings` and `levels` remember the layers, so
    that a row's params can be laid on top (`overlay`).
    """

    generation: Generation
    runtime: Runtime
    origins: dict[str, str]
    processors: tuple[dict[str, Any], ...] | None = None
    stopping: tuple[dict[str, Any], ...] | None = None
    about: str = ""
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Setting] = field(default_factory=dict, repr=False, compare=False)
    levels: int = field(default=0, repr=False, compare=False)


@dataclass
class _Reading:
    """What has been read of the layers so far."""

    settings: dict[str, Setting]
    notes: list[str]
    mistakes: list[str] = field(default_factory=list)
    mistaken: set[str] = field(default_factory=set)

    def read(self, layer: Layer, level: int) -> None:
        """Lay `layer` on top."""
        model = layer.kind == "model"
        bookkeeping = BOOKKEEPING | getattr(params, "METADATA", frozenset())
        for key, value in layer.values.items():
            if model and (value is None or key.startswith("_") or key in bookkeeping):
                continue
            try:
                found = Setting(self._value(layer, key, value), level, layer.place(key), layer.kind)
                other = self.settings.get(key)
                if other and other.level == level and other.value != found.value:
                    raise Wrong(f"{key} = {shown(value)} contradicts {shown(other.value)} ({other.place})")
                self.settings[key] = found
            except _Silent:
                continue
            except Wrong as wrong:
                if model:
                    self.notes.append(f"{layer.place(key)}: {wrong}; not used")
                    continue
                self.mistaken.add(key)
                self.mistakes.append(f"{layer.place(key)}: {wrong}")

    def _value(self, layer: Layer, key: str, value: Any) -> Any:
        if (
            layer.kind == "model"
            and (key in refused() or key in params.knobs(Runtime))
            and value in (False, 0, 1, "", [], {})
        ):
            raise _Silent  # it asks for nothing
        if key in refused() and key not in known():
            raise Wrong(f"{named(key)} is not taken: {refused()[key]}")
        if key in UNSAFE and (layer.kind != "command" or layer.origin.startswith(SET)):
            raise Wrong(f"{key} runs code that others wrote; only the flag --{key.replace('_', '-')} can enable it")
        if layer.kind == "model" and key in OUTWARD:
            raise Wrong(f"{key} names {OUTWARD[key]}, which is not a checkpoint's to say")
        if key in LISTS:
            return _tables(key, value)
        if key == "about":
            return _about(value)
        if key not in known():
            raise Wrong(self._unknown(layer, key, value))
        if layer.kind == "model" and known()[key][0] is Runtime:
            raise Wrong(f"{named(key)} is not a checkpoint's to say")
        if layer.kind == "row" and (fixed := _fixed(key)):
            raise Wrong(f"{key} = {shown(value)}: {fixed}")
        try:
            return check(key, value)
        except Wrong as wrong:
            raise Wrong(f"{key} = {shown(value)}: {wrong}") from None

    def _unknown(self, layer: Layer, key: str, value: Any) -> str:
        sentence = f"unknown key {named(key)}"
        if layer.kind == "model" or len(self.mistakes) >= MOST_MISTAKES:
            return sentence
        if key == "extends":
            return f'{sentence}: only a preset file extends another (a settings file says preset = "NAME")'
        if key == "preset":
            return f'{sentence}: a preset says extends = "NAME"'
        if isinstance(value, dict) and any(inner in known() for inner in value):
            return f"{sentence}: knobs are top-level keys, in no table"
        near = did_you_mean(key, [*accepted(), *SPECIAL, *refused()])
        return f"{sentence}; did you mean {near}?" if near else sentence

    def finish(self, levels: int, *, tentative: bool = False) -> Resolved:
        """The job. Raises PresetError if anything was wrong."""
        clashes = [clash for clash in find_clashes(self.settings) if not clash.keys & self.mistaken]
        clashes = [clash for clash in clashes if not (tentative and clash.by_default)]
        mistakes = self.mistakes + [clash.sentence for clash in clashes]
        if mistakes:
            raise _error(mistakes, clashes)
        return _build(self.settings, self.notes, levels)


class _Silent(Exception):
    """A key of a generation_config that asks for nothing."""


def _error(mistakes: list[str], clashes: Sequence[Clash]) -> PresetError:
    if len(mistakes) > MOST_MISTAKES:
        mistakes = [*mistakes[:MOST_MISTAKES], f"… and {len(mistakes) - MOST_MISTAKES} more mistakes"]
    hints = dict.fromkeys(clash.hint for clash in clashes if clash.hint)
    return PresetError("\n".join(mistakes), hint="; ".join(hints))


def _fixed(key: str) -> str:
    """Why a row may not set `key`, or an empty string."""
    if known()[key][0] is not Runtime or key.startswith("assistant"):
        return ""
    if params.knobs(Runtime)[key].metadata["group"] == params.MODEL:
        return "one checkpoint serves all rows, so a row cannot choose it"
    return "belongs to the whole run, not to a row" if key in ("batch_size", "prompt_cache") else ""


def _about(value: Any) -> str:
    if not isinstance(value, str):
        raise Wrong(f"about = {shown(value)}: must be a string")
    plain(value)
    return value


def _tables(key: str, value: Any) -> tuple[dict[str, Any], ...]:
    """[[processors]] or [[stopping]]: a list of tables, each with `use`."""
    if not isinstance(value, (list, tuple)):
        single = f"must be a list of tables ([[{key}]])"
        raise Wrong(f"{key} {single}" if isinstance(value, dict) else f"{key} = {shown(value)}: {single}")
    for number, item in enumerate(value, 1):
        name = f"{key}, item {number}"
        if not isinstance(item, dict):
            raise Wrong(f'{name}: must be a table with use = "NAME", not {shown(item)}')
        if not isinstance(item.get("use"), str) or not item["use"].strip():
            near = "" if "use" in item else did_you_mean(next(iter(item), ""), ["use"])
            raise Wrong(f'{name}: needs use = "NAME"' + (f"; did you mean {near}?" if near else ""))
        try:
            plain(item)
        except Wrong as wrong:
            raise Wrong(f"{name}: {wrong}") from None
        except RecursionError:
            raise Wrong(f"{name}: is nested too deeply") from None
    return tuple(dict(item) for item in value)


def _build(settings: Mapping[str, Setting], notes: Sequence[str], levels: int) -> Resolved:
    """The values that hold once later layers have made earlier ones moot."""
    moot, told = settle(settings)
    values = {key: setting.value for key, setting in settings.items()} | {
        key: value for key, (value, _) in moot.items()
    }
    places = {key: setting.place for key, setting in settings.items()} | {
        key: place for key, (_, place) in moot.items()
    }
    return Resolved(
        generation=Generation(**{key: values[key] for key in params.knobs(Generation) if key in values}),
        runtime=Runtime(**{key: values[key] for key in params.knobs(Runtime) if key in values}),
        origins={key: places.get(key, "default") for key in known()},
        processors=values.get("processors"),
        stopping=values.get("stopping"),
        about=values.get("about", ""),
        notes=(*notes, *told),
        settings=settings,
        levels=levels,
    )


def _levelled(layers: Sequence[Layer]) -> Iterator[tuple[int, Layer]]:
    """Each layer with its height; flags and `--set` are said in one breath and stand equally high."""
    level = -1
    before: Kind | None = None
    for layer in layers:
        level += not (before == layer.kind == "command")
        before = layer.kind
        yield level, layer


def resolve(layers: Sequence[Layer], *, tentative: bool = False) -> Resolved:
    """The one function of precedence: `layers`, lowest first, laid over the built-in defaults; later wins.

    With `tentative` the model's generation_config is still missing (which model is itself a setting): contradictions
    that rest on a built-in default, which it may change, are left for the final call.

    Raises
    ------
    PresetError
        With every mistake, one line each: where, which key, what is wrong and which bound, what was meant; and with
        every contradiction between knobs (see `conflicts`). What a generation_config gets wrong is a note instead.
    """
    reading = _Reading({}, [])
    level = -1
    for level, layer in _levelled(layers):
        reading.read(layer, level)
    return reading.finish(level + 1, tentative=tentative)


def overlay(base: Resolved, layer: Layer) -> Resolved:
    """`base` with one more layer on top, such as a row's params: `resolve` of all layers, without reading them again.

    An empty layer gives `base` itself. Raises PresetError as `resolve` does.
    """
    if not layer.values:
        return base
    told = set(settle(base.settings)[1])
    reading = _Reading(dict(base.settings), [note for note in base.notes if note not in told])
    reading.read(layer, base.levels)
    return reading.finish(base.levels + 1)


def conflicts(resolved: Resolved) -> list[str]:
    """Knobs of a job that contradict each other, one sentence each, with both sources; `resolve` raises them all."""
    return [clash.sentence for clash in find_clashes(resolved.settings)]
