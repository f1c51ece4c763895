"""`genctl compare`: its options and its runs, checked before anything is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from genctl.commands.options import (
    CHECKS,
    EVENTS,
    FORMAT,
    IN_OUT,
    PAGE,
    PLUGINS,
    SHOWN,
    TIMING,
    WATCH,
    WATCH_TSV,
    ModelOptions,
)
from genctl.commands.table import Command, OptionGroup, needless_force, same_file
from genctl.config import settings
from genctl.config.layers import Layer, Resolved, flags_layer
from genctl.config.sides import FORM, Kind, Side, check, each, loaded_with, read, read_list
from genctl.errors import GenctlError, UsageError
from genctl.io.writers import Format
from genctl.params import Runtime

RUNS = OptionGroup("Runs")


@dataclass(frozen=True)
class CompareOptions(ModelOptions):
    """The command line of `genctl compare`."""

    presets: tuple[str, ...] = RUNS.repeated("a preset by name or path: each is a run", "NAME", "--preset", "-p")
    strategies: tuple[str, ...] = RUNS.repeated(
        "a run: a strategy (greedy, beam …), a preset, a checkpoint … (docs/usage.md)",
        "SIDE",
        "--strategy",
    )
    models: tuple[str, ...] = RUNS.repeated("repeat each run on each of these checkpoints", "A,B")
    seeds: int | None = RUNS.option("repeat each run with N seeds (default: 1)", "N", least=1)
    baseline: str | None = RUNS.option("show differences against this run", "RUN")
    set: tuple[str, ...] = RUNS.repeated("any setting for every run, as TOML or JSON; or --KEY VALUE", "KEY=VALUE")
    references: str | None = IN_OUT.option("expected texts, one line per prompt", "FILE")
    force: bool = IN_OUT.switch("replace existing files of --output, --events and --report")
    format: Format = FORMAT
    dry: bool = CHECKS.switch("print each run as TOML, with origins of values")
    watch: tuple[str, ...] = WATCH
    events: str | None = EVENTS
    timing: bool = SHOWN.switch("add seconds and tokens per second to records")
    allow_plugins: bool = PLUGINS
    order: tuple[str, ...] = ()  # "presets" and "strategies", in the order of -p and --strategy

    def in_order(self, order: Sequence[str]) -> CompareOptions:
        """The same options, with the order of the runs."""
        return replace(self, order=tuple(name for name in order if name in ("presets", "strategies")))


COMPARE = Command(
    "compare",
    CompareOptions,
    "genctl.commands.compare.job:compare",
    """Each -p and each --strategy is one run. A side is [NAME=]WHAT[@setting=value,…]. Other flags apply to every run
    and override its own settings. Runs on one checkpoint share the prefill and the forward pass of each step; each text
    is the one that its run gives alone.""",
    (
        'genctl compare -p greedy --strategy sample@top_k=5 "Hi"',
        "genctl compare -p creative -p precise -i prompts.txt",
        'genctl compare --models A,B -p greedy "The sea"',
    ),
    {
        "Runs": ("presets", "strategies", "models", "seeds", "baseline"),
        "Every run": ("model", "max_new_tokens", "do_sample", "seed", "set", "dry"),
        IN_OUT: ("input", "output", "format", "references"),
    },
    (
        WATCH_TSV,
        needless_force("output", "events", also=("report",)),
        same_file("events", "output"),
        TIMING,
        *PAGE,
        same_file("events", "report"),
    ),
)


def runs_of(options: CompareOptions) -> tuple[Side, ...]:
    """The runs of a comparison. Raises UsageError if there are fewer than two."""
    models = split_models(options.models)
    runs = read_runs(options.presets, options.strategies, models, options.flags, options.order, options.config_layers)
    if not runs or len(runs) * (options.seeds or 1) < 2:
        have = f"there is only {runs[0].name}" if runs else "there is none"
        raise UsageError(
            f"genctl compare needs at least two runs, but {have}",
            hint=f"give several -p PRESET, --strategy {FORM}, --models A,B, or repeat one with --seeds N",
        )
    return runs


def settled(options: CompareOptions, runs: Sequence[Side]) -> list[Resolved]:
    """The settings of all runs, with their checkpoints' settings as the lowest layer. Reads no weights."""
    beneath: dict[tuple[Any, ...], Layer] = {}
    for run in runs:
        runtime, key = run.early.runtime, loaded_with(run.early.runtime)
        if run.is_server:  # a server's own settings are unknown
            beneath[key] = Layer("backend", {}, declared="user")
        elif key not in beneath:
            from genctl.engines.session import checkpoint_layer

            beneath[key] = checkpoint_layer(runtime, **options.trust)

    def resolve(run: Side) -> Resolved:
        resolved = run.resolve([beneath[loaded_with(run.early.runtime)]])
        if resolved.runtime.backend is None:
            from genctl.engines.session import check_settings

            check_settings(resolved.generation)
        return resolved

    return each(runs, resolve)


