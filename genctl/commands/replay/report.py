"""`genctl report`: a page of a recorded run."""

from __future__ import annotations

from dataclasses import dataclass

from genctl import events
from genctl.cli.table import Command, CommandOptions, Conflict, argument, given, option, switch
from genctl.commands.event_log import read_recording
from genctl.commands.options import QUIET
from genctl.errors import Exit, UsageError
from genctl.models import gc_pause


@dataclass(frozen=True)
class ReportOptions(CommandOptions):
    """The command line of `genctl report`."""

    file: str = argument("a file that --events wrote; - is standard input", "EVENTS", required=True)
    output: str | None = option("where the page goes (default: EVENTS with the suffix .html)", "FILE", "--output", "-o")
    force: bool = switch("replace an existing page")
    quiet: bool = QUIET


CONFLICTS: tuple[Conflict, ...] = (
    (
        given(file=["-"], without=["output"]),
        "a recording on standard input has no name; give the page one with --output FILE",
    ),
    (given(output=["-"]), "--output -: a page is a file that a browser opens; give it a name"),
)

REPORT = Command(
    "report",
    ReportOptions,
    "genctl.commands.replay.report:perform",
    """The page opens from disk and loads nothing: tokens coloured by probability, the search tree step by step, runs of
    a comparison side by side. --report FILE of the other commands writes the same page, with the run's settings.""",
    ("genctl report run.jsonl", "genctl report run.jsonl -o run.html --force"),
    conflicts=CONFLICTS,
    knobs=(),
)


def perform(options: ReportOptions) -> int:
    """Write the page of a recording. Returns the exit status."""
    from genctl.commands.page_file import PageFile
    from genctl.terminal.message import print_message

    gc_pause.resume()  # no model is loaded here
    target = page_name(options.file) if options.output is None else options.output
    torn: list[str] = []
    recorded = read_recording(options.file, torn.append, lambda words: print_message(f"note: {words}"))
    for place in torn:
        print_message(f"note: {place}: the recording was interrupted here")
    if target == options.file:
        raise UsageError(f"{options.file} is the recording; give the page another name with --output")
    with PageFile(target, force=options.force, live=False) as made:
        for event in recorded:
            made.feed(event)
    if not options.quiet:
        print_message(f"wrote {target}")
    return int(Exit.ROWS_FAILED if any(isinstance(event, events.Failed) for event in recorded) else Exit.DONE)


def page_name(recording: str) -> str:
    """The name of the page of a recording: its own, with another suffix."""
    from pathlib import PurePath

    return str(PurePath(recording).with_suffix(".html"))
