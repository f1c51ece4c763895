"""`genctl compare`: its table, its runs and its prompts, checked before anything is loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from genctl.batch import jsonl
from genctl.batch.printable import RefusedRow
from genctl.batch.rows import BadRow, InputRow
from genctl.cli.inputs import prompts_of
from genctl.cli.options import CHECKS, IN_OUT, SHOWN, TRUST, WATCH, WATCH_TSV, ModelOptions
from genctl.cli.run_options import SAME_EVENTS
from genctl.cli.table import Command, given, option, repeated, switch
from genctl.comparing import expectations
from genctl.comparing.runs import RunSpec, check_names, checkpoint_of, read_runs, recorded_layer, split_models
from genctl.config.dry import to_toml
from genctl.config.layers import Layer, Resolved, model_layer
from genctl.errors import Exit, GenctlError, InputError, PresetError, UsageError

RUNS = "Runs"


@dataclass(frozen=True)
class CompareOptions(ModelOptions):
    """The command line of `genctl compare`."""

    presets: tuple[str, ...] = repeated(
        "a preset by name or path: each is a run", "--preset", "-p", metavar="NAME", group=RUNS
    )
    strategies: tuple[str, ...] = repeated(
        "a run given inline; values as TOML or JSON; extends=PRESET",
        "--strategy",
        metavar="NAME:KNOB=VALUE,…",
        group=RUNS,
    )
    models: tuple[str, ...] = repeated("each run on each of these checkpoints", metavar="A,B", group=RUNS)
    seeds: int | None = option("repeat each run with N seeds (default: 1)", metavar="N", group=RUNS, least=1)
    baseline: str | None = option("show differences against this run", metavar="RUN", group=RUNS)
    set: tuple[str, ...] = repeated("any preset key, as a TOML value, for every run", metavar="KEY=VALUE", group=RUNS)
    references: str | None = option("expected texts, a line for each prompt", metavar="FILE", group=IN_OUT)
    force: bool = switch("replace existing --output, --save and --events files", group=IN_OUT)
    format: Literal["text", "json", "jsonl", "tsv", "md"] = option(
        "how results are written (default: text)", group=IN_OUT, default="text"
    )
    save: str | None = option("record outputs, for --expect", metavar="FILE", group=CHECKS)
    expect: str | None = option(
        "repeat what --save recorded; exit with 4 if it is different", metavar="FILE", group=CHECKS
    )
    tolerance: float | None = option(
        "how far --expect lets log-probabilities be, in nats (default: 0.001)", metavar="X", group=CHECKS, least=0
    )
    dry: bool = switch("print each run as TOML, with origins of values", group=CHECKS)
    watch: tuple[str, ...] = WATCH
    events: str | None = option("also write every event as JSON lines", metavar="FILE", group=SHOWN)
    timing: bool = switch("add seconds and tokens per second to records", group=SHOWN)
    allow_plugins: bool = switch("let presets name processors by dotted path", group=TRUST)


COMPARE = Command(
    "compare",
    CompareOptions,
    "genctl.cli.compare_job:perform",
    """Continue the same prompts in several ways, and see how the texts differ.

    Each -p and each --strategy is one run. Other flags hold for every run, above its preset or inline knobs. The runs
    of a checkpoint share one prefill of the prompt and one forward pass per step; each text equals what its run gives
    alone.""",
    (
        'genctl compare -p greedy -p beam5 "The sea"',
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
        (
            given("force", without=["output", "save", "events"]),
            "--force replaces an existing --output, --save or --events file, but there is neither",
        ),
        SAME_EVENTS,
        (
            lambda options: options.save is not None and options.save == options.events,
            "--save {save}: --events names the same file",
        ),
        (
            given("timing", format=("text", "md", "tsv")),
            "--timing adds seconds to records, but --format {format} has no place for them",
        ),
        (
            lambda options: options.save is not None and options.save in (options.output, options.expect),
            "--save {save}: another option names the same file",
        ),
    ),
)


def runs_of(options: CompareOptions, recording: expectations.Recording | None) -> tuple[RunSpec, ...]:
    """The runs of a comparison: those of the command line, or of the recording that --expect reads."""
    models = split_models(options.models)
    if recording is not None and not (options.presets or options.strategies or models):
        runs = tuple(
            RunSpec(one["name"], (recorded_layer(one["name"], one["settings"]), *options.flags))
            for one in recording.runs
        )
        check_names(runs)
        return runs
    runs = read_runs(options.presets, options.strategies, models, options.flags)
    if not runs or len(runs) * (options.seeds or 1) < 2:
        have = f"there is only {runs[0].name}" if runs else "there is none"
        raise UsageError(
            f"genctl compare needs at least two runs, but {have}",
            hint='give several -p PRESET, --strategy "NAME:knob=value" or --models A,B, or repeat one with --seeds N',
        )
    return runs


def each(runs: Sequence[RunSpec], ask: Any) -> list[Resolved]:
    """`ask` of every run. Raises PresetError with the mistakes of all runs."""
    resolved, mistakes, hints = [], [], []
    for run in runs:
        try:
            resolved.append(ask(run))
        except (PresetError, UsageError) as error:
            mistakes.append(error.message)
            hints.append(error.hint)
    if mistakes:
        raise PresetError("\n".join(mistakes), hint="; ".join(dict.fromkeys(hint for hint in hints if hint)))
    return resolved


def dry(options: CompareOptions, runs: Sequence[RunSpec], early: Sequence[Resolved]) -> int:
    """Print each run as TOML, with the settings of its checkpoint. Reads no weights."""
    resolved = settled(options, runs, early)
    pieces = [f"# run {run.name}\n\n{to_toml(one, defaults=False)}" for run, one in zip(runs, resolved, strict=True)]
    sys.stdout.write("\n".join(pieces))
    return int(Exit.DONE)


def settled(options: CompareOptions, runs: Sequence[RunSpec], early: Sequence[Resolved]) -> list[Resolved]:
    """The settings of all runs, with those of their checkpoints beneath them. Reads no weights."""
    from genctl.models.hub import generation_config
    from genctl.session import check_settings

    beneath: dict[tuple[Any, ...], Layer] = {}
    for one in early:
        if checkpoint_of(one) not in beneath:
            settings = generation_config(
                one.runtime, allow_pickle=options.allow_pickle, trust_remote_code=options.trust_remote_code
            )
            beneath[checkpoint_of(one)] = model_layer(settings, one.runtime.model)
    keys = {run.name: checkpoint_of(one) for run, one in zip(runs, early, strict=True)}

    def ask(run: RunSpec) -> Resolved:
        resolved = run.resolve([beneath[keys[run.name]]])
        with naming(run):
            check_settings(resolved.generation)
        return resolved

    return each(runs, ask)


@contextmanager
def naming(run: RunSpec) -> Iterator[None]:
    """Put the name of a run before the message of a GenctlError that passes through."""
    try:
        yield
    except GenctlError as error:
        if not error.message.startswith("run "):
            error.message = "\n".join(f"run {run.name}: {line}" for line in error.message.splitlines())
            error.args = (error.message,)
        raise


def rows_of(options: CompareOptions, recording: expectations.Recording | None) -> list[InputRow | BadRow] | None:
    """All prompts, or None if there is none."""
    if recording is not None and not options.arguments and options.input is None:
        if options.input_format is not None:
            raise UsageError(f"--input-format {options.input_format}: the prompts come from {options.expect}")
        if options.template is not None:
            raise UsageError(f"--template: the prompts come from {options.expect}, where they are made already")
        return list(_recorded_rows(recording, options.expect or ""))
    prompts = prompts_of(options)
    if prompts is None:
        return None
    with prompts:
        rows = list(prompts)
    if options.save is not None:
        bad = next((row for row in rows if isinstance(row, BadRow)), None)
        if bad is not None:
            raise InputError(f"--save records prompts that can be used: {bad.message}")
    return rows


def _recorded_rows(recording: expectations.Recording, name: str) -> Iterator[InputRow]:
    for index, data in enumerate(recording.prompts):
        try:
            own = jsonl.row_id(data)
            fields = jsonl.fields(data)
        except RefusedRow as error:
            raise InputError(f"--expect: {name}: prompt {index + 1}: {error}") from None
        id = str(index) if own is None else own
        where = f"{name}, prompt {index + 1}"
        yield InputRow(id, index, where=where, own_id=own not in (None, str(index)), **fields)
