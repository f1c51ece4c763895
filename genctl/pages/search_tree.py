"""The search tree: every row that was ever live, with shared prefixes, and how each branch ended;
and its columns for a page."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from genctl.events import Began, Ended, Event, Failed, Finished, Hypothesis, Loading, Stepped, Token
from genctl.events.history import ROOT, LaneHistory, Path
from genctl.terminal.explain import logprob_beside_total

# inner: has children · returned, finished: a sequence ends here · died: no row continued it ·
# left: live when the search ended · live: still live
State: TypeAlias = Literal["inner", "returned", "finished", "died", "left", "live"]


@dataclass(eq=False)
class Node:
    """One token of one row; the root has none. `number` counts nodes in order of creation."""

    number: int
    parent: Node | None
    depth: int = 0  # tokens from the root to here
    token: Token | None = None
    step: int = -1
    total: float | None = None  # of the row up to here, if a step ended here
    logprob: float | None = None
    note: str = ""
    children: list[Node] = field(default_factory=list)
    hypothesis: Hypothesis | None = None
    place: int | None = None  # among the returned sequences, from 1
    state: State = "inner"
    died: int | None = None  # the step after which no row continued it


class SearchTree:
    """The tree of one lane: the root, at the end of the prompt, and a node for each token of each of its `paths`.

    `paths` has the paths of all steps, in order; `died` has the step after which no row continued a path.
    """

    def __init__(self, history: LaneHistory, paths: Sequence[Path], died: Mapping[Path, int]) -> None:
        self.lane = history.lane
        self.began = history.began
        self.prompt = history.prompt
        self.root = Node(0, None)
        self.nodes = [self.root]
        newest = {ROOT: self.root}
        for path in paths:
            assert path.parent is not None
            newest[path] = self._grow(newest[path.parent], path)
            newest[path].died = died.get(path)
        for node in self.nodes:
            if node.children:
                node.died = None
            elif node.hypothesis is not None:
                node.state = "finished"
            elif node.died is not None:
                node.state = "died"
            else:
                node.state = "live" if history.finished is None else "left"
        if history.finished is not None:
            self._mark(history.finished)

    def _grow(self, node: Node, path: Path) -> Node:
        """Add the nodes of a step. Returns the newest one."""
        row = path.row
        for token in row.written:
            node = self._add(node, token, path.step)
        if isinstance(row, Ended):
            node = node if row.written else self._add(node, None, path.step)
            node.hypothesis, node.total, node.logprob = row.hypothesis, row.hypothesis.total, row.hypothesis.logprob
        elif node is not self.root:
            node.total, node.logprob, node.note = row.total, row.logprob, row.note
        return node

    def _add(self, parent: Node, token: Token | None, step: int) -> Node:
        node = Node(len(self.nodes), parent, parent.depth + 1, token, step)
        parent.children.append(node)
        self.nodes.append(node)
        return node

    def _mark(self, finished: Finished) -> None:
        """Mark the returned sequences. Returned and rejected ones get their final hypotheses, which may be rescored."""
        waiting: dict[tuple[tuple[int, ...], int | None], deque[Node]] = {}
        for node in self.nodes:
            if node.hypothesis is not None:
                waiting.setdefault((node.hypothesis.tokens, node.hypothesis.slot), deque()).append(node)
        for place, hypothesis in enumerate((*finished.hypotheses, *finished.others), start=1):
            same = waiting.get((hypothesis.tokens, hypothesis.slot))
            if not same:
                continue
            node = same.popleft()
            node.hypothesis = hypothesis
            if place <= len(finished.hypotheses):
                node.state, node.place = "returned", place

    def weights(self) -> tuple[dict[Node, int], dict[Node, int]]:
        """For each node the size of its subtree, itself included, and the best place among the subtree's sequences."""
        sizes: dict[Node, int] = {}
        places: dict[Node, int] = {}
        for node in reversed(self.nodes):
            sizes[node] = 1 + sum(sizes[child] for child in node.children)
            below = [places[child] for child in node.children]
            places[node] = min([node.place or len(self.nodes), *below])
        return sizes, places


