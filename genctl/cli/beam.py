"""`genctl beam`: a search that can be watched."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from genctl.cli import options
from genctl.cli.beam_output import BENEATH
from genctl.cli.options import generating, with_knobs
from genctl.cli.run import carry_out


@with_knobs()
@generating
def beam(
    context: typer.Context,
    prompts: options.Prompts = None,
    *,
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
    tree: Annotated[
        bool, typer.Option("--tree", help="Draw the search tree at the end; on standard error where output is piped.")
    ] = False,
    tree_format: Annotated[
        Literal["text", "dot", "json"] | None,
        typer.Option("--tree-format", help="Write the search tree instead of the texts.", show_default=False),
    ] = None,
    common: dict[str, Any],
    knobs: dict[str, Any],
) -> int:
    """Search for the best continuation, and watch the beams.

    As genctl run, with num_beams = 5 where nothing else sets it. On a terminal the beams evolve, and the table of all
    that was finished follows with the formula of the score; in a pipe comes the best text, or with
    --num-return-sequences N and --format tsv or jsonl the n best with their scores (and, in jsonl, `parents`: the row
    that each token continued).
    """
    from genctl.cli.run_options import asked_for

    asked = asked_for(
        prompts, common, knobs, events=events, view="beam", beneath=BENEATH, tree=tree, tree_format=tree_format
    )
    return carry_out(context, asked)
