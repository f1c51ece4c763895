"""What the views draw: the pure function `fold` adds one event to a `RunHistory`.

Everything is immutable. A row's text is a path of linked tokens: rows that fork share their prefix, and the cost of
folding a step depends on that step alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from genctl.events import (
    Began,
    CacheRead,
    Ended,
    Event,
    Failed,
    Finished,
    Hypothesis,
    Loading,
    Prefilled,
    Row,
    Stepped,
    Token,
    Trace,
    advance,
)

MOVED_AT_LEAST = 1e-9  # a smaller total variation is rounding
WITHOUT_SEED = ("greedy", "beam", "diverse-beam", "constrained-beam", "contrastive")  # strategies that never draw


class Path:
    """The newest token of a row and the path before it. Rows with a common prefix share its nodes."""

    __slots__ = ("chars", "length", "parent", "token")

    parent: Path | None
    token: Token | None  # None only at the root
    length: int  # tokens from the root to here
    chars: int  # characters from the root to here

    def __init__(self, parent: Path | None = None, token: Token | None = None) -> None:
        self.parent = parent
        self.token = token
        self.length = parent.length + 1 if parent else 0
        self.chars = parent.chars + len(token.text) if parent and token else 0

    def grow(self, written: tuple[Token, ...]) -> Path:
        """The path after these tokens; itself if there are none."""
        path = self
        for token in written:
            path = Path(path, token)
        return path

    def back(self) -> Iterator[Path]:
        """The nodes from the newest towards the root, the root left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def tokens(self, last: int | None = None) -> list[Token]:
        """The tokens in reading order, or only the `last` of them. Costs what it returns."""
        count = self.length if last is None else min(last, self.length)
        tokens = [node.token for node, _ in zip(self.back(), range(count), strict=False) if node.token]
        return tokens[::-1]

    def text(self, start: int = 0) -> str:
        """The characters from `start` on. Costs what it returns, plus one token."""
        pieces: list[str] = []
        for node in self.back():
            if node.chars <= start:
                break
            assert node.token is not None
            pieces.append(node.token.text)
        joined = "".join(reversed(pieces))
        return joined[max(0, start - (self.chars - len(joined))) :]

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids in reading order."""
        return tuple(token.id for token in self.tokens())

    def __eq__(self, other: object) -> bool:
        # A loop, because a generated comparison would recurse through thousands of nodes.
        if not isinstance(other, Path):
            return NotImplemented
        a, b = self, other
        while a is not b:
            if a.length != b.length or a.token != b.token:
                return False
            if a.parent is None or b.parent is None:
                return True
            a, b = a.parent, b.parent
        return True

    def __hash__(self) -> int:
        return hash((self.length, self.chars))

    def __repr__(self) -> str:
        return f"Path({self.length} tokens, {self.text(max(0, self.chars - 20))!r})"


ROOT = Path()


@dataclass(frozen=True, slots=True)
class LiveRow:
    """A live row: its path and its sums."""

    path: Path = ROOT
    logprob: float = 0.0
    total: float = 0.0
    slot: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A row that ended, and its path."""

    hypothesis: Hypothesis
    path: Path


@dataclass(frozen=True, slots=True, eq=False)
class Endings:
    """The rows of a lane that ended, newest first, linked so that adding one never copies the others."""

    leaf: Leaf
    count: int
    before: Endings | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[Leaf]:
        node: Endings | None = self
        while node is not None:
            yield node.leaf
            node = node.before

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Endings):
            return NotImplemented
        return self.count == other.count and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash((self.count, self.leaf))


@dataclass(frozen=True, slots=True)
class LaneHistory:
    """One prompt with one strategy, so far."""

    lane: str
    began: Began | None = None
    prefilled: Prefilled | None = None
    rows: tuple[LiveRow, ...] = (LiveRow(),)
    endings: Endings | None = None
    finished: Finished | None = None
    failed: Failed | None = None
    cache: CacheRead | None = None
    steps: int = 0
    written: int = 0  # tokens written in all rows together
    drafted: int = 0
    accepted: int = 0

    @property
    def prompt(self) -> str:
        """The prompt, or nothing if the lane failed before it began."""
        return self.began.prompt if self.began else ""

    @property
    def between(self) -> str:
        """What separates the prompt from the text on a screen: a line end if an encoder-decoder answers it."""
        return "\n" if self.began and self.began.encoder_decoder else ""

    @property
    def name(self) -> str:
        """What messages call the prompt: `prompt 2`, or `prompt` and the id that somebody gave it."""
        return f"prompt {self.began.place if self.began and self.began.place else self.lane}"

    @property
    def over(self) -> bool:
        """Whether the lane finished or failed."""
        return self.finished is not None or self.failed is not None

    @property
    def ended(self) -> tuple[Leaf, ...]:
        """The rows that ended, in that order."""
        return tuple(self.endings or ())[::-1]

    def path_of(self, hypothesis: Hypothesis) -> Path | None:
        """The path of a finished hypothesis, or None if no event contained it."""
        path = self._path_among_endings(hypothesis)
        if path is not None:
            return path
        for row in self.rows:  # an interrupted row has no `Ended` event
            if row.path.length == len(hypothesis.tokens) and row.path.ids == hypothesis.tokens:
                return row.path
        return None

    def _path_among_endings(self, hypothesis: Hypothesis) -> Path | None:
        path = None
        for leaf in self.endings or ():
            if leaf.hypothesis.tokens == hypothesis.tokens:
                if leaf.hypothesis.slot == hypothesis.slot:
                    return leaf.path
                path = leaf.path
        return path


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


