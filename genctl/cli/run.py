"""`genctl run`: prompts in, text out."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from genctl.cli import options
from genctl.cli.options import generating, with_knobs


@with_knobs()
@generating
def run(
    context: typer.Context,
    prompts: options.Prompts = None,
    *,
    events: Annotated[
        str | None,
        typer.Option("--events", metavar="FILE", help="Also write every event as JSON lines.", show_default=False),
    ] = None,
    common: dict[str, Any],
    knobs: dict[str, Any],
) -> int:
    """Continue prompts with a causal or an encoder-decoder checkpoint.

    Prompts are arguments, else --input, else standard input, one per line. On a terminal the text streams as it is
    written; in a pipe it is plain.
    """
    from genctl.cli.run_options import asked_for

    return carry_out(context, asked_for(prompts, common, knobs, events=events))


def carry_out(context: typer.Context, asked: Any) -> int:
    """Do what was asked; where there is no prompt, say how to give one. Returns the exit status."""
    from genctl.cli.start_job import perform

    status = perform(asked)
    if status is None:
        print(context.get_usage(), file=sys.stderr)
        print("No prompt: give one as an argument, with --input FILE, or on standard input.", file=sys.stderr)
        print(f"Try {context.command_path} --help.", file=sys.stderr)
        return 2
    return status
