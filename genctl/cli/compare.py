"""`genctl compare`: several strategies, or several checkpoints, on the same prompts."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import typer

from genctl.cli import options
from genctl.cli.options import knob_layers, with_knobs

Runs = Annotated[
    list[str] | None,
    typer.Option("--preset", "-p", help="A preset by name or path: each is a run.", show_default=False),
]
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        metavar="NAME:KNOB=VALUE,…",
        help="A run given inline; values as TOML or JSON; extends=PRESET.",
        show_default=False,
    ),
]
Format = Annotated[
    Literal["text", "json", "jsonl", "tsv", "md"], typer.Option("--format", help="How results are written.")
]


@with_knobs()
def compare(
    context: typer.Context,
    prompts: options.Prompts = None,
    *,
    preset: Runs = None,
    strategy: Strategies = None,
    models: Annotated[
        list[str] | None,
        typer.Option("--models", metavar="A,B", help="Each run on each of these checkpoints.", show_default=False),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", metavar="N", help="Repeat each run with N seeds (default: 1).", show_default=False),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="RUN", help="Show differences against this run.", show_default=False),
    ] = None,
    input: options.Input = None,
    input_format: options.InputFormat = None,
    references: Annotated[
        str | None,
        typer.Option(
            "--references", metavar="FILE", help="What should come out, a line for each prompt.", show_default=False
        ),
    ] = None,
    output: options.Output = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing --output or --save file.")] = False,
    format: Format = "text",
    save: Annotated[
        str | None,
        typer.Option("--save", metavar="FILE", help="Record outputs, for --expect.", show_default=False),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="FILE",
            help="Repeat what --save recorded; exit with 4 if it is different.",
            show_default=False,
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="X",
            help="How far --expect lets log-probabilities be, in nats (default: 0.001).",
            show_default=False,
        ),
    ] = None,
    set: options.Set = None,
    events: Annotated[
        str | None,
        typer.Option("--events", metavar="FILE", help="Also write every event as JSON lines.", show_default=False),
    ] = None,
    timing: Annotated[bool, typer.Option("--timing", help="Add seconds and tokens per second to records.")] = False,
    dry: Annotated[bool, typer.Option("--dry", help="Print each run as TOML with the origin of every value.")] = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    color: options.Color = "auto",
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    allow_plugins: options.AllowPlugins = False,
    knobs: dict[str, Any],
) -> int:
    """Continue the same prompts in several ways, and see how the texts differ.

    Each -p and each --strategy is one run. What other flags say holds for every run and goes above its preset or
    inline knobs. The runs of a checkpoint share one reading of the prompt and one forward pass per step; each text
    equals what its run gives alone.
    """
    from genctl.cli.compare_job import perform
    from genctl.cli.compare_options import CompareOptions

    asked = CompareOptions(
        arguments=tuple(prompts or ()),
        presets=tuple(preset or ()),
        strategies=tuple(strategy or ()),
        models=tuple(models or ()),
        seeds=seeds,
        baseline=baseline,
        save=save,
        expect=expect,
        tolerance=tolerance,
        references=references,
        input=input,
        input_format=input_format,
        output=output,
        force=force,
        format=format,
        flags=knob_layers(knobs, set),
        events=events,
        timing=timing,
        dry=dry,
        quiet=quiet,
        verbose=verbose,
        color=color,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
        allow_plugins=allow_plugins,
    )
    status = perform(asked)
    if status is None:
        print(context.get_usage(), file=sys.stderr)
        print("No prompt: give one as an argument, with --input FILE, or on standard input.", file=sys.stderr)
        print(f"Try {context.command_path} --help.", file=sys.stderr)
        return 2
    return status
