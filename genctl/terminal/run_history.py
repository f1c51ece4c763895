"""The data of a run that views draw: histories of lanes, totals over all lanes, effects of processors, the summary.

A `RunHistory` is fed events. It has one history per prompt, which is immutable.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from genctl.errors import count, percent
from genctl.events import Began, Ended, Event, Failed, Finished, Loading, Stepped, Token, Trace
from genctl.events.history import LaneHistory
from genctl.terminal import theme, widgets

MOVED_AT_LEAST = 1e-9  # a smaller total variation is rounding


@dataclass(slots=True)
class ProcessorTally:
    """The effect of one processor over a run."""

    processor: str
    steps: int = 0  # tokens
    touched: int = 0  # tokens whose scores it changed
    removed: int = 0
    moved: float = 0.0  # sum of the total variations
    changed: int = 0
    seconds: float = 0.0

    def add(self, trace: Trace) -> None:
        """Count one more trace. Its time is not added: all rows of a call share it."""
        self.steps += 1
        self.touched += touched(trace)
        self.removed += trace.removed
        self.moved += trace.moved
        self.changed += trace.changed


@dataclass(slots=True)
class Totals:
    """Sums over all lanes that finished or failed."""

    lanes: int = 0  # lanes that began, or failed before they could
    finished: int = 0
    failed: int = 0
    sequences: int = 0
    tokens: int = 0  # new tokens of the returned sequences
    prompt_tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    first_token_s: float = 0.0  # of the first lane that finished
    drafted: int = 0
    accepted: int = 0
    seed: int | None = None  # of the first lane
    stops: Counter[tuple[str, str]] = field(default_factory=Counter)  # sequences by reason and cause

    def finish(self, lane: LaneHistory, event: Finished) -> None:
        """Count a lane that finished."""
        self.first_token_s = self.first_token_s if self.finished else event.first_token_s
        self.finished += 1
        self.sequences += len(event.hypotheses)
        self.tokens += sum(hypothesis.length for hypothesis in event.hypotheses)
        self.prompt_tokens += event.prompt_tokens or (lane.prefilled.prompt_tokens if lane.prefilled else 0)
        self.forwards += event.forwards
        self.seconds += event.seconds
        self.stops.update((hypothesis.reason, hypothesis.cause) for hypothesis in event.hypotheses)


@dataclass(slots=True)
class RunHistory:
    """A run so far. `lanes` are in the order of their first events. The cost of an event is that of its changes."""

    # unlike a dict, finds the first one at once, however many were dropped before it
    lanes: OrderedDict[str, LaneHistory] = field(default_factory=OrderedDict)
    totals: Totals = field(default_factory=Totals)
    tallies: dict[str, ProcessorTally] = field(default_factory=dict)
    tokens: int = 0  # tokens written so far in all rows of all lanes

    def feed(self, event: Event) -> None:
        """Process one more event. Raises InputError if the event cannot follow (a damaged recording)."""
        if isinstance(event, Loading):
            return
        before, totals = self.lanes.get(event.lane), self.totals
        lane = self.lanes[event.lane] = (before or LaneHistory(event.lane)).after(event)
        totals.lanes += before is None or isinstance(event, Began)
        if isinstance(event, Stepped):
            self._count([token for row in event.children for token in row.written])
            totals.drafted += event.drafted
            totals.accepted += event.accepted
        elif isinstance(event, Ended):
            self._count(event.written)
        elif isinstance(event, Began):
            if totals.seed is None:
                totals.seed = event.seed
        elif isinstance(event, Finished):
            totals.finish(lane, event)
        elif isinstance(event, Failed):
            totals.failed += 1

    def _count(self, written: Sequence[Token]) -> None:
        """Count tokens that were written at once, and what processors did to them."""
        self.tokens += len(written)
        seconds: dict[str, float] = {}
        for token in written:
            for trace in token.trace:
                name = trace.processor
                self.tallies.setdefault(name, ProcessorTally(name)).add(trace)
                seconds[name] = max(seconds.get(name, 0.0), trace.seconds)
        for name, spent in seconds.items():
            self.tallies[name].seconds += spent

    def forget(self, lane: str) -> None:
        """Drop this lane's details; the totals still count it."""
        self.lanes.pop(lane, None)


def touched(trace: Trace) -> bool:
    """Whether a processor changed a row's scores."""
    return trace.removed > 0 or trace.moved > MOVED_AT_LEAST


DOT = " · "
_ENDED = {
    "eos": "ended by itself",
    "length": "cut at max_new_tokens",
    "context": "cut at the context",
    "stop": "stopped",
    "time": "cut at max_time",
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

    `left_tokens` were written by `unfinished` prompts. `seed` is that of the run, if several prompts derive theirs from
    it. `passes` counts forward passes, which prompts may share (None: known for a single prompt only).
    """
    tokens, several = totals.tokens + left_tokens, totals.lanes > 1
    loaded = "" if load_s is None else f"loaded in {load_s:.1f} s"
    first = "" if first_s is None else f"first token after {first_s:.2f} s"
    alone = len(totals.stops) == 1 and totals.sequences == 1
    seed_words = f"seed {totals.seed}{' (first prompt)' if several else ''}" if seed is None else f"seed {seed}"
    words = [
        count(totals.lanes, "prompt") if several else "",
        count(totals.sequences, "sequence") if totals.sequences > max(totals.finished, 1) else "",
        count(tokens, "token"),
        widgets.token_rate(tokens / decode_s) if decode_s > 0 and tokens else "",
        ", ".join(filter(None, (loaded, first))),
        *(("" if alone else f"{number} ") + stop_words(*stop, number) for stop, number in totals.stops.items()),
        f"{unfinished} not finished" if unfinished and several else "not finished" if unfinished else "",
        f"{totals.failed} failed" if totals.failed else "",
    ]
    if totals.drafted and verbose:
        share = percent(totals.accepted / totals.drafted, 0)
        words.append(f"{totals.accepted} of {totals.drafted} drafts accepted ({share})")
    words.append("" if totals.seed is None else seed_words)
    if verbose:
        passes = totals.forwards if passes is None and not several else passes
        words += [count(totals.prompt_tokens, "prompt token")]
        words += [count(passes, "forward pass", "forward passes")] if passes else []
    return Text(DOT.join(filter(None, words)), style=theme.DIM)


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
    words = "ended by themselves" if reason == "eos" and number > 1 else _ENDED.get(reason, reason)
    return f"{words} by “{widgets.first_words(stop, 24)}”" if stop and reason == "stop" else words
