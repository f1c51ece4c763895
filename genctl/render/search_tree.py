"""The search tree: every row that was ever live, with common prefixes shared, and how each branch ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from genctl.events import Began, Ended, Event, Failed, Finished, Hypothesis, Loading, Row, Stepped, Token, advance

# inner: has children · returned, finished: a sequence ends here · died: no row continued it ·
# left: live when the search ended · live: still live
State: TypeAlias = Literal["inner", "returned", "finished", "died", "left", "live"]


@dataclass(eq=False)
class Node:
    """One token of one row; the root has none. `number` counts in the order in which nodes came about."""

    number: int
    parent: Node | None
    token: Token | None = None
    step: int = -1
    total: float | None = None  # of the row up to here, where a step ended here
    logprob: float | None = None
    note: str = ""
    children: list[Node] = field(default_factory=list)
    hypothesis: Hypothesis | None = None
    place: int | None = None  # among the returned sequences, from 1
    state: State = "inner"
    died: int | None = None  # the step that nothing of it survived


@dataclass
class SearchTree:
    """The tree of one lane."""

    lane: str
    began: Began | None = None
    nodes: list[Node] = field(default_factory=lambda: [Node(0, None)])
    rows: list[Node] = field(default_factory=list)  # the live ones
    over: bool = False

    def __post_init__(self) -> None:
        self.rows = [self.root]

    @property
    def root(self) -> Node:
        """Where all rows begin: the prompt."""
        return self.nodes[0]

    @property
    def prompt(self) -> str:
        return self.began.prompt if self.began else ""

    def step(self, event: Stepped) -> None:
        """Add one step. Raises InputError if a row continues one that does not exist."""
        rows, _ = advance(self.rows, event, lambda node, row: self._grow(node, row, event.step))
        continued = {row.parent for row in event.children}
        for place, node in enumerate(self.rows):
            if place not in continued and node not in rows and not node.children:
                node.state, node.died = "died", event.step
        self.rows = rows

    def finish(self, event: Finished) -> None:
        """Mark the returned sequences and the rows that were live when the search ended."""
        for node in self.rows:
            if not node.children and node.hypothesis is None:
                node.state = "left"
        self.rows, self.over = [], True
        waiting = [node for node in self.nodes if node.hypothesis is not None]
        for place, hypothesis in enumerate(event.hypotheses, start=1):
            for node in waiting:
                ended = node.hypothesis
                if ended is not None and (ended.tokens, ended.slot) == (hypothesis.tokens, hypothesis.slot):
                    node.state, node.place, node.hypothesis = "returned", place, hypothesis
                    waiting.remove(node)
                    break

    def _grow(self, node: Node, row: Row | Ended, step: int) -> Node:
        for token in row.written:
            node = self._add(node, token, step)
        if isinstance(row, Ended):
            node = node if row.written else self._add(node, None, step)
            node.hypothesis, node.state = row.hypothesis, "finished"
            node.total, node.logprob = row.hypothesis.total, row.hypothesis.logprob
        elif node is not self.root:
            node.total, node.logprob, node.note, node.state = row.total, row.logprob, row.note, "live"
        return node

    def _add(self, parent: Node, token: Token | None, step: int) -> Node:
        node = Node(len(self.nodes), parent, token, step)
        parent.children.append(node)
        parent.state = "inner"
        self.nodes.append(node)
        return node

    def weights(self) -> tuple[dict[Node, int], dict[Node, int]]:
        """For each node how many nodes it leads to, itself included, and the best place among their sequences."""
        sizes: dict[Node, int] = {}
        places: dict[Node, int] = {}
        for node in reversed(self.nodes):
            sizes[node] = 1 + sum(sizes[child] for child in node.children)
            below = [places[child] for child in node.children]
            places[node] = min([node.place or len(self.nodes), *below])
        return sizes, places


class SearchTrees:
    """Builds the tree of every lane from its events, until it is taken."""

    def __init__(self) -> None:
        self._trees: dict[str, SearchTree] = {}

    def feed(self, event: Event) -> None:
        """Take in one event. Raises InputError for one that cannot follow the ones before it."""
        if isinstance(event, Loading):
            return
        if isinstance(event, Failed):
            self._trees.pop(event.lane, None)
            return
        tree = self._trees.setdefault(event.lane, SearchTree(event.lane))
        if isinstance(event, Began):
            tree.began = event
        elif isinstance(event, Stepped):
            tree.step(event)
        elif isinstance(event, Finished):
            tree.finish(event)

    def take(self, lane: str) -> SearchTree | None:
        """Remove and return the tree of a lane; None if the lane is unknown or failed."""
        return self._trees.pop(lane, None)

    def take_all(self) -> Iterator[SearchTree]:
        """Remove and yield all trees in the order in which the lanes began."""
        for lane in list(self._trees):
            yield self._trees.pop(lane)


def plain(value: Any) -> Any:
    """A number for JSON: null if it is not finite."""
    finite = not isinstance(value, float) or value - value == 0
    return value if finite else None
