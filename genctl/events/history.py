"""The history of a lane: the state after its events. Views, results, search trees and pages are made from it.

Everything but `StablePrefix` and `GrowingText` is immutable. A row is a path of linked steps: forked rows share their
beginning, and adding a step costs the same at any length. `StablePrefix` is the part of a text that cannot change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import islice

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
    advance,
)

MOST_COMPARED = 2**20  # tokens of live rows compared with sequences; a shared beginning counts for each row
_PROMPT = Row("", 0, (), 0.0, 0.0)  # the row of the root of a path: no tokens


class Path:
    """A row after a step, linked to the row that it continued. The root, before the first step, has no tokens."""

    __slots__ = ("chars", "depth", "length", "parent", "row", "skip", "step")

    parent: Path | None
    skip: Path  # an ancestor for jumps, so going up n steps takes O(log n) (Myers 1983); the root's is the root
    depth: int  # steps from the root to here
    row: Row | Ended  # the tokens of the step, and the sums after it
    step: int  # -1 at the root
    length: int  # tokens from the root to here
    chars: int  # characters from the root to here

    def __init__(self, parent: Path | None = None, row: Row | Ended = _PROMPT, step: int = -1) -> None:
        self.parent, self.row, self.step = parent, row, step
        if parent is None:
            self.depth, self.skip = 0, self
        else:
            one = parent.skip
            two = one.skip
            self.depth = parent.depth + 1
            self.skip = two if parent.depth - one.depth == one.depth - two.depth else parent
        self.length = len(row.written) + (parent.length if parent else 0)
        self.chars = sum([len(token.text) for token in row.written]) + (parent.chars if parent else 0)

    def back(self) -> Iterator[Path]:
        """This path, the one that it continues, and so on; the root is left out."""
        path = self
        while path.parent is not None:
            yield path
            path = path.parent

    def above(self, depth: int) -> Path:
        """The ancestor at `depth` steps from the root, or this path itself."""
        path = self
        while path.depth > depth:
            path = path.skip if path.skip.depth >= depth or path.parent is None else path.parent
        return path

    def meet(self, other: Path) -> Path:
        """The newest step that both paths share; a root if they share none."""
        depth = min(self.depth, other.depth)
        a, b = self.above(depth), other.above(depth)
        while a is not b and a.parent is not None and b.parent is not None:  # two roots: events of two runs in one file
            # skips from equal depths lead to equal depths
            a, b = (a.skip, b.skip) if a.skip is not b.skip else (a.parent, b.parent)
        return a

    def tokens(self, last: int | None = None) -> list[Token]:
        """The tokens in reading order, or only the `last` ones. Takes time proportional to the result."""
        missing = count = self.length if last is None else min(last, self.length)
        pieces = []
        for path in self.back():
            if missing <= 0:
                break
            pieces.append(path.row.written)
            missing -= len(path.row.written)
        tokens = [token for written in reversed(pieces) for token in written]
        return tokens[len(tokens) - count :]

    def text(self, start: int = 0) -> str:
        """The characters from `start` on. Takes time proportional to the result, plus one step."""
        pieces: list[str] = []
        for path in self.back():
            if path.chars <= start:
                break
            pieces.append("".join(token.text for token in path.row.written))
        joined = "".join(reversed(pieces))
        return joined[max(0, start - (self.chars - len(joined))) :]

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids in reading order."""
        return tuple(token.id for token in self.tokens())

    @property
    def parents(self) -> tuple[int, ...]:
        """The index of the row that was continued, at each step."""
        return tuple(path.row.parent for path in self.back())[::-1]

    @property
    def slot(self) -> int | None:
        """The index of the returned sequence that this row becomes, if rows are independent."""
        return self.row.hypothesis.slot if isinstance(self.row, Ended) else self.row.slot

    @property
    def live(self) -> Row:
        """The newest step of a live row, with its sums and its note."""
        assert isinstance(self.row, Row)
        return self.row

    @property
    def hypothesis(self) -> Hypothesis:
        """The sequence that a row became when it ended."""
        assert isinstance(self.row, Ended)
        return self.row.hypothesis


ROOT = Path()


def _grown(step: int, path: Path, row: Row | Ended) -> Path:
    return Path(path, row, step)


