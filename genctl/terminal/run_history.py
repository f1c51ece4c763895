"""What the views draw of a run: its lanes' histories, totals over all lanes, and what the processors did.

A `RunHistory` takes in events. Its lanes' histories are immutable; they are as many as there are prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from genctl.events import Began, Ended, Event, Failed, Finished, Loading, Stepped, Token, Trace
from genctl.events.history import LaneHistory

MOVED_AT_LEAST = 1e-9  # a smaller total variation is rounding

# Strategies whose seed nothing draws from: recordings of earlier versions have one all the same.
NEVER_DRAWN = ("greedy", "beam", "diverse-beam", "constrained-beam", "contrastive")


@dataclass(frozen=True, slots=True)
class ProcessorTally:
    """The effect of one processor over a run."""

    processor: str
    steps: int = 0  # tokens
    touched: int = 0  # tokens whose scores it changed
    removed: int = 0
    moved: float = 0.0  # sum of the total variations
    changed: int = 0
    seconds: float = 0.0

    def add(self, trace: Trace) -> ProcessorTally:
        """The tally with one more trace. Its time is not added: all rows of a call share it."""
        return ProcessorTally(
            self.processor,
            self.steps + 1,
            self.touched + touched(trace),
            self.removed + trace.removed,
            self.moved + trace.moved,
            self.changed + trace.changed,
            self.seconds,
        )


@dataclass(frozen=True, slots=True)
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
    stops: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (reason, what exactly) -> sequences


@dataclass(slots=True)
class RunHistory:
    """A run so far. `lanes` are in the order of their first events. An event costs what it changes."""

    # the first one is found at once however many were dropped before it, which a dict does not promise
    lanes: OrderedDict[str, LaneHistory] = field(default_factory=OrderedDict)
    totals: Totals = Totals()
    tallies: Mapping[str, ProcessorTally] = field(default_factory=dict)
    tokens: int = 0  # tokens written so far in all rows of all lanes
    loading: Loading | None = None

    def feed(self, event: Event) -> None:
        """Take in one more event. Raises InputError if the event cannot follow (a damaged recording)."""
        if isinstance(event, Loading):
            self.loading = None if event.done >= event.total > 0 else event
            return
        before = self.lanes.get(event.lane)
        lane = (before or LaneHistory(event.lane)).after(event)
        totals = self.totals
        if before is None or isinstance(event, Began):
            totals = replace(totals, lanes=totals.lanes + 1)
        pieces: list[tuple[Token, ...]] = []
        if isinstance(event, Stepped):
            pieces = [row.written for row in event.children]
            if event.drafted or event.accepted:
                totals = replace(
                    totals, drafted=totals.drafted + event.drafted, accepted=totals.accepted + event.accepted
                )
        elif isinstance(event, Ended):
            pieces = [event.written]
        elif isinstance(event, Began):
            if totals.seed is None and event.strategy not in NEVER_DRAWN:
                totals = replace(totals, seed=event.seed)
        elif isinstance(event, Finished):
            totals = _finish(totals, lane, event)
        elif isinstance(event, Failed):
            totals = replace(totals, failed=totals.failed + 1)
        self.lanes[event.lane] = lane
        self.totals, self.tallies = totals, _tally(self.tallies, pieces)
        self.tokens += sum(map(len, pieces))

    def forget(self, lane: str) -> None:
        """Drop this lane's details; the totals still count it."""
        self.lanes.pop(lane, None)


def touched(trace: Trace) -> bool:
    """Whether a processor changed a row's scores."""
    return trace.removed > 0 or trace.moved > MOVED_AT_LEAST


def _finish(totals: Totals, lane: LaneHistory, event: Finished) -> Totals:
    stops = dict(totals.stops)
    for hypothesis in event.hypotheses:
        stop = (hypothesis.reason, hypothesis.cause)
        stops[stop] = stops.get(stop, 0) + 1
    read = lane.prefilled.prompt_tokens if lane.prefilled else 0
    return replace(
        totals,
        finished=totals.finished + 1,
        sequences=totals.sequences + len(event.hypotheses),
        tokens=totals.tokens + sum(hypothesis.length for hypothesis in event.hypotheses),
        prompt_tokens=totals.prompt_tokens + (event.prompt_tokens or read),
        forwards=totals.forwards + event.forwards,
        seconds=totals.seconds + event.seconds,
        first_token_s=totals.first_token_s if totals.finished else event.first_token_s,
        stops=stops,
    )


def _tally(tallies: Mapping[str, ProcessorTally], written: Sequence[tuple[Token, ...]]) -> Mapping[str, ProcessorTally]:
    tokens = [token for piece in written for token in piece if token.trace]
    if not tokens:
        return tallies
    counted = dict(tallies)
    seconds: dict[str, float] = {}
    for token in tokens:
        for trace in token.trace:
            name = trace.processor
            counted[name] = counted.get(name, ProcessorTally(name)).add(trace)
            seconds[name] = max(seconds.get(name, 0.0), trace.seconds)
    for name, spent in seconds.items():
        counted[name] = replace(counted[name], seconds=counted[name].seconds + spent)
    return counted
