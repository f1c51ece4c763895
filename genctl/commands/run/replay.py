"""`genctl replay` and `genctl report`: show a recorded run again, or make a page of it."""
# ruff: noqa: RUF009 — `option` returns a dataclass field, which is what a dataclass default may be

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from math import inf
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from genctl import events, process
from genctl.commands.event_log import read_recording
from genctl.commands.messages import Messages
from genctl.commands.options import COLOR, QUIET, SHOWN_TOP, TreeFormat, pictures
from genctl.commands.run.options import TREE_ECHO
from genctl.commands.table import (
    Color,
    Command,
    CommandOptions,
    Conflict,
    argument,
    because,
    given,
    needless_force,
    option,
    switch,
)
from genctl.errors import Exit, UsageError
from genctl.io.output import check_absent
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.standard_streams import is_terminal

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.commands.run.run_view import RunView

STEP_S = 0.08  # between two steps; a recording does not say how long they took


@dataclass(frozen=True)
class ReplayOptions(CommandOptions):
    """The command line of `genctl replay`."""

    file: str = argument("a file that --events wrote; - is standard input", "FILE", required=True)
    step: bool = switch("wait for a key after each step: space or enter; b goes back, q ends")
    speed: float | None = option("speed factor (default: 1)", "X")
    tree: bool = switch("draw the search tree at the end (on standard error where output is piped)")
    tree_format: TreeFormat | None = option("write the search tree instead of the texts")
    echo: bool | None = option(
        "repeat the prompt before the text (default: on a terminal, dimmed)", None, "--echo/--no-echo"
    )
    report: str | None = option("also write a page with all details, to open in a browser", "FILE")
    svg: str | None = option("also draw what a terminal shows in the end, as a picture", "FILE")
    force: bool = switch("replace existing --report and --svg files")
    scores: bool = switch("show what was recorded of each token")
    explain: bool = switch("show which settings changed each token's probability")
    quiet: bool = QUIET
    color: Color = COLOR


def _live(options: ReplayOptions) -> bool:
    return options.tree_format is None and is_terminal(sys.stdout)


CONFLICTS: tuple[Conflict, ...] = (
    needless_force("report", "svg"),
    *pictures("file"),
    (lambda options: options.speed is not None and not 0 < options.speed < inf, "--speed {speed:g}: must be above 0"),
    (given("step", "speed"), "--step waits for a key and --speed sets a pace; leave out one of them"),
    (given("tree_format", "step"), "--tree-format {tree_format} writes the tree and shows no steps"),
    (given("tree_format", "speed"), "--tree-format {tree_format} writes the tree and shows no steps"),
    TREE_ECHO,
    *because(
        lambda options: not _live(options),
        "",
        (given("step"), "--step is for a terminal, and standard output is none"),
        (given("speed"), "--speed is for a terminal, and standard output is none"),
    ),
    (
        lambda options: options.step and not is_terminal(sys.stdin),
        "--step waits for keys, but standard input is no terminal",
    ),
)

REPLAY = Command(
    "replay",
    ReplayOptions,
    "genctl.commands.run.replay:perform",
    """The pace is even, since a recording does not say how long each step took. In a pipe, the texts.""",
    ("genctl replay run.jsonl", "genctl replay run.jsonl --step"),
    conflicts=CONFLICTS,
    knobs=(),
)


@dataclass(frozen=True)
class ReportOptions(CommandOptions):
    """The command line of `genctl report`."""

    file: str = argument("a file that --events wrote; - is standard input", "EVENTS", required=True)
    output: str | None = option("where the page goes (default: EVENTS with the suffix .html)", "FILE", "--output", "-o")
    force: bool = switch("replace an existing page")
    quiet: bool = QUIET


REPORT_CONFLICTS: tuple[Conflict, ...] = (
    (
        given(file=["-"], without=["output"]),
        "a recording on standard input has no name; give the page one with --output FILE",
    ),
    (given(output=["-"]), "--output -: a page is a file that a browser opens; give it a name"),
)