@dataclass(frozen=True, slots=True, eq=False)
class Endings:
    """The rows of a lane that ended, newest first, as a linked list: adding one never copies the others."""

    path: Path
    count: int
    before: Endings | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[Path]:
        node: Endings | None = self
        while node is not None:
            yield node.path
            node = node.before


@dataclass(frozen=True, slots=True)
class LaneHistory:
    """One prompt with one strategy, so far."""

    lane: str
    began: Began | None = None
    prefilled: Prefilled | None = None
    rows: tuple[Path, ...] = (ROOT,)
    endings: Endings | None = None
    finished: Finished | None = None
    failed: Failed | None = None
    cache: CacheRead | None = None
    steps: int = 0
    written: int = 0  # tokens generated in all rows together
    drafted: int = 0
    accepted: int = 0

    def after(self, event: Event) -> LaneHistory:
        """The history after one more event of this lane. Raises InputError if the event cannot follow."""
        if isinstance(event, Stepped):
            return self.after_all((event,))
        if isinstance(event, Began):
            return LaneHistory(self.lane, event)
        if isinstance(event, Prefilled):
            return replace(self, prefilled=event)
        if isinstance(event, Finished):
            return replace(self, finished=event)
        if isinstance(event, Failed):
            return replace(self, failed=event)
        if isinstance(event, CacheRead):
            return replace(self, cache=event)
        if isinstance(event, Ended):
            alone = self.after_all((Stepped(self.lane, self.steps, (), (event,)),))
            return replace(self, endings=alone.endings, written=alone.written)
        assert isinstance(event, Loading)
        return self

    def after_all(self, steps: Sequence[Stepped]) -> LaneHistory:
        """The history after several steps. Raises InputError if one cannot follow."""
        rows, endings = list(self.rows), self.endings
        written = drafted = accepted = 0
        for event in steps:
            rows, ended = advance(rows, event, partial(_grown, event.step))
            for path in ended:
                endings = Endings(path, endings.count + 1 if endings else 1, endings)
            written += sum([len(row.written) for row in event.rows])
            written += sum([len(row.written) for row in event.ended])
            drafted += event.drafted
            accepted += event.accepted
        # spelled out: `dataclasses.replace` takes several times as long, in every step
        return LaneHistory(
            self.lane,
            self.began,
            self.prefilled,
            tuple(rows),
            endings,
            self.finished,
            self.failed,
            self.cache,
            self.steps + len(steps),
            self.written + written,
            self.drafted + drafted,
            self.accepted + accepted,
        )

    @property
    def prompt(self) -> str:
        """The prompt in readable form; "" if the lane failed before it began."""
        return (self.began.shown or self.began.prompt) if self.began else ""

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a conversation."""
        return self.began is not None and bool(self.began.shown)

    @property
    def between(self) -> str:
        """The separator of prompt and text on a screen: a newline if the text answers the prompt or has a structure."""
        began = self.began
        own_line = began is not None and (began.encoder_decoder or began.shown or began.settings.get("structure"))
        return "\n" if own_line else ""

    @property
    def name(self) -> str:
        """The prompt's name in messages: `prompt 2`, or `prompt` and its own id."""
        return f"prompt {self.began.place if self.began and self.began.place else self.lane}"

    @property
    def over(self) -> bool:
        """Whether the lane finished or failed."""
        return self.finished is not None or self.failed is not None

    @property
    def ended(self) -> tuple[Path, ...]:
        """The rows that ended, in that order."""
        return tuple(self.endings or ())[::-1]

    def latest_ended(self, count: int) -> list[Path]:
        """The last `count` rows that ended, in that order."""
        return [*islice(self.endings or (), count)][::-1]

    def paths_of(self, hypotheses: Sequence[Hypothesis]) -> list[Path | None]:
        """The path of each finished hypothesis, or None if no event contained it.

        A path has the tokens of its hypothesis. If a server reports no ids, each path is used for one hypothesis only.
        """
        ended: dict[tuple[tuple[int, ...], int | None], list[Path]] = {}
        same: dict[tuple[int, ...], Path] = {}
        for path in self.endings or ():  # the newest first
            own = path.hypothesis
            if own.tokens and len(own.tokens) != path.length:
                continue
            ended.setdefault((own.tokens, own.slot), []).append(path)
            same[own.tokens] = path
        if any(one.tokens not in same for one in hypotheses):  # an interrupted row has no `Ended` event
            compared = 0
            for row in self.rows:
                compared += row.length
                if compared > MOST_COMPARED:
                    break
                same.setdefault(row.ids, row)
        found: list[Path | None] = []
        for hypothesis in hypotheses:
            tokens = hypothesis.tokens
            paths = ended.get((tokens, hypothesis.slot), [])
            if tokens:
                found.append(paths[0] if paths else same.get(tokens))
            else:
                found.append(paths.pop(0) if paths else None)
        return found


