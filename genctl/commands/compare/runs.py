"""The runs of a comparison: sides, each on one checkpoint, with its own settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from genctl.config import settings
from genctl.config.found_files import divided
from genctl.config.layers import Layer, flags_layer, values_of
from genctl.config.sides import Kind, Side, check, read, read_list
from genctl.errors import GenctlError, UsageError
from genctl.params import Runtime

KINDS: tuple[Kind, ...] = ("server", "mode", "preset", "file", "checkpoint")  # what --strategy takes
_PLACES = ("model", "backend")  # where a run computes, which its own settings decide, not -m and --backend


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
    presets: Sequence[str],
    strategies: Sequence[str],
    models: Sequence[Side],
    flags: Sequence[Layer],
    order: Sequence[str] = (),
) -> tuple[Side, ...]:
    """The runs: one for each preset, then one for each side of `strategies`; each on each model.

    `order` mixes them: "presets" stands for the next of `presets`, "strategies" for the next of `strategies`.

    The layers of a run, lowest first: user file, project file, its presets, the environment, its own settings, flags.
    A checkpoint or server that a run names is above the flags. With `models` a run is called NAME@MODEL, or just MODEL
    if nothing else distinguishes the runs. Files of results are no runs.

    Raises UsageError and PresetError: a duplicate name, every invalid side, an unknown preset.
    """
    texts = {"presets": iter(presets), "strategies": iter(strategies)}
    runs: list[Side] = []
    mistakes: list[GenctlError] = []
    for option in order or (*["presets"] * len(presets), *["strategies"] * len(strategies)):
        text = next(texts[option])
        try:
            side = read(text, "-p", ("preset",)) if option == "presets" else read_strategy(text)
        except GenctlError as error:
            mistakes.append(error)
            continue
        if side.kind != "file":
            runs.append(_with_layers(side, flags))
    if mistakes:
        check(runs, mistakes)
    if models:
        runs = runs or [Side("", (*settings.standing_layers(), *flags))]
        runs = [_on(run, model) for run in runs for model in models]
    check_names(runs)
    return tuple(runs)


def read_strategy(text: str) -> Side:
    """A side of --strategy. Raises UsageError."""
    return read(text, "--strategy", KINDS, colon=True)


def check_names(runs: Iterable[Side]) -> None:
    """Raises UsageError if two runs have the same name."""
    twice = [name for name, count in Counter(run.name for run in runs).items() if count > 1]
    if twice:
        raise UsageError(
            f"{'two runs are' if len(twice) == 1 else 'several runs are'} called {', '.join(twice)}",
            hint="NAME= before a side gives it a name of its own, such as other=greedy",
        )


def split_models(texts: Iterable[str]) -> list[Side]:
    """The sides of --models. Raises UsageError for an empty or duplicate one."""
    models = [model for text in texts for model in read_list(text, "--models")]
    names = [model.name for model in models]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--models names {twice} twice")
    return models


def recorded_layers(name: str, values: Mapping[str, Any], file: str) -> tuple[Layer, ...]:
    """The settings of a recorded run; those that the user sets too, where a recording may not, lie above the others."""
    folder, place = Path(file).parent, f"the recorded run {name}"
    _, yours, _ = divided(values, folder, "unnamed", values_of(settings.standing_layers()))
    others = {key: value for key, value in values.items() if key not in yours}
    return Layer(place, others, said="user", found="unnamed", folder=folder), Layer(place, yours, said="user")


def _with_layers(side: Side, flags: Sequence[Layer]) -> Side:
    above = {key: value for key, value in side.settings.items() if key in _PLACES}
    run = replace(side, layers=(*settings.standing_layers(side.presets), *side.own(*above), *flags))
    return _above_flags(run, above, side.origin) if above else run


def _on(run: Side, model: Side) -> Side:
    named = replace(run, name=f"{run.name}@{model.name}" if run.name else model.name)
    return _above_flags(named, model.settings, "--models")


def _above_flags(run: Side, values: Mapping[str, Any], option: str) -> Side:
    """The run with values beside those of flags, in place of the checkpoint or server that flags name."""
    replaced = {key for key in _PLACES if key in values}
    layers = tuple(
        replace(layer, values={key: value for key, value in layer.values.items() if key not in replaced})
        if layer.kind == "command"
        else layer
        for layer in run.layers
    )
    return replace(run, layers=(*layers, flags_layer(values, dict.fromkeys(values, option))))
