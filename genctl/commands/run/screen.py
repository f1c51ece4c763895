"""What a person sees of `genctl run`: live text or beams, a bar of rows, the search of beams."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from genctl.commands.options import shown_top
from genctl.commands.run.options import RunOptions
from genctl.engines.protocol import StreamProgress
from genctl.events import Event, Failed, Loading
from genctl.io.writers import TEXTS
from genctl.terminal import first_sign
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.standard_streams import is_terminal, never_fail_to_encode

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.commands.run.run_view import RunView
    from genctl.commands.run.search_output import Search
    from genctl.terminal.progress_bars import RowsBar


class Screen:
    """The view of a run, with what moves beside it.

    `live`: results are shown while they are made, and not written. `lone`: there is one prompt. `several`: it may have
    several texts.
    """

    def __init__(self, options: RunOptions, interrupt: Interrupt, *, live: bool, lone: bool, several: bool) -> None:
        self.options, self.interrupt = options, interrupt
        self.live, self.lone, self.several = live, lone, several
        self.err: Console | None = None
        self.bar: RowsBar | None = None
        self.view: RunView | None = None  # made where anything is shown: the import of Rich takes time
        if shows(options, live=live):
            from genctl.terminal.console import make_consoles

            out, self.err = make_consoles(options.color)
            self.view = make_view(options, out, self.err, live=live, lone=lone, several=several)
        else:
            for stream in (sys.stdout, sys.stderr):
                never_fail_to_encode(stream)
        self.search: Search | None = None
        if options.stream or options.tree or options.tree_format:
            from genctl.commands.run.search_output import Search

            self.search = Search(options, self.err, stream=options.stream, live=live)

    def open(self, stack: ExitStack) -> None:
        """Begin to draw, until `stack` closes."""
        if self.view is not None:
            stack.enter_context(self.view)
        if self.search is not None:
            stack.enter_context(self.search)

    @property
    def wants_bar(self) -> bool:
        """Whether a bar counts the rows."""
        return wants_bar(self.options, self.err, live=self.live)

    def open_bar(self, stack: ExitStack, total: int | None, done: int) -> None:
        """Begin to count rows, if a bar is wanted."""
        if self.err is not None and self.wants_bar:
            from genctl.terminal.progress_bars import RowsBar

            self.bar = RowsBar(self.err, total, done=done)
            stack.callback(self.bar.close)

    def feed(self, event: Event) -> None:
        """Draw an event. A failed row is reported with its record, unless the view shows it."""
        if self.view is not None and (self.live or not isinstance(event, Failed)):
            self.view.feed(event)

    def beside(self, *, counts: bool) -> list[Callable[[Event], object]]:
        """What else listens. `counts`: the bar counts the tokens of events."""
        search = [] if self.search is None else [self.search.feed]
        return [*search, *([self.bar.feed] if counts and self.bar is not None else [])]

    def loading(self, event: Loading) -> None:
        """Show how much of a checkpoint is read."""
        words = f"reading {event.done}/{event.total} {event.unit}"
        if event.unit != "B" and self.live and self.lone and first_sign.status(words, restart=False):
            return
        with self.interrupt.busy():
            if self.bar is not None:
                self.bar.hide()  # an auxiliary model is loaded: its bar takes the place of ours
            if self.view is not None:
                self.view.feed(event)

    def progress(self, progress: StreamProgress) -> None:
        """Show what the engine is at work on."""
        if self.bar is None:
            return
        with self.interrupt.busy():
            self.bar.work(progress.rows, progress.tokens, progress.speeds if self.options.verbose else ())

    def row_done(self, *, failed: bool) -> None:
        """Count a row, even if its record waits for that of an earlier row."""
        if self.bar is not None:
            self.bar.row(failed=failed)

    def hide(self) -> None:
        """Take away what moves on the terminal."""
        if self.bar is not None:
            self.bar.hide()
        if self.view is not None:
            self.view.pause()


def shows(options: RunOptions, *, live: bool) -> bool:
    """Whether anything is shown beside the output: live text, bars, details, trees, a summary."""
    return live or _has_details(options) or options.tree or not _is_quiet(options, live=live)


def _is_quiet(options: RunOptions, *, live: bool) -> bool:
    return options.quiet or not (live or is_terminal(sys.stderr) or options.verbose)


def _has_details(options: RunOptions) -> bool:
    return options.scores or options.explain or bool(options.watch)


def make_view(options: RunOptions, out: Console, err: Console, *, live: bool, lone: bool, several: bool) -> RunView:
    """The view of a run. Where records are written, it shows only the summary and what --scores asks for.

    `lone`: there is one prompt. `several`: it may have several texts.
    """
    from genctl.commands.run.run_view import RunView
    from genctl.terminal.console import discard

    details = _has_details(options)
    shared: dict[str, Any] = {
        "explain": options.explain,
        "verbose": options.verbose,
        "echo": options.echo is not False if live else bool(options.echo),
        "messages": options.echo is True or options.view == "beam",  # a person knows what was just typed
        "candidates": not options.quiet,
        "scores": options.scores or bool(options.watch) or (options.top_logprobs or 0) > 0,
        "top": shown_top(options),
        "labels": several or not lone,
        "numbered": not lone,
    }
    if live and options.view == "beam":
        from genctl.commands.run.beam_view import BeamView

        return BeamView(out, err, quiet=options.quiet, tree=options.tree, formula=not options.quiet, **shared)
    shown = out if live else err if details and options.format in TEXTS else discard()
    return RunView(shown, err, live=live, quiet=_is_quiet(options, live=live), **shared)


def wants_bar(options: RunOptions, err: Console | None, *, live: bool) -> bool:
    """Whether to show a progress bar: only where nothing else is written to its terminal."""
    alone = options.to_file or not is_terminal(sys.stdout)
    details = options.format in TEXTS and _has_details(options)
    if err is None or not alone or live or options.quiet or details:
        return False
    from genctl.terminal.console import takes_lines

    return err.is_interactive or takes_lines(err)