class TreeBuilder:
    """Collects all paths that the history of a lane ever had."""

    def __init__(self, lane: str) -> None:
        self.history = LaneHistory(lane)
        self.size = 1  # nodes of the tree
        self.has_tokens = True  # False once the rows are dropped
        self._paths: list[Path] = []
        self._died: dict[Path, int] = {}

    def feed(self, event: Event) -> None:
        """Process an event of the lane. Raises InputError if it cannot follow."""
        before = self.history.rows
        self.history = self.history.after(event)
        if isinstance(event, Began):
            self._paths, self._died, self.size = [], {}, 1
        elif isinstance(event, Stepped):
            self._paths += [*self.history.rows, *self.history.latest_ended(len(event.ended))]
            continued = {row.parent for row in event.children}
            self._died |= {path: event.step for place, path in enumerate(before) if place not in continued}
            self.size += sum(len(row.written) for row in event.children) + sum(not row.written for row in event.ended)

    def tree(self) -> SearchTree:
        """The tree so far."""
        return SearchTree(self.history, self._paths, self._died)

    def drop_rows(self) -> None:
        """Drop the rows to free memory; the other events of the lane are kept."""
        self.history = replace(self.history, rows=(), endings=None)
        self._paths, self._died, self.has_tokens = [], {}, False


class SearchTrees:
    """Builds the tree of every lane from its events. Trees are kept until they are taken."""

    def __init__(self) -> None:
        self._lanes: dict[str, TreeBuilder] = {}

    def feed(self, event: Event) -> None:
        """Process one event. Raises InputError for one that cannot follow the earlier ones."""
        if isinstance(event, Loading):
            return
        if isinstance(event, Failed):
            self._lanes.pop(event.lane, None)
            return
        self._lanes.setdefault(event.lane, TreeBuilder(event.lane)).feed(event)

    def take(self, lane: str) -> SearchTree | None:
        """Remove and return the tree of a lane; None if the lane is unknown or failed."""
        builder = self._lanes.pop(lane, None)
        return None if builder is None else builder.tree()

    def take_all(self) -> Iterator[SearchTree]:
        """Remove and yield all trees in the order in which the lanes began."""
        for lane in list(self._lanes):
            yield self._lanes.pop(lane).tree()


# -- the tree of a lane as columns of short numbers, compact enough for tens of thousands of nodes ---------------------
# A node is one token. Node 0 is the prompt and has no entry; entry i - 1 of each column belongs to node i.
# Log-probabilities and entropies are integers in units of 1/SCALE nats; the numbers of `ends` are in nats.


SCALE = 1_000_000  # the page rounds to three decimals: its sums are exact enough for a single rounding
SUMS = SCALE // 10_000  # rounding of sums in float32
LETTERS = {"inner": "i", "returned": "r", "finished": "f", "died": "d", "left": "l", "live": "v"}


# Whether a page includes alternatives, ranks, entropies and dead branches.
TreeDetail: TypeAlias = Literal["all", "none"]


Vocabulary: TypeAlias = dict[tuple[int, str], int]  # (id, text) -> number: each text is on a page once


def _number(vocabulary: Vocabulary, id: int, text: str) -> int:
    """The number of a token; a new one gets the next number."""
    return vocabulary.setdefault((id, text), len(vocabulary))


