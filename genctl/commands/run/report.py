"""`genctl report`: a page of a recorded run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from genctl import process
from genctl.commands.messages import Messages
from genctl.commands.options import QUIET
from genctl.commands.recording import read_recording
from genctl.commands.table import Command, CommandOptions, argument, given, option, switch
from genctl.errors import Exit, UsageError
from genctl.events import Failed


@dataclass(frozen=True)
class ReportOptions(CommandOptions):
    """The command line of `genctl report`."""

    file: str = argument("a file that --events wrote; - is standard input", "EVENTS", required=True)
    output: str | None = option("where the page goes (default: EVENTS with the suffix .html)", "FILE", "--output", "-o")
    force: bool = switch("replace an existing page")
    quiet: bool = QUIET


REPORT = Command(
    "report",
    ReportOptions,
    "genctl.commands.run.report:perform",
    """The page opens from disk and loads nothing: tokens coloured by probability, the search tree step by step, runs of
    a comparison side by side. --report FILE of the other commands writes the same page, with the run's settings.""",
    ("genctl report run.jsonl", "genctl report run.jsonl -o run.html --force"),
    conflicts=(
        (
            given(file=["-"], without=["output"]),
            "a recording on standard input has no name; give the page one with --output FILE",
        ),
        (given(output=["-"]), "--output -: a page is a file that a browser opens; give it a name"),
    ),
    knobs=(),
)


def perform(options: ReportOptions) -> int:
    """Write the page of a recording. Returns the exit status."""
    from genctl.commands.recording import PageFile

    target = str(PurePath(options.file).with_suffix(".html")) if options.output is None else options.output
    process.resume_collector()  # no model is loaded here
    recorded = read_recording(options.file, Messages().remark)
    if target == options.file:
        raise UsageError(f"{options.file} is the recording; give the page another name with --output")
    with PageFile(target, force=options.force, live=False) as page:
        for event in recorded:
            page.feed(event)
    if not options.quiet:
        Messages().print(f"wrote {target}")
    return int(Exit.ROWS_FAILED if any(isinstance(event, Failed) for event in recorded) else Exit.DONE)