REPORT = Command(
    "report",
    ReportOptions,
    "genctl.commands.run.replay:write_page",
    """The page opens from disk and loads nothing: tokens coloured by probability, the search tree step by step, runs of
    a comparison side by side. --report FILE of the other commands writes the same page, with the run's settings.""",
    ("genctl report run.jsonl", "genctl report run.jsonl -o run.html --force"),
    conflicts=REPORT_CONFLICTS,
    knobs=(),
)


def _recording(file: str) -> list[events.Event]:
    """The events of a file; notes say what they leave out. Raises InputError."""
    process.resume_collector()  # no model is loaded here
    return read_recording(file, Messages().remark)


def _write_page(recorded: list[events.Event], path: str, *, force: bool) -> None:
    from genctl.commands.page_file import PageFile

    with PageFile(path, force=force, live=False) as page:
        for event in recorded:
            page.feed(event)


def write_page(options: ReportOptions) -> int:
    """Write the page of a recording. Returns the exit status."""
    target = str(PurePath(options.file).with_suffix(".html")) if options.output is None else options.output
    recorded = _recording(options.file)
    if target == options.file:
        raise UsageError(f"{options.file} is the recording; give the page another name with --output")
    _write_page(recorded, target, force=options.force)
    if not options.quiet:
        Messages().say(f"wrote {target}")
    return _status(recorded)


def perform(options: ReplayOptions) -> int:
    """Show the recording. Returns the exit status."""
    from genctl.terminal.console import make_consoles

    recorded = _recording(options.file)
    if not options.force:
        check_absent(path for path in (options.report, options.svg) if path is not None)
    if options.report is not None:
        _write_page(recorded, options.report, force=options.force)
    searching = any(isinstance(event, events.Began) and "beam" in event.strategy for event in recorded)
    if options.svg is not None:
        from genctl.commands.page_file import ScreenFile

        with ScreenFile(options.svg, force=options.force) as screen:
            consoles = screen.console, screen.console
            show = _view(recorded, *consoles, options, searching=searching or options.tree, on_terminal=True)
            for event in recorded:
                show.feed(event)
            show.close()
            if not options.quiet:
                _sum_up(show, screen.console)
    out, err = make_consoles(options.color)
    if not _live(options):
        return _write(recorded, err, options)
    if options.step and options.file == "-":
        raise UsageError("--step waits for keys on standard input, where the recording comes from")
    with Interrupt(), ExitStack() as stack:
        wait = stack.enter_context(_keys()) if options.step else None

        def open_view() -> RunView:
            return _view(recorded, out, err, options, searching=searching or options.tree, on_terminal=True)

        view = open_view()
        stack.push(lambda *error: view.__exit__(*error))
        steps = [at for at, event in enumerate(recorded) if isinstance(event, events.Stepped)]
        at, came, settled, ended = 0, 0, 0, False
        names = _names(recorded)
        while at < len(recorded) and not ended:
            event = recorded[at]
            at += 1
            if not isinstance(event, events.Stepped):
                view.feed(event)
                if isinstance(event, (events.Finished, events.Failed)):
                    settled = at  # its text is printed, and stays
                continue
            came += 1
            of = f"{came} of {len(steps)}{names.get(event.lane, '')}"
            view.foot(f"step {of} · space: next · b: back · q: end" if wait else "")
            view.feed(event)
            if wait is None:
                time.sleep(STEP_S / (options.speed or 1.0))
                continue
            key = wait()
            ended = key == "q"
            if key == "b":
                before = came - 2 if came > 1 and steps[came - 2] >= settled else came - 1
                view.pause()
                view = open_view()
                view.replay(_unfinished(recorded[: steps[before]], settled))
                came, at = before, steps[before]
    if ended:
        Messages().say(f"stopped at step {came} of {len(steps)}")
    elif not options.quiet:
        _sum_up(view, err)
    return _status(recorded)


