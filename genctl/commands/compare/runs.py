"""The runs of a comparison: each a preset or an inline strategy, on one checkpoint, with its own settings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from genctl import params
from genctl.config import named_strategies, presets, settings
from genctl.config.found_files import divided
from genctl.config.inline import read_knobs
from genctl.config.layers import Layer, Resolved, RunSpec, each, flags_layer, values_of
from genctl.errors import GenctlError, UsageError
from genctl.params import Runtime

NAME = re.compile(r"[\w@][\w .:@+-]{0,59}")

# The settings that decide how a checkpoint is loaded: runs with equal ones share it.
LOADING = tuple(
    name for name, item in params.knobs(Runtime).items() if item.metadata["group"] == params.MODEL and name != "offline"
)


def checkpoint_of(resolved: Resolved) -> tuple[Any, ...]:
    """The identity of a run's checkpoint: runs with equal ones share one load and one prefill."""
    values = (getattr(resolved.runtime, name) for name in LOADING)
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


def check_prompt_caches(runs: Sequence[tuple[str, Runtime]]) -> None:
    """Raises UsageError where runs of one checkpoint, which read a prompt together, name different prompt caches."""
    (first, mine), *others = runs
    for name, other in others:
        if mine.prompt_cache != other.prompt_cache:
            raise UsageError(
                f"run {first}: prompt_cache = {mine.prompt_cache or 'none'}, run {name}: prompt_cache = "
                f"{other.prompt_cache or 'none'}; runs of one checkpoint read a prompt once, for all of them",
                hint="give --prompt-cache on the command line: it holds for every run",
            )


def read_runs(
    names: Sequence[str],
    inline: Sequence[str],
    models: Sequence[str],
    flags: Sequence[Layer],
    order: Sequence[str] = (),
) -> tuple[RunSpec, ...]:
    """The runs: one for each preset of `names`, then one for each inline strategy; each on each model.

    `order` mixes them: "presets" stands for the next of `names`, "strategies" for the next of `inline`.

    The layers of a run, lowest first: user file, project file, its preset, the environment, its inline knobs, flags.
    With `models` a run is called NAME@MODEL, or just MODEL if nothing else distinguishes the runs.

    Raises UsageError and PresetError: a duplicate name, every invalid strategy, an unknown preset.
    """
    named = [RunSpec(_called(name), (*settings.standing_layers((name,)), *flags)) for name in names]
    written: list[RunSpec] = []
    mistakes: list[GenctlError] = []
    for text in inline:
        try:
            name, extended, layer = parse_strategy(text)
        except UsageError as error:
            mistakes.append(error)
            continue
        mode = name if ":" not in text else None
        layers = (*settings.standing_layers(extended), *([layer] if layer.values else ()), *flags)
        written.append(RunSpec(name, layers, mode))
    runs = [*named, *written]
    if mistakes:
        each(runs, RunSpec.early, mistakes)
    if order:
        kinds = {"presets": iter(named), "strategies": iter(written)}
        runs = [next(kinds[kind]) for kind in order]
    if models:
        if not runs:
            runs = [RunSpec("", (*settings.standing_layers(), *flags))]
        runs = [_on(run, model) for run in runs for model in models]
    check_names(runs)
    return tuple(runs)


def check_names(runs: Iterable[RunSpec]) -> None:
    """Raises UsageError if two runs have the same name."""
    twice = [name for name, count in Counter(run.name for run in runs).items() if count > 1]
    if twice:
        raise UsageError(
            f"{'two runs are' if len(twice) == 1 else 'several runs are'} called {', '.join(twice)}",
            hint='--strategy "NAME:setting=value" gives a run a name of its own',
        )


def split_models(texts: Iterable[str]) -> list[str]:
    """`A,B` as names. Raises UsageError for an empty or duplicate one."""
    names = [part.strip() for text in texts for part in text.split(",")]
    if "" in names:
        raise UsageError("--models: a name is empty; give them as A,B")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(f"--models names {twice[0]} twice")
    return names


def parse_strategy(text: str) -> tuple[str, tuple[str, ...], Layer]:
    """`NAME:setting=value,…` as a name, the presets that it `extends`, and a layer. Values are TOML or JSON.

    `NAME` alone is a decoding mode, with its knobs. Commas inside quotes and brackets belong to the value. Raises
    UsageError.
    """
    name, separator, rest = text.partition(":")
    name = name.strip()
    place = f"--strategy {name}"
    if "=" in name or not name:
        raise UsageError(
            f"--strategy {text!r}: begins with no name",
            hint='write it as "NAME:setting=value,setting=value", such as "beam5:num_beams=5"',
        )
    if not NAME.fullmatch(name) or "/" in name:
        raise UsageError(f"--strategy {text!r}: a name has letters, digits, spaces and . : @ + - _, at most 60")
    if not separator and name not in named_strategies.NAMED:
        is_preset = any(one.name == name for one in presets.available())
        preset = f"-p {name} takes the preset of this name; " if is_preset else ""
        raise UsageError(
            named_strategies.unknown(name),
            hint=f'{preset}there are: {", ".join(named_strategies.NAMED)}; "{name}:setting=value" gives a run a name',
        )
    values = read_knobs(rest, place, ("extends",)) if separator else dict(named_strategies.NAMED[name])
    extended = _extended(values.pop("extends"), place) if "extends" in values else ()
    return name, extended, Layer(place, values, said="user", typed=True)


def recorded_layers(name: str, values: Mapping[str, Any], file: str) -> tuple[Layer, ...]:
    """The settings of a recorded run; those that the user sets too, where a recording may not, lie above the others."""
    folder, place = Path(file).parent, f"the recorded run {name}"
    _, yours, _ = divided(values, folder, "unnamed", values_of(settings.standing_layers()))
    others = {key: value for key, value in values.items() if key not in yours}
    return Layer(place, others, said="user", found="unnamed", folder=folder), Layer(place, yours, said="user")


def _called(preset: str) -> str:
    name = preset.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".toml") if presets.is_path(preset) else preset
    return name or preset


def _on(run: RunSpec, model: str) -> RunSpec:
    layer = flags_layer({"model": model}, {"model": "--models"})
    others = tuple(
        replace(one, values={key: value for key, value in one.values.items() if key != "model"})
        for one in run.layers
        if one.kind == "command"
    )
    beneath = tuple(old for old in run.layers if old.kind != "command")
    return RunSpec(f"{run.name}@{model}" if run.name else model, (*beneath, *others, layer), run.mode)


def _extended(value: Any, place: str) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(item, str) and item for item in names):
        raise UsageError(f"{place}: extends must be the name of a preset, or a list of names")
    return tuple(names)
