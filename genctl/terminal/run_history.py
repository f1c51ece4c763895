"""What the views draw of a run: its lanes' histories, totals over all lanes, and what the processors did.

A `RunHistory` takes in events. Its lanes' histories are immutable; they are as many as there are prompts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from genctl.events import Began, Ended, Event, Failed, Finished, Loading, Stepped, Token, Trace
from genctl.events.history import LaneHistory

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
    stops: Counter[tuple[str, str]] = field(default_factory=Counter)  # sequences by reason, and what exactly

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
    """A run so far. `lanes` are in the order of their first events. An event costs what it changes."""

    # the first one is found at once however many were dropped before it, which a dict does not promise
    lanes: OrderedDict[str, LaneHistory] = field(default_factory=OrderedDict)
    totals: Totals = field(default_factory=Totals)
    tallies: dict[str, ProcessorTally] = field(default_factory=dict)
    tokens: int = 0  # tokens written so far in all rows of all lanes
    loading: Loading | None = None

    def feed(self, event: Event) -> None:
        """Take in one more event. Raises InputError if the event cannot follow (a damaged recording)."""
        if isinstance(event, Loading):
            self.loading = None if event.done >= event.total > 0 else event
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