def columns(tree: SearchTree, vocabulary: Vocabulary, detail: TreeDetail) -> dict[str, Any]:
    """The tree of a lane. Columns without any value are left out.

    `up`: how many entries before a node its parent is · `token`: its number in the vocabulary, -1 for a row that
    ended without a token · `logprob` · `extra`: added to the total in this step by processors and penalties ·
    `step`, if steps differ from depths · `state`: a letter (LETTERS) each · `rank`, `entropy` · by node number: `note`,
    `top` (token, log-probability, token, …), `trace`, `watched` · `ends`: the hypotheses, with the node at which each
    ends.
    """
    kept = tree.nodes[1:]
    if detail == "none":
        wanted = _paths(node for node in tree.nodes if node.hypothesis is not None)
        kept = [node for node in kept if node in wanted]
    numbers = {tree.root: 0} | {node: place for place, node in enumerate(kept, 1)}
    written: list[Token] = [node.token or Token(-1, 0.0) for node in kept]

    columns: dict[str, Any] = {
        "up": [numbers[node] - numbers[_parent(node)] for node in kept],
        "token": [-1 if node.token is None else _number(vocabulary, node.token.id, node.token.text) for node in kept],
        "logprob": [scaled(token.logprob) for token in written],
        "extra": _extra(kept),
        "state": "".join(LETTERS[node.state] for node in kept),
    }
    if any(node.step != node.depth - 1 for node in kept):
        columns["step"] = [node.step for node in kept]
    for name, value in _NUMBERS.items():
        column = [value(token) for token in written]
        if detail == "all" and any(column):
            columns[name] = column
    for name, entry in _PARTS.items():
        of_node = {
            number: entry(token, vocabulary)
            for number, token in enumerate(written, 1)
            if detail == "all" and getattr(token, name)
        }
        if of_node:
            columns[name] = of_node
    notes = {numbers[node]: node.note for node in kept if node.note}
    if notes:
        columns["note"] = notes
    if not any(columns["extra"]):
        del columns["extra"]
    columns["ends"] = [_end(node, numbers[node]) for node in kept if node.hypothesis is not None]
    return columns


def scaled(value: float | None) -> int | None:
    """Nats as an integer in units of 1/SCALE; None if there is no finite number."""
    return None if value is None or not math.isfinite(value) else round(value * SCALE)


def known(value: float) -> float | None:
    """A number for JSON; None if it is not finite."""
    return value if math.isfinite(value) else None


def _parent(node: Node) -> Node:
    assert node.parent is not None
    return node.parent


def _paths(ends: Iterable[Node]) -> set[Node]:
    """All nodes from the root to any of `ends`."""
    nodes: set[Node] = set()
    for end in ends:
        node: Node | None = end
        while node is not None and node not in nodes:
            nodes.add(node)
            node = node.parent
    return nodes


def _extra(nodes: Sequence[Node]) -> list[int]:
    """The part of each total beyond its parent's total and the log-probability of the token."""
    extra = []
    totals: dict[Node, float] = {}
    for node in nodes:
        before = totals.get(_parent(node), 0.0)
        own = 0.0 if node.token is None else node.token.logprob
        total = before + own if node.total is None or not math.isfinite(node.total) else node.total
        totals[node] = total
        added = scaled(total - before - own) or 0
        extra.append(0 if abs(added) <= SUMS else added)
    return extra


def _top(token: Token, vocabulary: Vocabulary) -> list[Any]:
    return [number for id, text, value in token.top for number in (_number(vocabulary, id, text), scaled(value))]


def _trace(token: Token, vocabulary: Vocabulary) -> list[Any]:
    return [
        [act.processor, act.removed, round(act.moved, 4), int(act.changed), round(act.before, 6), round(act.after, 6)]
        for act in token.trace
    ]


def _watched(token: Token, vocabulary: Vocabulary) -> list[Any]:
    return [
        cell for id, text, value, rank in token.watched for cell in (_number(vocabulary, id, text), scaled(value), rank)
    ]


_NUMBERS: dict[str, Callable[[Token], int]] = {
    "rank": lambda token: token.rank or 0,
    "entropy": lambda token: scaled(token.entropy) or 0,
}
_PARTS: dict[str, Callable[[Token, Vocabulary], list[Any]]] = {"top": _top, "trace": _trace, "watched": _watched}


def _end(node: Node, number: int) -> dict[str, Any]:
    hypothesis = node.hypothesis
    assert hypothesis is not None
    end: dict[str, Any] = {
        "node": number,
        "reason": hypothesis.reason,
        "tokens": hypothesis.length,
        "total": known(hypothesis.total),
        "logprob": known(logprob_beside_total(hypothesis)),
        "score": known(hypothesis.score),
    }
    optional = {
        "place": node.place,
        "cause": hypothesis.cause,
        "unmet": list(hypothesis.unmet),
        "incomplete": hypothesis.incomplete,
    }
    return end | {name: value for name, value in optional.items() if value}
