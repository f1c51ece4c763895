"""`genctl compare`: its table, its runs and its prompts, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from genctl.cli.table import Command, OptionGroup, given, needless_force, same_file
from genctl.commands.compare import expectations
from genctl.commands.compare.runs import check_names, read_runs, recorded_layers, split_models
from genctl.commands.options import (
    CHECKS,
    EVENTS,
    FORMAT,
    IN_OUT,
    PAGE,
    PICTURES,
    PLUGINS,
    SHOWN,
    TIMING,
    WATCH,
    WATCH_TSV,
    ModelOptions,
)
from genctl.config.layers import Layer, Resolved, model_layer
from genctl.config.sides import FORM, Side, each, is_results, loaded_with
from genctl.errors import UsageError

RUNS = OptionGroup("Runs")


@dataclass(frozen=True)
class CompareOptions(ModelOptions):
    """The command line of `genctl compare`."""

    presets: tuple[str, ...] = RUNS.repeated("a preset by name or path: each is a run", "NAME", "--preset", "-p")
    strategies: tuple[str, ...] = RUNS.repeated(
        "a run: how to decode (greedy, beam…), a preset, a checkpoint… (docs/usage.md)",
        "SIDE",
        "--strategy",
    )
    models: tuple[str, ...] = RUNS.repeated("each run on each of these checkpoints", "A,B")
    seeds: int | None = RUNS.option("repeat each run with N seeds (default: 1)", "N", least=1)
    baseline: str | None = RUNS.option("show differences against this run", "RUN")
    set: tuple[str, ...] = RUNS.repeated("any preset key, as a TOML value, for every run", "KEY=VALUE")
    references: str | None = IN_OUT.option("expected texts, a line for each prompt", "FILE")
    force: bool = IN_OUT.switch("replace existing files of --output, --save, --events, --report and --svg")
    format: Literal["text", "json", "jsonl", "tsv", "md"] = FORMAT
    save: str | None = CHECKS.option("record outputs, for --expect", "FILE")
    expect: str | None = CHECKS.option("repeat what --save recorded; exit with 4 if it is different", "FILE")
    tolerance: float | None = CHECKS.option(
        "how far --expect lets log-probabilities be, in nats (default: 0.001)", "X", least=0
    )
    dry: bool = CHECKS.switch("print each run as TOML, with origins of values")
    watch: tuple[str, ...] = WATCH
    events: str | None = EVENTS
    timing: bool = SHOWN.switch("add seconds and tokens per second to records")
    allow_plugins: bool = PLUGINS
    order: tuple[str, ...] = ()  # `presets` and `strategies`, as -p and --strategy follow each other

    def __post_init__(self) -> None:
        """A file of results is that of --expect. Raises UsageError."""
        super().__post_init__()
        if self.expect is None and (files := list(filter(is_results, self.strategies))):
            object.__setattr__(self, "expect", files[0])

    def in_order(self, order: Sequence[str]) -> CompareOptions:
        """The same options, with the order of the runs."""
        return replace(self, order=tuple(name for name in order if name in ("presets", "strategies")))


COMPARE = Command(
    "compare",
    CompareOptions,
    "genctl.commands.compare.job:CompareJob",
    """Each -p and each --strategy is one run. A side is [NAME=]WHAT[@setting=value,…]. Other flags hold for every run,
    above its own settings. The runs of a checkpoint share one prefill of the prompt and one forward pass per step; each
    text equals what its run gives alone.""",
    (
        'genctl compare --strategy greedy --strategy sample@top_k=5 "The sea"',
        "genctl compare -p creative -p precise -i prompts.txt",
        'genctl compare --models A,B -p greedy "The sea"',
    ),
    {
        "Runs": ("presets", "strategies", "models", "seeds", "baseline"),
        "Every run": ("model", "max_new_tokens", "do_sample", "seed", "set", "dry"),
        IN_OUT: ("input", "output", "format", "references"),
        CHECKS: ("save", "expect"),
    },
    (
        WATCH_TSV,
        (
            given("tolerance", without=["expect"]),
            "--tolerance says how far scores may be from --expect FILE, but there is none",
        ),
        needless_force("output", "save", "events", also=PICTURES),
        same_file("events", "output"),
        TIMING,
        *PAGE,
        same_file("events", "report"),
        same_file("save", "report"),
        same_file("events", "svg"),
        same_file("save", "svg"),
        same_file("save", "events"),
        same_file("save", "output"),
        same_file("save", "expect"),
    ),
)


def runs_of(options: CompareOptions, recording: expectations.Recording | None) -> tuple[Side, ...]:
    """The runs of a comparison: those of the command line, or of the recording that --expect reads."""
    models = split_models(options.models)
    files = list(filter(is_results, options.strategies))
    if other := next((file for file in files if file != options.expect), None):
        raise UsageError(f"--expect {options.expect} and {other}: outputs are compared with one file of results")
    if recording is not None and not (options.presets or models or len(options.strategies) > len(files)):
        runs = tuple(
            Side(one["name"], (*recorded_layers(one["name"], one["settings"], options.expect or ""), *options.flags))
            for one in recording.runs
        )
        check_names(runs)
        return runs
    runs = read_runs(options.presets, options.strategies, models, options.flags, options.order)
    if not runs or len(runs) * (options.seeds or 1) < 2:
        have = f"there is only {runs[0].name}" if runs else "there is none"
        raise UsageError(
            f"genctl compare needs at least two runs, but {have}",
            hint=f"give several -p PRESET, --strategy {FORM}, --models A,B, or repeat one with --seeds N",
        )
    return runs


def check_servers(options: CompareOptions, runs: Sequence[Side]) -> None:
    """Raises UsageError where the outputs of a server are to be repeated: nobody knows what it runs tomorrow."""
    remote = [run.name for run in runs if run.is_server]
    for name in ("save", "expect"):
        if remote and getattr(options, name) is not None:
            raise UsageError(f"--{name} compares token by token, which is not exact on a server (run {remote[0]})")


def settled(options: CompareOptions, runs: Sequence[Side]) -> list[Resolved]:
    """The settings of all runs, with those of their checkpoints beneath them. Reads no weights."""
    beneath: dict[tuple[Any, ...], Layer] = {}
    for run in runs:
        runtime, key = run.early.runtime, loaded_with(run.early.runtime)
        if run.is_server:  # a server keeps its settings to itself
            beneath[key] = Layer("backend", {}, said="user")
        elif key not in beneath:
            from genctl.models.hub import generation_settings

            settings = generation_settings(runtime, **options.trust)
            beneath[key] = model_layer(settings.values, runtime.model, settings.file)

    def ask(run: Side) -> Resolved:
        resolved = run.resolve([beneath[loaded_with(run.early.runtime)]])
        if resolved.runtime.backend is None:
            from genctl.engines.local.session import check_settings

            check_settings(resolved.generation)
        return resolved

    return each(runs, ask)