# -- the runs: sides, each on one checkpoint, with its own settings ----------------------------------------------------

KINDS: tuple[Kind, ...] = ("server", "mode", "preset", "file", "checkpoint")  # allowed for --strategy
RESULTS = "a file of results is no way to decode; genctl parity MODEL --expect FILE compares with one"
_PLACES = ("model", "backend")  # where a run computes: a run's own values override -m and --backend


def check_prompt_caches(runs: Sequence[tuple[str, Runtime]]) -> None:
    """Raises UsageError if runs of one checkpoint name different prompt caches: they share the prefill of a prompt."""
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
    files: Sequence[Layer] = (),
) -> tuple[Side, ...]:
    """The runs: one for each preset, then one for each side of `strategies`; each on each model.

    `order` interleaves them: "presets" stands for the next of `presets`, "strategies" for the next of `strategies`.

    The layers of a run, lowest first: settings files (`files`), its presets, the environment, its own settings, flags.
    A checkpoint or server named by a run overrides the flags. With `models` a run's name is NAME@MODEL, or just MODEL
    if nothing else distinguishes the runs.

    Raises UsageError and PresetError: a duplicate name, every invalid side, an unknown preset.
    """
    texts = {"presets": iter(presets), "strategies": iter(strategies)}
    runs: list[Side] = []
    mistakes: list[GenctlError] = []
    for option in order or (*["presets"] * len(presets), *["strategies"] * len(strategies)):
        text = next(texts[option])
        try:
            if option == "presets":
                side = read(text, "-p", ("preset",))
            else:
                side = read(text, "--strategy", KINDS, refused={"file": RESULTS}, colon=True)
        except GenctlError as error:
            mistakes.append(error)
            continue
        above = {key: value for key, value in side.settings.items() if key in _PLACES}
        layers = (*settings.standing_layers(files, side.presets), *side.own(*above), *flags)
        run = replace(side, layers=layers)
        runs.append(_above_flags(run, above, side.origin) if above else run)
    if mistakes:
        check(runs, mistakes)
    if models:
        runs = [
            _above_flags(
                replace(run, name=f"{run.name}@{model.name}" if run.name else model.name), model.settings, "--models"
            )
            for run in runs or [Side("", (*settings.standing_layers(files), *flags))]
            for model in models
        ]
    if twice := [name for name, count in Counter(run.name for run in runs).items() if count > 1]:
        raise UsageError(
            f"{'two runs are' if len(twice) == 1 else 'several runs are'} called {', '.join(twice)}",
            hint="NAME= before a side gives it a name of its own, such as other=greedy",
        )
    return tuple(runs)


def split_models(texts: Iterable[str]) -> list[Side]:
    """The sides of --models. Raises UsageError for an empty or duplicate one."""
    models = [model for text in texts for model in read_list(text, "--models")]
    names = [model.name for model in models]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--models names {twice} twice")
    return models


def _above_flags(run: Side, values: Mapping[str, Any], option: str) -> Side:
    """The run with values at the level of flags, replacing a checkpoint or server named by flags."""
    replaced = {key for key in _PLACES if key in values}
    layers = tuple(
        replace(layer, values={key: value for key, value in layer.values.items() if key not in replaced})
        if layer.kind == "command"
        else layer
        for layer in run.layers
    )
    return replace(run, layers=(*layers, flags_layer(values, dict.fromkeys(values, option))))
