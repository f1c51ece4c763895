"""`genctl inspect-cache`: what is in the cache, pass by pass."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import typer

from genctl.cli import options
from genctl.cli.options import knob_layers, with_knobs

MEASURE, PLAN, FILES = "What is shown", "A plan instead", "Prompt cache on disk"
Format = Annotated[Literal["text", "json", "tsv"], typer.Option("--format", help="How the result is written.")]


def _flag(name: str, help: str, panel: str) -> Any:
    return typer.Option(name, help=help, rich_help_panel=panel)


def _value(name: str, metavar: str, help: str, panel: str) -> Any:
    return typer.Option(name, metavar=metavar, help=help, rich_help_panel=panel, show_default=False)


@with_knobs(exclude=frozenset({"batch_size"}))
def inspect_cache(
    context: typer.Context,
    prompts: options.Prompts = None,
    *,
    steps: Annotated[
        int | None, _value("--steps", "N", "Passes after the prompt, of one token each (default: 8).", MEASURE)
    ] = None,
    inputs: Annotated[
        bool, _flag("--inputs", "Show what each pass is given, with and without a cache.", MEASURE)
    ] = False,
    heatmap: Annotated[
        bool, _flag("--heatmap", "Show how long keys and values are, by layer and position.", MEASURE)
    ] = False,
    diff: Annotated[
        str | None,
        _value(
            "--diff", "PROMPT", "What this prompt could reuse of the first one's cache, and what that saves.", MEASURE
        ),
    ] = None,
    save_cache: Annotated[
        str | None, _value("--save-cache", "FILE", "Keep the prompt's cache, for --prompt-cache.", FILES)
    ] = None,
    plan: Annotated[
        bool, _flag("--plan", "Predict bytes from the checkpoint's config alone; nothing is decoded.", PLAN)
    ] = False,
    batch: Annotated[int | None, _value("--batch", "N", "With --plan: prompts at once (default: 1).", PLAN)] = None,
    length: Annotated[
        int | None, _value("--length", "N", "With --plan: tokens of each row (default: the context).", PLAN)
    ] = None,
    source_length: Annotated[
        int | None, _value("--source-length", "N", "With --plan: tokens that an encoder reads.", PLAN)
    ] = None,
    memory: Annotated[
        str | None, _value("--memory", "SIZE", "With --plan: what must hold weights and cache, such as 24GiB.", PLAN)
    ] = None,
    input: options.Input = None,
    input_format: options.InputFormat = None,
    output: options.Output = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing --output or --save-cache file.")] = False,
    format: Format = "text",
    preset: options.Preset = None,
    set: options.Set = None,
    strategy: options.Strategy = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    color: options.Color = "auto",
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    allow_plugins: options.AllowPlugins = False,
    knobs: dict[str, Any],
) -> int:
    """Show what is in the KV cache, layer by layer and pass by pass, measured.

    The prompt is read (step 0), then --steps passes of one token each follow, under any preset. Bytes and shapes are
    those of the tensors in memory. Prompts given together are decoded together, in one batch.

    --format json writes one object: of the last pass `layers`, `total_bytes` and what is derived from them, and in
    `steps` every pass with what it was given. Several prompts are listed in `prompts`, and `rows` of a step says which
    of them each row belongs to. --format tsv has a line for each layer of each pass.
    """
    from genctl.cli.inspect_job import perform
    from genctl.cli.inspect_options import InspectOptions

    asked = InspectOptions(
        arguments=tuple(prompts or ()),
        steps=steps,
        inputs=inputs,
        heatmap=heatmap,
        diff=diff,
        save_cache=save_cache,
        plan=plan,
        batch=batch,
        length=length,
        source_length=source_length,
        memory=memory,
        input=input,
        input_format=input_format,
        output=output,
        force=force,
        format=format,
        presets=tuple(preset or ()),
        flags=knob_layers(knobs, set, strategy),
        strategy=strategy or "",
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
