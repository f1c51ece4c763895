"""What `genctl inspect-cache` was asked, checked as far as that goes before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from genctl.batch.rows import BadRow, InputRow
from genctl.cli.options import check_count
from genctl.config.layers import Layer, Resolved
from genctl.errors import UsageError

STEPS = 8


@dataclass(frozen=True)
class InspectOptions:
    """The command line of `genctl inspect-cache`, parsed."""

    arguments: tuple[str, ...] = ()
    steps: int | None = None
    inputs: bool = False
    heatmap: bool = False
    diff: str | None = None
    save_cache: str | None = None
    plan: bool = False
    batch: int | None = None
    length: int | None = None
    source_length: int | None = None
    memory: str | None = None
    input: str | None = None
    input_format: str | None = None
    output: str | None = None
    force: bool = False
    format: str = "text"
    presets: tuple[str, ...] = ()
    flags: Sequence[Layer] = ()
    strategy: str = ""
    quiet: bool = False
    verbose: bool = False
    color: str = "auto"
    allow_pickle: bool = False
    trust_remote_code: bool = False
    allow_plugins: bool = False


def check(asked: InspectOptions) -> None:
    """Everything that flags alone can get wrong. Raises UsageError."""
    check_count("steps", asked.steps, least=0)
    _check_plan(asked)
    if asked.force and asked.output is None and asked.save_cache is None:
        raise UsageError("--force replaces an existing --output or --save-cache file, but there is neither")
    if asked.save_cache == "-":
        raise UsageError("--save-cache -: a prompt cache is a file that is read again; give it a name")
    if asked.save_cache is not None and asked.save_cache == asked.output:
        raise UsageError(f"--save-cache {asked.save_cache}: --output names the same file")
    if asked.diff == "":
        raise UsageError("--diff: the other prompt is empty")
    if asked.format == "tsv":
        for flag, given in (
            ("--inputs", asked.inputs),
            ("--heatmap", asked.heatmap),
            ("--diff", asked.diff is not None),
        ):
            if given:
                raise UsageError(f"{flag} has no place in --format tsv; --format json has it")


def _check_plan(asked: InspectOptions) -> None:
    """What belongs to a plan and what to a measurement. Raises UsageError, naming the option."""
    planned = (
        ("--batch", asked.batch),
        ("--length", asked.length),
        ("--source-length", asked.source_length),
        ("--memory", asked.memory),
    )
    if not asked.plan:
        for flag, given in planned:
            if given is not None:
                raise UsageError(f"{flag} {given} belongs to --plan; here bytes are measured")
        return
    for name in ("batch", "length", "source_length"):
        check_count(name.replace("_", "-"), getattr(asked, name), least=1)
    for flag, given in (
        ("a prompt", bool(asked.arguments)),
        ("--input", asked.input is not None),
        ("--input-format", asked.input_format is not None),
        ("--steps", asked.steps is not None),
        ("--inputs", asked.inputs),
        ("--heatmap", asked.heatmap),
        ("--diff", asked.diff is not None),
        ("--save-cache", asked.save_cache is not None),
        ("--output", asked.output is not None),
    ):
        if given:
            raise UsageError(f"{flag} belongs to a measurement, and --plan decodes nothing")


def check_length(early: Resolved, given: int | None, steps: int) -> None:
    """Raises UsageError where another option says how many tokens are written."""
    for name in ("max_new_tokens", "max_length", "batch_size"):
        setting = early.settings.get(name)
        if setting is None or setting.kind != "command" or setting.value is None:
            continue
        said = f"{name} = {setting.value} ({setting.place})"
        if name == "batch_size":
            raise UsageError(f"{said}: prompts given together are decoded in one batch")
        hint = f"--steps {max(setting.value - 1, 0)} writes {setting.value} tokens" if name == "max_new_tokens" else ""
        default = "" if given is not None else ", the default,"
        raise UsageError(f"{said} contradicts --steps {steps}{default} which writes {steps + 1} tokens", hint=hint)


def check_rows(asked: InspectOptions, rows: Sequence[InputRow | BadRow]) -> None:
    """Raises UsageError where an option takes exactly one prompt."""
    if len(rows) == 1:
        return
    for flag, given in (
        ("--save-cache", asked.save_cache is not None),
        ("--heatmap", asked.heatmap),
        ("--diff", asked.diff is not None),
    ):
        if given:
            raise UsageError(f"{flag} takes exactly one prompt; there are {len(rows)}")
