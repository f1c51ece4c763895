"""What `genctl run` writes and shows: records of results, to which output, and the view beside it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from genctl.commands.options import shown_top
from genctl.commands.run.options import RunOptions
from genctl.events import Event
from genctl.io import writers
from genctl.io.record_output import RecordOutput, ResumedOutput, RowTally
from genctl.io.records import other_entry, result_record
from genctl.io.rows import InputRow
from genctl.io.writers import TEXTS
from genctl.results import Result
from genctl.terminal.standard_streams import is_terminal

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

    from genctl.commands.run.run_view import RunView


# -- the view of a generating command: live text or beams, and whether there is a progress bar -------------------------


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


class SilentView:
    """Takes the place of a `RunView` and shows nothing, without Rich, whose import takes time."""

    load_s: float | None = None

    def feed(self, event: Event) -> None:
        """Ignore the event."""

    def begin(self) -> None:
        """Do nothing."""

    def pause(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> SilentView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""


def open_records(
    options: RunOptions, tally: RowTally, on_error: Callable[[writers.Record], None], *, shown: bool
) -> RecordOutput:
    """The output of a run: standard output, a device or a file; nothing where the view has `shown` it."""
    if options.resume:
        assert options.output is not None
        return ResumedOutput(options.output, options.format, tally, on_error)
    if shown:
        return RecordOutput(writers.Unclosed(), None, tally, unordered=options.unordered)
    sink = writers.open_output(options.output, sys.stdout, force=options.force)
    escape: Callable[[str], str] = str
    if sink.is_terminal and not options.tree_format:
        from genctl.terminal.widgets import visible as escape
    format: writers.Format = "json" if options.tree_format == "json" else options.format
    writer = writers.open_writer(format, sink, on_error=on_error, shown=escape)
    return RecordOutput(writer, sink, tally, unordered=options.unordered)


def records_of(
    options: RunOptions,
    row: InputRow,
    result: Result,
    *,
    load_s: float,
    encoder_decoder: bool,
    saved: bool = False,
    texts: bool = True,
) -> list[dict[str, Any]]:
    """One record for each sequence of a row. `saved`: --prompt-cache. `texts`: there is a tokenizer to write any."""
    records = []
    for number, sequence in enumerate(result.sequences):
        hypothesis = sequence.hypothesis
        if options.format in writers.TEXTS and not texts:  # the same as on a terminal
            hypothesis = dataclasses.replace(hypothesis, text="".join(f"<{id}>" for id in hypothesis.tokens))
        if options.echo:
            between = "\t" if encoder_decoder else ""
            hypothesis = dataclasses.replace(hypothesis, text=f"{result.prompt}{between}{hypothesis.text}")
        extra: dict[str, Any] = {}
        if result.drafted:
            extra = {"drafted": result.drafted, "accepted": result.accepted}
        if "beam" in result.strategy:
            extra["parents"] = list(sequence.parents)
        if result.others and number == 0 and options.with_tokens:
            extra["others"] = [other_entry(other.hypothesis) for other in result.others]
        records.append(
            result_record(
                row,
                result,
                number,
                hypothesis=hypothesis,
                tokens=options.with_tokens or any(token.processed is not None for token in sequence.tokens),
                load_s=load_s if options.timing else None,
                extra=extra,
                reused_tokens=result.reused if saved else None,
            )
        )
    return records