RANKED = frozenset({"beam", "beam-sample", "diverse-beam"})  # the finished sequence with the highest score is first
DRAWN = frozenset({"greedy", "sample"})  # rows do not compete: the sequence of the lowest slot is first


def common_ancestor(paths: Iterable[Path | None]) -> Path:
    """The newest step that all paths share, ignoring None; the root if there are none."""
    known = [path for path in paths if path is not None]
    return reduce(Path.meet, known) if known else ROOT


class StablePrefix:
    """The stable beginning of the first returned sequence of a lane, which only grows.

    It is common to all live rows and to every finished sequence that could still be returned first. A call takes time
    proportional to the live rows and the rows that ended since the last call.
    """

    def __init__(self) -> None:
        self._forget("")

    def _forget(self, lane: str) -> None:
        self._lane = lane
        self._read: Endings | None = None  # the newest row that is included in the fields below
        self._all: Path | None = None  # the common part of all ended rows
        self._best = -math.inf  # the highest score of an ended row
        self._winners: Path | None = None  # the common part of rows with this score (NaN counts as equal)
        self._slot: int | None = None  # the lowest slot of an ended row
        self._first: Path | None = None  # the common part of rows in this slot
        self._have_slots = True  # whether each ended row has a slot

    def __call__(self, lane: LaneHistory) -> Path:
        """The end of the stable part."""
        new: list[Path] = []
        node = lane.endings
        while node is not None and node is not self._read:
            new.append(node.path)
            node = node.before
        if lane.lane != self._lane or node is not self._read:  # another lane, or this one restarted
            self._forget(lane.lane)
            new = [*(lane.endings or ())]
        for path in reversed(new):
            self._count(path)
        self._read = lane.endings
        kind = lane.began.strategy if lane.began else ""
        if kind in RANKED:
            return common_ancestor([self._winners, *lane.rows])
        slots = [row.slot for row in lane.rows]
        known = [slot for slot in (*slots, self._slot) if slot is not None]
        if kind not in DRAWN or not self._have_slots or None in slots or not known:
            return common_ancestor([self._all, *lane.rows])
        first = min(known)
        rows = [row for row, slot in zip(lane.rows, slots, strict=True) if slot == first]
        return common_ancestor([self._first if first == self._slot else None, *rows])

    def _count(self, path: Path) -> None:
        """Include a row that ended."""
        self._all = common_ancestor([self._all, path])
        score, slot = path.hypothesis.score, path.slot
        if score > self._best:
            self._best, self._winners = score, path
        elif not score < self._best:
            self._winners = common_ancestor([self._winners, path])
        if slot is None:
            self._have_slots = False
        elif self._slot is None or slot < self._slot:
            self._slot, self._first = slot, path
        elif slot == self._slot:
            self._first = common_ancestor([self._first, path])


class GrowingText:
    """The first text of a lane while it grows. `feed` takes the events of the lane."""

    def __init__(self, lane: str) -> None:
        self._history = LaneHistory(lane)
        self._stable = StablePrefix()
        self._shown = ROOT
        self._pieces: list[str] = []

    def feed(self, event: Event) -> str:
        """The text that an event adds."""
        self._history = self._history.after(event)
        if isinstance(event, Finished) and event.hypotheses:
            shown = "".join(self._pieces)
            return event.hypotheses[0].text.removeprefix(shown)
        path = self._stable(self._history)
        if path.length <= self._shown.length:
            return ""
        piece, self._shown = path.text(self._shown.chars), path
        self._pieces.append(piece)
        return piece
