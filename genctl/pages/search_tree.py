"""The search tree: every row that was ever live, with common prefixes shared, and how each branch ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from genctl.events import Began, Ended, Event, Failed, Finished, Hypothesis, Loading, Stepped, Token
from genctl.events.history import ROOT, LaneHistory, Path

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


class SearchTree:
    """The tree of one lane: the root, where the prompt ends, and a node for each token of each of its `paths`.

    `paths` are those of all steps, in their order; `died` has the step after which no row continued a path.
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
        node = Node(len(self.nodes), parent, token, step)
        parent.children.append(node)
        self.nodes.append(node)
        return node

    def _mark(self, finished: Finished) -> None:
        """Mark the returned sequences. All that were ranked once more have their new scores."""
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

    def depths(self) -> dict[Node, int]:
        """For each node how many tokens it is from the root."""
        depths: dict[Node, int] = {}
        for node in self.nodes:  # parents come first
            depths[node] = 0 if node.parent is None else depths[node.parent] + 1
        return depths

    def weights(self) -> tuple[dict[Node, int], dict[Node, int]]:
        """For each node how many nodes it leads to, itself included, and the best place among their sequences."""
        sizes: dict[Node, int] = {}
        places: dict[Node, int] = {}
        for node in reversed(self.nodes):
            sizes[node] = 1 + sum(sizes[child] for child in node.children)
            below = [places[child] for child in node.children]
            places[node] = min([node.place or len(self.nodes), *below])
        return sizes, places


class TreeBuilder:
    """Keeps all paths that the history of a lane ever had."""

    def __init__(self, lane: str) -> None:
        self.history = LaneHistory(lane)
        self.size = 1  # nodes of the tree
        self.has_tokens = True  # the rows were not dropped
        self._paths: list[Path] = []
        self._died: dict[Path, int] = {}

    def feed(self, event: Event) -> None:
        """Take in an event of the lane. Raises InputError if it cannot follow."""
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
        """Forget the rows, which frees their memory; the other events of the lane are kept."""
        self.history = replace(self.history, rows=(), endings=None)
        self._paths, self._died, self.has_tokens = [], {}, False


class SearchTrees:
    """Builds the tree of every lane from its events, until it is taken."""

    def __init__(self) -> None:
        self._lanes: dict[str, TreeBuilder] = {}

    def feed(self, event: Event) -> None:
        """Take in one event. Raises InputError for one that cannot follow the ones before it."""
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
