"""What has happened so far: one pure function folds each event into a `Story`, and whoever draws reads only that.

Everything is a value. A row's text is a path of linked tokens, so rows that fork from one another share their stem, and
folding a step costs what the step holds, never what came before it.
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

MOVED_AT_LEAST = 1e-9  # total variation below this is rounding, not a processor's doing


class Path:
    """The newest token of a row and the path that it continues. Rows that share a beginning share its nodes."""

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
        wanted = self.length if last is None else min(last, self.length)
        # the shorter of the two ends it
        found = [node.token for node, _ in zip(self.back(), range(wanted)) if node.token]  # noqa: B905 (see above)
        return found[::-1]

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
        # Written as a loop: a path is thousands of nodes deep and a generated comparison would recurse.
        if not isinstance(other, Path):
            return NotImplemented
        one, two = self, other
        while one is not two:
            if one.length != two.length or one.token != two.token:
                return False
            if one.parent is None or two.parent is None:
                return True
            one, two = one.parent, two.parent
        return True

    def __hash__(self) -> int:
        return hash((self.length, self.chars))

    def __repr__(self) -> str:
        return f"Path({self.length} tokens, {self.text(max(0, self.chars - 20))!r})"


ROOT = Path()


@dataclass(frozen=True, slots=True)
class StoryRow:
    """A live row: where it has come to and what it is worth."""

    path: Path = ROOT
    logprob: float = 0.0
    total: float = 0.0
    slot: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A row that ended, and where its path ends."""

    hypothesis: Hypothesis
    path: Path


@dataclass(frozen=True, slots=True, eq=False)
class Endings:
    """The rows of a lane that ended, newest first, linked so that adding one never copies the others."""

    leaf: Leaf
    count: int
    before: Endings | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[Leaf]:
        found: Endings | None = self
        while found is not None:
            yield found.leaf
            found = found.before

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Endings):
            return NotImplemented
        return self.count == other.count and all(one == two for one, two in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash((self.count, self.leaf))


@dataclass(frozen=True, slots=True)
class LaneStory:
    """One prompt with one strategy, so far."""

    lane: str
    began: Began | None = None
    prefilled: Prefilled | None = None
    rows: tuple[StoryRow, ...] = (StoryRow(),)
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
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.finished is not None or self.failed is not None

    @property
    def ended(self) -> tuple[Leaf, ...]:
        """The rows that ended, in the order in which they did."""
        return tuple(self.endings or ())[::-1]

    def path_of(self, hypothesis: Hypothesis) -> Path | None:
        """The path of a finished hypothesis, or None if the events never told it."""
        found = self._path_among_endings(hypothesis)
        if found is not None:
            return found
        for row in self.rows:  # rows that were cut short by an interruption never ended
            if row.path.length == len(hypothesis.tokens) and row.path.ids == hypothesis.tokens:
                return row.path
        return None

    def _path_among_endings(self, hypothesis: Hypothesis) -> Path | None:
        found = None
        for leaf in self.endings or ():
            if leaf.hypothesis.tokens == hypothesis.tokens:
                if leaf.hypothesis.slot == hypothesis.slot:
                    return leaf.path
                found = leaf.path
        return found


@dataclass(frozen=True, slots=True)
class ProcessorTally:
    """What one processor did over a run."""

    processor: str
    steps: int = 0  # tokens at which it was looked at
    touched: int = 0  # those at which it removed or moved anything
    removed: int = 0
    moved: float = 0.0  # sum of the total variations
    changed: int = 0
    seconds: float = 0.0

    def add(self, trace: Trace) -> ProcessorTally:
        """The tally with one more trace, its time left out: that is shared by all rows of a call."""
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
    """A run in numbers, over all lanes that are over."""

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
class Story:
    """A run so far. `lanes` is in the order in which they were first heard of."""

    lanes: Mapping[str, LaneStory] = field(default_factory=dict)
    totals: Totals = Totals()
    tallies: Mapping[str, ProcessorTally] = field(default_factory=dict)
    tokens: int = 0  # tokens written so far in all rows of all lanes
    loading: Loading | None = None

    def without(self, lane: str) -> Story:
        """The story with this lane's details forgotten; its share of the totals stays."""
        return replace(self, lanes={name: story for name, story in self.lanes.items() if name != lane})


def touched(trace: Trace) -> bool:
    """Whether a processor did anything to a row's scores."""
    return trace.removed > 0 or trace.moved > MOVED_AT_LEAST


def fold(story: Story, event: Event) -> Story:
    """The story after one more event. Raises InputError if the event cannot follow (a damaged recording)."""
    if isinstance(event, Stepped):
        return _step(story, event)
    if isinstance(event, Loading):
        return replace(story, loading=None if event.done >= event.total > 0 else event)
    totals = story.totals
    lane = story.lanes.get(event.lane)
    if isinstance(event, Began) or lane is None:
        totals = replace(totals, lanes=totals.lanes + 1)
        lane = LaneStory(event.lane)
    tallies, written = story.tallies, 0
    if isinstance(event, Began):
        lane = replace(lane, began=event)
        totals = replace(totals, seed=event.seed if totals.seed is None else totals.seed)
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
    return Story({**story.lanes, event.lane: lane}, totals, tallies, story.tokens + written, story.loading)


def _step(story: Story, event: Stepped) -> Story:
    totals = story.totals
    lane = story.lanes.get(event.lane)
    if lane is None:
        totals = replace(totals, lanes=totals.lanes + 1)
        lane = LaneStory(event.lane)
    rows, endings = _grown(lane, event)
    pieces = [row.written for row in event.children]
    written = sum(map(len, pieces))
    if event.drafted or event.accepted:
        totals = replace(totals, drafted=totals.drafted + event.drafted, accepted=totals.accepted + event.accepted)
    grown = LaneStory(
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
    tallies = _tally(story.tallies, pieces)
    return Story({**story.lanes, event.lane: grown}, totals, tallies, story.tokens + written, story.loading)


def _grown(lane: LaneStory, event: Stepped) -> tuple[tuple[StoryRow, ...], Endings | None]:
    live, ended = advance(lane.rows, event, _row)
    endings = lane.endings
    for place, row in enumerate(ended):
        endings = Endings(Leaf(event.ended[place].hypothesis, row.path), endings.count + 1 if endings else 1, endings)
    return tuple(live), endings


def _row(parent: StoryRow, row: Row | Ended) -> StoryRow:
    path = parent.path.grow(row.written)
    if isinstance(row, Ended):
        return StoryRow(path, row.hypothesis.logprob, row.hypothesis.total, row.hypothesis.slot)
    return StoryRow(path, row.logprob, row.total, row.slot, row.note)


def _finish(totals: Totals, lane: LaneStory, event: Finished) -> Totals:
    stops = dict(totals.stops)
    for hypothesis in event.hypotheses:
        stop = (hypothesis.reason, hypothesis.cause)
        stops[stop] = stops.get(stop, 0) + 1
    read = lane.prefilled.prompt_tokens if lane.prefilled else 0
    return replace(
        totals,
        finished=totals.finished + 1,
        sequences=totals.sequences + len(event.hypotheses),
        tokens=totals.tokens + sum(len(hypothesis.tokens) for hypothesis in event.hypotheses),
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
