"""The screen of `genctl run`: live text or beams, a progress bar of rows, search trees."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from genctl.commands.job import Job
from genctl.commands.options import shown_top
from genctl.commands.run.options import RunOptions
from genctl.events import Event, Failed, Finished, Loading
from genctl.io import writers
from genctl.io.writers import TEXTS
from genctl.terminal import loading_line
from genctl.terminal.standard_streams import is_terminal, never_fail_to_encode

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.commands.run.run_view import RunView
    from genctl.commands.run.text_stream import StableTexts
    from genctl.pages.search_tree import SearchTrees
    from genctl.terminal.live_region import RowsBar


class Screen:
    """The view of a run, the text of --stream, the trees of --tree and --tree-format, and a progress bar of rows.

    `several`: a prompt may have several texts. With `job.live`, results are shown while generated, and not written.
    """

    def __init__(self, job: Job, options: RunOptions, *, several: bool) -> None:
        self.job, self.options = job, options
        self.err: Console | None = None
        self.bar: RowsBar | None = None
        self.view: RunView | None = None  # made only if anything is shown, because importing Rich takes time
        self.trees: SearchTrees | None = None
        self.stream: StableTexts | None = None
        quiet = options.quiet or not (job.live or is_terminal(sys.stderr) or options.verbose)
        if job.live or _has_details(options) or options.tree or not quiet:
            from genctl.terminal.console import make_consoles

            out, self.err = make_consoles(options.color)
            self.view = _view(job, options, out, self.err, quiet=quiet, several=several)
        else:
            for stream in (sys.stdout, sys.stderr):
                never_fail_to_encode(stream)
        if options.tree or options.tree_format:
            from genctl.pages.search_tree import SearchTrees

            self.trees = SearchTrees()
        if options.stream:
            self.stream = open_stream(options)
        self.wants_bar = wants_bar(options, self.err, live=job.live)

    def open(self, stack: ExitStack) -> None:
        """Draw until `stack` closes."""
        if self.view is not None:
            stack.enter_context(self.view)
        # an OSError means that a stream is closed
        stack.push(lambda kind, error, trace: None if isinstance(error, OSError) else self._finish())

    def _finish(self) -> None:
        """End the text of --stream, and draw the trees of --tree."""
        self.hide()
        if self.stream is not None:
            self.stream.close()
        if self.trees is not None and self.err is not None and self.options.tree_format is None:
            from rich.text import Text

            from genctl.commands.tree_formats import tree_lines

            for tree in self.trees.take_all():
                lines = tree_lines(tree, self.err.width if self.err.is_terminal else None)
                for line in [Text(""), *lines] if self.job.live else lines:
                    self.err.print(line)

    def open_bar(self, stack: ExitStack, total: int | None, done: int) -> None:
        """Start the progress bar of rows, if one is wanted."""
        if self.err is not None and self.wants_bar:
            from genctl.terminal.live_region import RowsBar

            self.bar = RowsBar(self.err, total, done=done)
            stack.callback(self.bar.close)
            if not self.job.choice.live:  # the first row may take long
                self.bar.draw()

    def feed(self, event: Event) -> None:
        """Draw an event. A failed row is reported with its record, unless the view shows it."""
        if self.view is not None and (self.job.live or not isinstance(event, Failed)):
            self.view.feed(event)
        if self.trees is not None:
            self.trees.feed(event)
        if self.stream is not None:
            self.stream.feed(event)
        if self.bar is not None and self.job.choice.live:  # events come while tokens are decoded
            self.bar.feed(event)
        elif self.bar is not None and isinstance(event, Finished):
            self.bar.add(sum(len(one.tokens) for one in event.hypotheses))

    def tree_records(self, lane: str) -> list[dict[str, Any]]:
        """The records of a finished lane's tree, which replace its texts; none without --tree-format."""
        if self.trees is None or self.options.tree_format is None:
            return []
        from genctl.commands.tree_formats import tree_record

        tree = self.trees.take(lane)
        return [] if tree is None else [tree_record(tree, self.options.tree_format)]

    def loading(self, event: Loading) -> None:
        """Show how much of a checkpoint has been read."""
        words = f"reading {event.done}/{event.total} {event.unit}"
        if event.unit != "B" and self.job.live and self.job.single_prompt and loading_line.status(words, restart=False):
            return
        with self.job.interrupt.busy():
            if self.bar is not None:
                self.bar.hide()  # the loading bar of an auxiliary model replaces it
            if self.view is not None:
                self.view.feed(event)

    def row_done(self, *, failed: bool) -> None:
        """Count a row, even if its record waits for that of an earlier row."""
        if self.bar is not None:
            self.bar.row(failed=failed)

    def hide(self) -> None:
        """Clear moving output from the terminal."""
        if self.bar is not None:
            self.bar.hide()
        if self.view is not None:
            self.view.pause()


def _has_details(options: RunOptions) -> bool:
    return options.scores or options.explain or bool(options.watch)


def _view(job: Job, options: RunOptions, out: Console, err: Console, *, quiet: bool, several: bool) -> RunView:
    """The view of a run. If records are written, it shows only the summary, and details such as those of --scores."""
    from genctl.commands.run.run_view import RunView
    from genctl.terminal.console import discard

    live = job.live
    shown = out if live else err if _has_details(options) and options.format in TEXTS else discard()
    return RunView(
        shown,
        err,
        live=live,
        beams=live and options.view == "beam",
        details=not options.quiet,
        quiet=quiet,
        verbose=options.verbose,
        explain=options.explain,
        echo=options.echo is not False if live else bool(options.echo),
        messages=options.echo is True or options.view == "beam",  # users know what they just typed
        scores=options.scores or bool(options.watch) or (options.top_logprobs or 0) > 0,
        top=shown_top(options),
        labels=several or not job.single_prompt,
        numbered=not job.single_prompt,
    )


def wants_bar(options: RunOptions, err: Console | None, *, live: bool) -> bool:
    """Whether to show a progress bar: only if nothing else is written to its terminal."""
    alone = options.to_file or not is_terminal(sys.stdout)
    details = options.format in TEXTS and _has_details(options)
    if err is None or not alone or live or options.quiet or details:
        return False
    return err.is_interactive


def open_stream(options: RunOptions) -> StableTexts:
    """The output of --stream. On a terminal each prompt comes first, dimmed; conversations only with --echo."""
    from genctl.commands.run.text_stream import StableTexts, console_writer, recorded_prompt
    from genctl.terminal.console import make_consoles
    from genctl.terminal.live_layout import Look

    if is_terminal(sys.stdout):
        look = Look(echo=options.echo is not False, messages=options.echo is True)
        shown = console_writer(make_consoles(options.color)[0])
        return StableTexts(shown, lambda lane: lane.prompt + lane.between if look.echoes(lane) else "")
    sink = writers.open_output(None, sys.stdout)

    def write(text: str, dim: bool) -> None:
        sink.write(text.encode("utf-8", "backslashreplace"))

    return StableTexts(write, recorded_prompt) if options.echo else StableTexts(write)
