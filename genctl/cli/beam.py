"""`genctl beam`: a search that can be watched."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import typer

from genctl.cli import options
from genctl.cli.options import knob_layers, with_knobs
from genctl.cli.run import End
from genctl.cli.searching import BENEATH


@with_knobs()
def beam(
    context: typer.Context,
    prompts: options.Prompts = None,
    *,
    input: options.Input = None,
    input_format: options.InputFormat = None,
    output: options.Output = None,
    force: options.Force = False,
    format: options.Format = "text",
    preset: options.Preset = None,
    set: options.Set = None,
    strategy: options.Strategy = None,
    echo: Annotated[bool, typer.Option("--echo", help="Begin the text with the prompt.")] = False,
    scores: Annotated[
        bool, typer.Option("--scores", help="Show each token's probability, rank, entropy and alternatives.")
    ] = False,
    top_logprobs: Annotated[
        int | None,
        typer.Option("--top-logprobs", metavar="K", help="Alternatives reported for each token.", show_default=False),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what each logits processor did to each step.")
    ] = False,
    events: Annotated[
        str | None,
        typer.Option(
            "--trace",
            "--events",
            metavar="FILE",
            help="Also write every event as JSON lines, for genctl replay.",
            show_default=False,
        ),
    ] = None,
    fail_on: Annotated[
        list[End] | None,
        typer.Option(
            "--fail-on",
            help="Exit with 4 if any sequence ended so; repeatable.",
            show_default=False,
        ),
    ] = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="Draw the search tree at the end; on standard error where output is piped.")
    ] = False,
    tree_format: Annotated[
        Literal["text", "dot", "json"] | None,
        typer.Option("--tree-format", help="Write the search tree instead of the texts.", show_default=False),
    ] = None,
    unordered: Annotated[bool, typer.Option("--unordered", help="Write results as they finish.")] = False,
    stream: options.Stream = False,
    timing: Annotated[bool, typer.Option("--timing", help="Add load, prefill and decode seconds to records.")] = False,
    dry: options.Dry = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    color: options.Color = "auto",
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    allow_plugins: options.AllowPlugins = False,
    knobs: dict[str, Any],
) -> int:
    """Search for the best continuation, and watch the beams.

    As genctl run, with num_beams = 5 where nothing else sets it. On a terminal the beams evolve, and the table of all
    that was finished follows with the formula of the score; in a pipe comes the best text, or with
    --num-return-sequences N and --format tsv or jsonl the n best with their scores (and, in jsonl, `parents`: the row
    that each token continued).
    """
    from genctl.cli.job import Asked, perform

    asked = Asked(
        arguments=tuple(prompts or ()),
        input=input,
        input_format=input_format,
        output=output,
        force=force,
        format=format,
        presets=tuple(preset or ()),
        flags=knob_layers(knobs, set, strategy),
        strategy=strategy or "",
        echo=echo,
        scores=scores,
        top_logprobs=top_logprobs,
        explain=explain,
        events=events,
        view="beam",
        beneath=BENEATH,
        tree=tree,
        tree_format=tree_format,
        fail_on=tuple(end.value for end in fail_on or ()),
        unordered=unordered,
        stream=stream,
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
