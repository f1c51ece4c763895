"""`genctl replay`: a recorded run, shown again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from genctl import collection, events
from genctl.cli import options
from genctl.cli.event_log import read_recording
from genctl.cli.interrupt import Interrupt
from genctl.errors import Exit, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.render.run_view import RunView

STEP_S = 0.08  # between two steps; what a recording does not tell is how long they took
TOP = 3  # alternatives shown with --scores


def replay(
    file: Annotated[str, typer.Argument(metavar="FILE", help="What --events or --trace wrote; - is standard input.")],
    step: Annotated[
        bool, typer.Option("--step", help="Wait for a key after each step: space or enter, q ends.")
    ] = False,
    speed: Annotated[
        float | None,
        typer.Option("--speed", metavar="X", help="So many times as fast (default: 1).", show_default=False),
    ] = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="Draw the search tree at the end; on standard error where output is piped.")
    ] = False,
    tree_format: Annotated[
        Literal["text", "dot", "json"] | None,
        typer.Option("--tree-format", help="Write the search tree instead of the texts.", show_default=False),
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Begin the text with the prompt.")] = False,
    scores: Annotated[bool, typer.Option("--scores", help="Show what was recorded of each token.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show what each logits processor did.")] = False,
    quiet: options.Quiet = False,
    color: options.Color = "auto",
) -> int:
    """Show a recorded run again, as it was seen, or step by step.

    The pace is even, since a recording does not say how long each step took. In a pipe, the texts.
    """
    from genctl.render.console import make_consoles

    collection.resume()  # no model is loaded here
    live = sys.stdout is not None and sys.stdout.isatty() and tree_format is None
    _check(step, speed, live=live, asked_tree=tree_format, echo=echo)
    told = read_recording(file)
    out, err = make_consoles(color)
    searching = any(isinstance(event, events.Began) and "beam" in event.strategy for event in told)
    if not live:
        return _write(told, err, tree=tree, tree_format=tree_format, echo=echo, scores=scores, explain=explain)
    if step and file == "-":
        raise UsageError("--step waits for keys on standard input, where the recording comes from")
    with Interrupt(), ExitStack() as stack:
        pause = stack.enter_context(_keys()) if step else _pace(STEP_S / (speed or 1.0))
        if step and not quiet:
            print("space or enter: next step; q: end", file=sys.stderr)
        view = stack.enter_context(_view(told, out, err, searching or tree, tree, echo, scores, explain, every=step))
        for event in told:
            view.feed(event)
            if isinstance(event, events.Stepped) and not pause():
                break
    if not quiet:
        _sum_up(view, err)
    return _status(told)


def _check(step: bool, speed: float | None, *, live: bool, asked_tree: str | None, echo: bool) -> None:
    if speed is not None and not 0 < speed < float("inf"):
        raise UsageError(f"--speed {speed:g}: must be above 0")
    if step and speed is not None:
        raise UsageError("--step waits for a key and --speed sets a pace; leave out one of them")
    if asked_tree is not None and (step or speed is not None):
        raise UsageError(f"--tree-format {asked_tree} writes the tree and shows no steps")
    if asked_tree is not None and echo:
        raise UsageError("--echo begins texts with their prompt, but --tree-format writes trees instead of texts")
    if not live and (step or speed is not None):
        raise UsageError(f"{'--step' if step else '--speed'} is for a terminal, and standard output is none")
    if step and not (sys.stdin is not None and sys.stdin.isatty()):
        raise UsageError("--step waits for keys, but standard input is no terminal")


def _view(
    told: list[events.Event],
    out: Console,
    err: Console,
    searching: bool,
    tree: bool,
    echo: bool,
    scores: bool,
    explain: bool,
    *,
    every: bool,
) -> RunView:
    from genctl.render.beam_view import BeamView
    from genctl.render.run_view import RunView

    lanes = {event.lane for event in told if isinstance(event, (events.Began, events.Failed))}
    several = len(lanes) > 1 or any(isinstance(event, events.Finished) and len(event.hypotheses) > 1 for event in told)
    shared: dict[str, Any] = {"echo": echo, "scores": scores, "explain": explain, "top": TOP, "labels": several}
    clock = _Ticks() if every else time.monotonic
    if searching:
        return BeamView(out, err, tree=tree, quiet=True, formula=True, clock=clock, **shared)
    return RunView(out, err, live=True, quiet=True, clock=clock, **shared)


class _Ticks:
    """A clock by which every look is a second later, so that no step is left undrawn."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def _pace(seconds: float) -> Callable[[], bool]:
    def pause() -> bool:
        time.sleep(seconds)
        return True

    return pause


@contextmanager
def _keys() -> Iterator[Callable[[], bool]]:
    """Wait for single keys; the terminal is as it was afterwards. The answer is whether to go on."""
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


def _wait_for_key(read: Callable[[int], str]) -> bool:
    while True:
        key = read(1)
        if key in ("q", "Q", "\x04", ""):
            return False
        if key in (" ", "\n", "\r"):
            return True


def _write(
    told: list[events.Event],
    err: Console,
    *,
    tree: bool,
    tree_format: str | None,
    echo: bool,
    scores: bool,
    explain: bool,
) -> int:
    """The final texts (or trees) to standard output; what else was asked for to standard error."""
    from genctl.cli.beam_output import Search
    from genctl.cli.run_options import RunOptions
    from genctl.render.console import discard

    asked = RunOptions(echo=echo, stream=tree_format is None, tree=tree, tree_format=tree_format)  # type: ignore[arg-type]
    view = _view(told, err if scores or explain else discard(), err, False, False, echo, scores, explain, every=False)
    with view, Search(asked, err, live=False) as search, _trees(tree_format) as trees:
        for event in told:
            view.feed(event)
            search.feed(event)
            if isinstance(event, events.Finished):
                for record in search.records(event.lane):
                    trees.write(record)
        unfinished = 0 if search.stream is None else search.stream.unfinished
    if unfinished:
        print(f"error: the recording ends before {unfinished} of its prompts are done", file=sys.stderr)
        return int(Exit.ROWS_FAILED)
    return _status(told)


@contextmanager
def _trees(tree_format: str | None) -> Iterator[Any]:
    from genctl.batch import writers

    sink = writers.open_output(None, sys.stdout)
    writer = writers.open_writer("json" if tree_format == "json" else "text", sink, on_error=lambda _: None)
    yield writer
    if tree_format is not None:
        writer.close()


def _sum_up(view: RunView, err: Console) -> None:
    from genctl.render.summary import summary

    totals = view.history.totals
    left = [lane for lane in view.history.lanes.values() if not lane.over]
    if totals.finished or left:
        # without a rate: the pace is that of the replay
        err.print(summary(totals, decode_s=0.0, first_s=None, unfinished=len(left)))


def _status(told: list[events.Event]) -> int:
    return int(Exit.ROWS_FAILED if any(isinstance(event, events.Failed) for event in told) else Exit.DONE)
