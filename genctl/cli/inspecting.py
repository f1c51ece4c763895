"""What `genctl inspect-cache` was asked, checked as far as that goes before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from genctl.batch.rows import BadRow, InputRow
from genctl.cli.interrupt import Interrupt
from genctl.cli.options import check_count
from genctl.cli.prompting import prompts_of
from genctl.config import settings
from genctl.config.layers import Layer, Resolved, resolve
from genctl.errors import UsageError

STEPS = 8


@dataclass(frozen=True)
class Asked:
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


def perform(asked: Asked) -> int | None:
    """Do what was asked. Returns the exit status, or None if there is no prompt to be had."""
    _check(asked)
    layers = [*settings.standing_layers(asked.presets), *asked.flags]
    early = resolve(layers, tentative=True)
    if asked.plan:
        return _plan(asked, early)
    steps = STEPS if asked.steps is None else asked.steps
    _check_length(early, asked.steps, steps)
    place = f"--steps {steps}"
    layers.append(Layer("flag", {"max_new_tokens": steps + 1}, {"max_new_tokens": place}, "command"))
    early = resolve(layers, tentative=True)
    prompts = prompts_of(asked)
    if prompts is None:
        return None
    from genctl.cli.inspecting_job import Job

    with Interrupt() as interrupt:
        with prompts:
            rows = list(prompts)
        _check_rows(asked, rows)
        return Job(asked, layers, early, steps, rows, interrupt).run()


def _check(asked: Asked) -> None:
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


def _check_plan(asked: Asked) -> None:
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


def _plan(asked: Asked, early: Resolved) -> int:
    from genctl.cli import cache_plan

    if early.runtime.prompt_cache is not None and early.settings["prompt_cache"].kind == "command":
        raise UsageError("--prompt-cache belongs to a measurement, and --plan decodes nothing")
    return cache_plan.perform(
        early.runtime,
        early.generation,
        batch=asked.batch or 1,
        length=asked.length,
        source_length=asked.source_length,
        memory=asked.memory,
        format=asked.format,
        color=asked.color,
        allow_pickle=asked.allow_pickle,
        trust_remote_code=asked.trust_remote_code,
    )


def _check_length(early: Resolved, given: int | None, steps: int) -> None:
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


def _check_rows(asked: Asked, rows: Sequence[InputRow | BadRow]) -> None:
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
