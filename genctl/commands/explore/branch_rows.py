"""The rows of the tree's pane: a row for each part of a branch between two forks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class TreeNode(Protocol):
    """A token of the tree."""

    @property
    def text(self) -> str: ...
    @property
    def parent(self) -> int: ...


class Branching(Protocol):
    """What a tree tells of its shape."""

    @property
    def nodes(self) -> Sequence[TreeNode]: ...
    @property
    def joints(self) -> Sequence[float]: ...
    @property
    def depths(self) -> Sequence[int]: ...
    @property
    def bookmarks(self) -> Mapping[str, int]: ...
    def children(self, node: int, /) -> list[int]: ...


@dataclass(slots=True)
class BranchPart:
    """The tokens from `first` to `end`, which have one continuation each, but for the last."""

    first: int
    end: int
    forks: str  # the lines that lead to it, one character for each fork above
    last: bool  # of those that follow the same fork


def parts(tree: Branching, root: int = 0) -> Iterator[BranchPart]:
    """All parts, each before those that follow it."""
    first = tree.children(root)
    stack = [(child, "", child == first[-1]) for child in reversed(first)]
    while stack:
        first_node, forks, last = stack.pop()
        end = first_node
        while len(below := tree.children(end)) == 1:
            end = below[0]
        yield BranchPart(first_node, end, forks, last)
        deeper = forks + (" " if last else "│")
        stack += [(child, deeper, child == below[-1]) for child in reversed(below)]


class BranchRows:
    """The parts of a tree in their order. A token at the end of a branch changes one row, a fork all of them."""

    def __init__(self) -> None:
        self.parts: list[BranchPart] = []
        self._ends: dict[int, int] = {}  # the last node of a part -> its row
        self.stale = True
        self.made = 0  # times that all rows were made

    def grow(self, node: int, parent: int, siblings: int) -> None:
        """Take in a new node, with `siblings` shown nodes after its parent, itself included."""
        row = self._ends.get(parent)
        if self.stale or row is None or siblings > 1:
            self.stale = True
            return
        del self._ends[parent]
        self.parts[row].end = node
        self._ends[node] = row

    def refresh(self, tree: Branching) -> bool:
        """Make the rows anew if the tree has forked. Returns whether they were."""
        if not self.stale:
            return False
        self.parts = list(parts(tree))
        self._ends = {part.end: row for row, part in enumerate(self.parts)}
        self.stale = False
        self.made += 1
        return True

    def row_of(self, path: Collection[int]) -> int | None:
        """The last row whose part ends on a branch, given as its nodes."""
        rows = [self._ends[node] for node in path if node in self._ends]
        return max(rows) if rows else None


def text_of(tree: Branching, part: BranchPart, most: int) -> str:
    """The beginning of a part's text: at least `most` characters, if there are so many."""
    found: list[str] = []
    size, node = 0, part.first
    while True:
        text = tree.nodes[node].text
        found.append(text)
        size += len(text)
        below = tree.children(node)
        if node == part.end or size >= most or not below:  # an undo may come before the rows are made anew
            return "".join(found)
        node = below[0]
