"""What a generating command shows while it runs: a view of the text or the tree, and a progress bar."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from genctl.cli.inputs import is_terminal
from genctl.cli.run_options import RunOptions

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.render.rows_bar import RowsBar
    from genctl.render.run_view import RunView


def shows(asked: RunOptions, *, live: bool) -> bool:
    """Whether anything is shown beside what is written: text as it comes, bars, details, trees, a summary."""
    details = asked.scores or asked.explain or asked.tree
    return live or details or not _is_quiet(asked, live=live)


def _is_quiet(asked: RunOptions, *, live: bool) -> bool:
    return asked.quiet or not (live or is_terminal(sys.stderr) or asked.verbose)


def make_view(asked: RunOptions, out: Console, err: Console, *, live: bool, top: int, several: bool) -> RunView:
    """What is shown. Where records are written instead, only the summary is, and what --scores asks for."""
    from genctl.render.console import discard
    from genctl.render.run_view import RunView

    details = asked.scores or asked.explain
    scores = asked.scores or (asked.top_logprobs or 0) > 0
    if live and asked.view == "beam":
        from genctl.render.beam_view import BeamView

        return BeamView(
            out,
            err,
            echo=asked.echo,
            scores=scores,
            top=top,
            explain=asked.explain,
            labels=several,
            quiet=asked.quiet,
            verbose=asked.verbose,
            tree=asked.tree,
            formula=not asked.quiet,
        )
    return RunView(
        out if live else err if details and asked.format == "text" else discard(),
        err,
        live=live,
        echo=asked.echo,
        scores=scores,
        top=top,
        explain=asked.explain,
        labels=several,
        quiet=_is_quiet(asked, live=live),
        verbose=asked.verbose,
    )


def wants_bar(asked: RunOptions, err: Console | None, *, live: bool) -> bool:
    """Whether a progress bar has a place of its own: nothing else is written to the terminal it would be on."""
    alone = asked.to_file or not is_terminal(sys.stdout)
    details = asked.format == "text" and (asked.scores or asked.explain)
    return err is not None and err.is_interactive and alone and not (live or asked.quiet or details)


def make_bar(err: Console, total: int | None, done: int) -> RowsBar:
    """The bar for so many rows, of which some are done."""
    from genctl.render.rows_bar import RowsBar

    return RowsBar(err, total, done=done)
