"""What `genctl compare` was asked: its runs and its prompts, checked as far as that goes before anything is loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from genctl.batch import jsonl
from genctl.batch.printable import RefusedRow
from genctl.batch.rows import BadRow, InputRow
from genctl.cli.inputs import prompts_of
from genctl.comparing import expectations
from genctl.comparing.runs import RunSpec, check_names, checkpoint_of, read_runs, recorded_layer, split_models
from genctl.config.dry import to_toml
from genctl.config.layers import Layer, Resolved, model_layer
from genctl.errors import Exit, GenctlError, InputError, PresetError, UsageError


@dataclass(frozen=True)
class CompareOptions:
    """The command line of `genctl compare`, parsed."""

    arguments: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    seeds: int | None = None
    baseline: str | None = None
    save: str | None = None
    expect: str | None = None
    tolerance: float | None = None
    references: str | None = None
    input: str | None = None
    input_format: str | None = None
    output: str | None = None
    force: bool = False
    format: str = "text"
    flags: Sequence[Layer] = ()
    events: str | None = None
    timing: bool = False
    dry: bool = False
    quiet: bool = False
    verbose: bool = False
    color: str = "auto"
    allow_pickle: bool = False
    trust_remote_code: bool = False
    allow_plugins: bool = False


def check(asked: CompareOptions) -> None:
    """Everything that flags alone can get wrong. Raises UsageError."""
    if asked.seeds is not None and asked.seeds < 1:
        raise UsageError(f"--seeds {asked.seeds}: must be at least 1")
    if asked.tolerance is not None:
        if asked.expect is None:
            raise UsageError("--tolerance says how far scores may be from --expect FILE, but there is none")
        if not asked.tolerance >= 0:
            raise UsageError(f"--tolerance {asked.tolerance:g}: must be at least 0")
    if asked.force and asked.output is None and asked.save is None:
        raise UsageError("--force replaces an existing --output or --save file, but there is neither")
    if asked.timing and asked.format in ("text", "md", "tsv"):
        raise UsageError(f"--timing adds seconds to records, but --format {asked.format} has no place for them")
    if asked.save is not None and asked.save in (asked.output, asked.expect):
        raise UsageError(f"--save {asked.save}: another option names the same file")


def runs_of(asked: CompareOptions, recording: expectations.Recording | None) -> tuple[RunSpec, ...]:
    """The runs of a comparison: those of the command line, or of the recording that --expect reads."""
    models = split_models(asked.models)
    if recording is not None and not (asked.presets or asked.strategies or models):
        runs = tuple(
            RunSpec(one["name"], (recorded_layer(one["name"], one["settings"]), *asked.flags)) for one in recording.runs
        )
        check_names(runs)
        return runs
    runs = read_runs(asked.presets, asked.strategies, models, asked.flags)
    if len(runs) < 2:
        have = f"there is only {runs[0].name}" if runs else "there is none"
        raise UsageError(
            f"genctl compare needs at least two runs, but {have}",
            hint='give several -p PRESET, --strategy "NAME:knob=value" or --models A,B',
        )
    return runs


def each(runs: Sequence[RunSpec], ask: Any) -> list[Resolved]:
    """`ask` of every run; the mistakes of all of them at once."""
    found, mistakes, hints = [], [], []
    for run in runs:
        try:
            found.append(ask(run))
        except (PresetError, UsageError) as error:
            mistakes.append(error.message)
            hints.append(error.hint)
    if mistakes:
        raise PresetError("\n".join(mistakes), hint="; ".join(dict.fromkeys(hint for hint in hints if hint)))
    return found


def dry(asked: CompareOptions, runs: Sequence[RunSpec], early: Sequence[Resolved]) -> int:
    """Each run as TOML, with what its checkpoint says; weights are not read."""
    resolved = settled(asked, runs, early)
    pieces = [f"# run {run.name}\n\n{to_toml(one, defaults=False)}" for run, one in zip(runs, resolved, strict=True)]
    sys.stdout.write("\n".join(pieces))
    return int(Exit.DONE)


def settled(asked: CompareOptions, runs: Sequence[RunSpec], early: Sequence[Resolved]) -> list[Resolved]:
    """The runs with their checkpoints' settings beneath them, checked as far as that goes without weights."""
    from genctl.models.hub import generation_config
    from genctl.session import check_settings

    beneath: dict[tuple[Any, ...], Layer] = {}
    for one in early:
        if checkpoint_of(one) not in beneath:
            said = generation_config(
                one.runtime, allow_pickle=asked.allow_pickle, trust_remote_code=asked.trust_remote_code
            )
            beneath[checkpoint_of(one)] = model_layer(said, one.runtime.model)
    keys = {run.name: checkpoint_of(one) for run, one in zip(runs, early, strict=True)}

    def ask(run: RunSpec) -> Resolved:
        resolved = run.resolve([beneath[keys[run.name]]])
        with Naming(run):
            check_settings(resolved.generation)
        return resolved

    return each(runs, ask)


class Naming:
    """Puts the name of a run before the message of a GenctlError that passes through."""

    def __init__(self, run: RunSpec) -> None:
        self.run = run

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, GenctlError) and not error.message.startswith("run "):
            error.message = "\n".join(f"run {self.run.name}: {line}" for line in error.message.splitlines())
            error.args = (error.message,)


def rows_of(asked: CompareOptions, recording: expectations.Recording | None) -> list[InputRow | BadRow] | None:
    """All prompts. None if there are none to be had."""
    if recording is not None and not asked.arguments and asked.input is None:
        if asked.input_format is not None:
            raise UsageError(f"--input-format {asked.input_format}: the prompts come from {asked.expect}")
        return list(_recorded_rows(recording, asked.expect or ""))
    prompts = prompts_of(asked)
    if prompts is None:
        return None
    with prompts:
        rows = list(prompts)
    if asked.save is not None:
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
        yield InputRow(str(index) if own is None else own, index, where=f"{name}, prompt {index + 1}", **fields)