@dataclass(frozen=True, slots=True)
class RunHistory:
    """A run so far. `lanes` are in the order of their first events."""

    lanes: Mapping[str, LaneHistory] = field(default_factory=dict)
    totals: Totals = Totals()
    tallies: Mapping[str, ProcessorTally] = field(default_factory=dict)
    tokens: int = 0  # tokens written so far in all rows of all lanes
    loading: Loading | None = None

    def without(self, lane: str) -> RunHistory:
        """The history without this lane's details; the totals still count it."""
        return replace(self, lanes={name: history for name, history in self.lanes.items() if name != lane})


def touched(trace: Trace) -> bool:
    """Whether a processor changed a row's scores."""
    return trace.removed > 0 or trace.moved > MOVED_AT_LEAST


def fold(history: RunHistory, event: Event) -> RunHistory:
    """The history after one more event. Raises InputError if the event cannot follow (a damaged recording)."""
    if isinstance(event, Stepped):
        return _step(history, event)
    if isinstance(event, Loading):
        return replace(history, loading=None if event.done >= event.total > 0 else event)
    totals = history.totals
    lane = history.lanes.get(event.lane)
    if isinstance(event, Began) or lane is None:
        totals = replace(totals, lanes=totals.lanes + 1)
        lane = LaneHistory(event.lane)
    tallies, written = history.tallies, 0
    if isinstance(event, Began):
        lane = replace(lane, began=event)
        drawn = totals.seed is None and event.strategy not in WITHOUT_SEED
        totals = replace(totals, seed=event.seed if drawn else totals.seed)
    elif isinstance(event, Prefilled):
        lane = replace(lane, prefilled=event)
    elif isinstance(event, Ended):
        written = len(event.written)
        _, endings = _grown(lane, Stepped(event.lane, lane.steps, (), (event,)))
        lane = replace(lane, endings=endings, written=lane.written + written)
        tallies = _tally(tallies, (event.written,))
    elif isinstance(event, Finished):
        totals = _finish(totals, lane, event)
        lane = replace(lane, finished=event)
    elif isinstance(event, Failed):
        totals = replace(totals, failed=totals.failed + 1)
        lane = replace(lane, failed=event)
    else:
        lane = replace(lane, cache=event)
    return RunHistory({**history.lanes, event.lane: lane}, totals, tallies, history.tokens + written, history.loading)


def _step(history: RunHistory, event: Stepped) -> RunHistory:
    totals = history.totals
    lane = history.lanes.get(event.lane)
    if lane is None:
        totals = replace(totals, lanes=totals.lanes + 1)
        lane = LaneHistory(event.lane)
    rows, endings = _grown(lane, event)
    pieces = [row.written for row in event.children]
    written = sum(map(len, pieces))
    if event.drafted or event.accepted:
        totals = replace(totals, drafted=totals.drafted + event.drafted, accepted=totals.accepted + event.accepted)
    grown = LaneHistory(
        lane.lane,
        lane.began,
        lane.prefilled,
        rows,
        endings,
        lane.finished,
        lane.failed,
        lane.cache,
        lane.steps + 1,
        lane.written + written,
        lane.drafted + event.drafted,
        lane.accepted + event.accepted,
    )
    tallies = _tally(history.tallies, pieces)
    return RunHistory({**history.lanes, event.lane: grown}, totals, tallies, history.tokens + written, history.loading)


def _grown(lane: LaneHistory, event: Stepped) -> tuple[tuple[LiveRow, ...], Endings | None]:
    live, ended = advance(lane.rows, event, _row)
    endings = lane.endings
    for place, row in enumerate(ended):
        endings = Endings(Leaf(event.ended[place].hypothesis, row.path), endings.count + 1 if endings else 1, endings)
    return tuple(live), endings


def _row(parent: LiveRow, row: Row | Ended) -> LiveRow:
    path = parent.path.grow(row.written)
    if isinstance(row, Ended):
        return LiveRow(path, row.hypothesis.logprob, row.hypothesis.total, row.hypothesis.slot)
    return LiveRow(path, row.logprob, row.total, row.slot, row.note)


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
