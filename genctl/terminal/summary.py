"""The summary line of a run, and the line for a prompt that failed."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from genctl.errors import count, percent
from genctl.events.history import LaneHistory
from genctl.terminal import theme, widgets
from genctl.terminal.run_history import Totals

DOT = " · "
_ENDED = {  # why a text ended: of one, of several
    "eos": ("ended by itself", "ended by themselves"),
    "length": ("cut at max_new_tokens", "cut at max_new_tokens"),
    "context": ("cut at the context", "cut at the context"),
    "stop": ("stopped", "stopped"),
    "time": ("cut at max_time", "cut at max_time"),
    "interrupted": ("interrupted", "interrupted"),
}


def summary(
    totals: Totals,
    *,
    decode_s: float,
    first_s: float | None,
    load_s: float | None = None,
    unfinished: int = 0,
    left_tokens: int = 0,
    seed: int | None = None,
    passes: int | None = None,
    verbose: bool = False,
) -> Text:
    """A run in one line. `decode_s`, `first_s` and `load_s` are seconds.

    `left_tokens` were written by `unfinished` prompts. `seed` is that of the run, where several prompts have seeds made
    of it. `passes` are the forward passes, in which several prompts take part (None: known for one prompt alone).
    """
    tokens = totals.tokens + left_tokens
    words = []
    if totals.lanes > 1:
        words.append(count(totals.lanes, "prompt"))
    if totals.sequences > max(totals.finished, 1):
        words.append(count(totals.sequences, "sequence"))
    words.append(count(tokens, "token"))
    if decode_s > 0 and tokens:
        words.append(widgets.token_rate(tokens / decode_s))
    times = [] if load_s is None else [f"loaded in {load_s:.1f} s"]
    times += [] if first_s is None else [f"first token after {first_s:.2f} s"]
    if times:
        words.append(", ".join(times))
    alone = len(totals.stops) == 1 and totals.sequences == 1
    words += [("" if alone else f"{number} ") + stop_words(*stop, number) for stop, number in totals.stops.items()]
    if unfinished:
        words.append("not finished" if totals.lanes == 1 else f"{unfinished} not finished")
    if totals.failed:
        words.append(f"{totals.failed} failed")
    if totals.drafted and verbose:
        share = percent(totals.accepted / totals.drafted, 0)
        words.append(f"{totals.accepted} of {totals.drafted} drafts accepted ({share})")
    if totals.seed is not None and seed is not None:
        words.append(f"seed {seed}")
    elif totals.seed is not None:
        words.append(f"seed {totals.seed}" + (" (first prompt)" if totals.lanes > 1 else ""))
    if verbose:
        words.append(count(totals.prompt_tokens, "prompt token"))
        passes = totals.forwards if passes is None and totals.lanes == 1 else passes
        words += [count(passes, "forward pass", "forward passes")] if passes else []
    return Text(DOT.join(words), style=theme.DIM)


def lines(line: Text, width: int) -> list[Text]:
    """Break a line of items into lines of at most `width` columns, between items where possible."""
    texts = [""]
    for item in line.plain.split(DOT):
        longer = f"{texts[-1]}{DOT}{item}" if texts[-1] else item
        if cell_len(longer) <= width or not texts[-1]:
            texts[-1] = longer
        else:
            texts.append(item)
    return [Text(text, style=line.style) for text in texts]


def put(console: Console, line: Text) -> None:
    """Print a line of items; on a terminal in as many lines as needed."""
    for part in lines(line, console.width) if console.is_terminal else [line]:
        console.print(part)


def put_words(console: Console, line: Text) -> None:
    """Print a line; on a terminal broken between words."""
    for part in line.wrap(console, console.width, no_wrap=False) if console.is_terminal else [line]:
        part.rstrip()
        console.print(part)


def lane_summary(lane: LaneHistory) -> Text:
    """One prompt of several in one line, for `--verbose`."""
    words = [widgets.visible(lane.name)]
    if lane.began:
        words += [widgets.visible(lane.began.model)] if lane.began.model else []
        words += [lane.began.strategy] + ([] if lane.began.seed is None else [f"seed {lane.began.seed}"])
    if lane.prefilled:
        read = " (shared)" if lane.prefilled.shared else f" read in {lane.prefilled.seconds:.2f} s"
        words.append(count(lane.prefilled.prompt_tokens, "prompt token") + read)
    if lane.finished:
        tokens = sum(hypothesis.length for hypothesis in lane.finished.hypotheses)
        words.append(f"{count(tokens, 'token')} in {lane.finished.seconds:.2f} s")
        passes = lane.finished.forwards
        words += [count(passes, "forward pass", "forward passes")] if passes else []
    else:
        words.append(f"{count(lane.written, 'token')}, not finished")
    return Text(DOT.join(words), style=theme.DIM)


def failure(lane: LaneHistory, *, numbered: bool = True) -> Text:
    """Why a prompt could not be run, on one line. `numbered`: there are several prompts."""
    assert lane.failed is not None
    line = Text("error:", style=theme.ERROR)
    which = f" {widgets.visible(lane.name)}:" if numbered else ""
    return line.append(f"{which} {widgets.visible(' '.join(lane.failed.message.split()))}", style=theme.PLAIN)


def stop_words(reason: str, stop: str, number: int = 1) -> str:
    """Why a text ended, with what stopped it in quotes."""
    if reason in ("context", "length") and stop:  # older files have "length" for both
        return f"cut at the {widgets.visible(stop)}"
    if reason == "time" and stop.startswith("row_timeout"):
        return "cut at row_timeout"
    words = _ENDED.get(reason, (reason, reason))[number > 1]
    return f"{words} by “{widgets.first_words(stop, 24)}”" if stop and reason == "stop" else words