def _view(
    recorded: list[events.Event],
    out: Console,
    err: Console,
    options: ReplayOptions,
    *,
    searching: bool,
    on_terminal: bool,
) -> RunView:
    from genctl.commands.run.beam_view import BeamView
    from genctl.commands.run.run_view import RunView

    lanes = {event.lane for event in recorded if isinstance(event, (events.Began, events.Failed))}
    several = len(lanes) > 1 or any(
        isinstance(event, events.Finished) and len(event.hypotheses) > 1 for event in recorded
    )
    shared: dict[str, Any] = {name: getattr(options, name) for name in ("scores", "explain")}
    if options.step:  # a line for each token is what there is to see
        shared["scores"] = options.scores or not searching
    shared["echo"] = options.echo is not False if on_terminal else bool(options.echo)
    shared |= {"messages": options.echo is True or searching, "candidates": not options.quiet}
    # a clock that moves by a second each time it is read: every step is drawn
    clock = count(1.0).__next__ if options.step else time.monotonic
    shared |= {"numbered": len(lanes) > 1}
    shared |= {"top": SHOWN_TOP, "labels": several, "quiet": True, "clock": clock}
    if searching:
        return BeamView(out, err, tree=options.tree, formula=True, settles=not options.step, **shared)
    return RunView(out, err, live=True, **shared)


def _names(recorded: Sequence[events.Event]) -> dict[str, str]:
    """Which prompt a step belongs to, by lane, where there are several."""
    begun = [event for event in recorded if isinstance(event, events.Began)]
    names = {event.lane: f" (prompt {event.place or event.lane})" for event in begun}
    return names if len(names) > 1 else {}


def _unfinished(recorded: Sequence[events.Event], settled: int) -> Iterator[events.Event]:
    """The events of lanes that are not over in the first `settled` ones."""
    over = {event.lane for event in recorded[:settled] if isinstance(event, (events.Finished, events.Failed))}
    return (event for event in recorded if isinstance(event, events.Loading) or event.lane not in over)


@contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Wait for single keys, and restore the terminal afterwards. Each call returns " ", "b" or "q"."""
    try:
        import termios
        import tty
    except ImportError:
        raise UsageError("--step needs a terminal that gives single keys, which this system lacks") from None
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield lambda: _wait_for_key(sys.stdin.read)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _wait_for_key(read: Callable[[int], str]) -> str:
    while True:
        key = read(1)
        if key in ("q", "Q", "\x04", ""):
            return "q"
        if key in (" ", "\n", "\r"):
            return " "
        if key in ("b", "B", "\x7f", "\x08"):
            return "b"


def _write(recorded: list[events.Event], err: Console, options: ReplayOptions) -> int:
    """The final texts (or trees) to standard output; what else was asked for to standard error."""
    from genctl.commands.run.search_output import Search
    from genctl.io import writers
    from genctl.terminal.console import discard

    shown = err if options.scores or options.explain else discard()
    search = Search(options, err, stream=options.tree_format is None, live=False)
    view = _view(recorded, shown, err, options, searching=False, on_terminal=_live(options))
    sink = writers.open_output(None, sys.stdout)
    trees = writers.open_writer("json" if options.tree_format == "json" else "text", sink, on_error=lambda _: None)
    with view, search:
        for event in recorded:
            view.feed(event)
            search.feed(event)
            if isinstance(event, events.Finished):
                for record in search.records(event.lane):
                    trees.write(record)
    if options.tree_format is not None:
        trees.close()
    unfinished = 0 if search.stream is None else search.stream.unfinished
    if unfinished:
        Messages().say(f"error: the recording ends before {unfinished} of its prompts are done")
        return int(Exit.ROWS_FAILED)
    return _status(recorded)


def _sum_up(view: RunView, err: Console) -> None:
    from genctl.terminal.summary import summary

    totals = view.history.totals
    left = [lane for lane in view.history.lanes.values() if not lane.over]
    if totals.finished or left:
        # without a rate: the pace is that of the replay
        err.print(summary(totals, decode_s=0.0, first_s=None, unfinished=len(left)))


def _status(recorded: list[events.Event]) -> int:
    return int(Exit.ROWS_FAILED if any(isinstance(event, events.Failed) for event in recorded) else Exit.DONE)
