"""What the screen shows of a tree and its checkpoint, and of a second distribution beside it; and where in the
tree it is."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from genctl.commands.explore.flow import TextPiece
from genctl.config import presets
from genctl.config.check import known
from genctl.errors import GenctlError
from genctl.tree.beside import Second
from genctl.tree.changes import Grown
from genctl.tree.distribution import Distribution
from genctl.tree.explorer import Explorer
from genctl.tree.nodes import ROOT, Tree
from genctl.tree.results import At

BEST = 4096  # nodes whose most probable token is kept


@dataclass(frozen=True)
class NodeLook:
    """What is shown of a place in the tree."""

    node: int
    settings: int
    first: Distribution | None = None  # None: it could not be computed
    other: Distribution | None = None  # by the other model or preset
    shared: int | None = None  # columns of the cache
    own: int | None = None
    error: str = ""


class TreeSource:
    """A tree with the explorer that works on it. `second` is shown beside it; `names` are those of the two.

    `do`, `look` and `differs` run in the worker's thread and raise GenctlError; `pause` is called from any thread.
    """

    def __init__(self, explorer: Explorer, second: Second | None = None, names: tuple[str, str] | None = None) -> None:
        self.explorer, self.second, self.names = explorer, second, names
        self._space = explorer.space
        self._rest: Iterator[Any] = iter(())  # of the command that was cut short
        self._best: OrderedDict[tuple[Callable[[int], Distribution], int, int], int] = OrderedDict()

    @property
    def tree(self) -> Tree:
        """The tree; the worker's thread changes it."""
        return self.explorer.tree

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held while the tree changes."""
        return self._space.lock

    @property
    def speed(self) -> float | None:
        """Tokens a second of the newest generation."""
        return self._space.speed

    @property
    def suggestions(self) -> Sequence[str]:
        """Knobs and presets, for completion."""
        return [
            *(f"{name}=" for name in sorted(known())),
            *sorted({preset.name for preset in presets.available()}),
            "reset",
        ]

    def do(self, line: str, /) -> Iterator[Any]:
        """Do a command; `resume` finishes the one that was cut short."""
        return self._rest if line == "resume" else self.explorer.do(line)

    def resume(self) -> None:
        """Take back the command that was cut short, and begin it again, before anything shows the tree.

        If it comes out differently, `do("resume")` raises that, and the tree is what the file has.
        """
        results = self.explorer.resume()
        try:
            self._rest = chain(list(islice(results, 1)), results)
        except GenctlError as error:
            self._rest = _failing(error)

    def pause(self) -> None:
        """End what is done at its next token."""
        self.explorer.pause()

    def look(self, node: int, /) -> NodeLook:
        """What is shown of a node."""
        first = self._space.distribution(node)
        other = None if self.second is None else self.second.distribution(node)
        for each in (first, other):
            if each is not None:  # sorted in this thread: the screen only looks them up (40 ms for 150,000 tokens)
                _ = each.rank(0), each.entropy
        return NodeLook(node, self.tree.view.settings, first, other, *self._space.branches.shared(node))

    def differs(self, node: int, /) -> bool:
        """Whether the two would write different tokens after a node."""
        second = self.second
        if second is None:
            return False
        return self._best_of(self._space.distribution, node) != self._best_of(second.distribution, node)

    def _best_of(self, distribution: Callable[[int], Distribution], node: int) -> int:
        key = distribution, node, self.tree.view.settings
        if key not in self._best:
            self._best[key] = distribution(node).best
            while len(self._best) > BEST:
                self._best.popitem(last=False)
        return self._best[key]

    def vocabulary(self) -> Sequence[str]:
        """The text of every token, by id."""
        return [self._space.piece(id) for id in range(self._space.session.forward.vocab_size)]


def _failing(error: GenctlError) -> Iterator[Any]:
    raise error
    yield


# -- where the screen is in the tree: a cursor on a branch, and the pieces of text that it shows -----------------------
# The keys move it at once, also while the model runs; a command takes it to the tree.


class Place:
    """A branch from the root to `tip`, and a node `cursor` on it: what follows the cursor is looked at."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.path: list[int] = []  # nodes of the branch, but for the root
        self.on_path: set[int] = {ROOT}
        self.pieces: list[TextPiece] = []
        self.cursor = ROOT
        self.differing: dict[int, bool] = {}  # nodes after which another model would write something else
        self._lead = 0  # pieces of the prompt
        self.adopt()

    @property
    def tip(self) -> int:
        """The end of the branch."""
        return self.path[-1] if self.path else ROOT

    @property
    def depth(self) -> int:
        """Tokens before the cursor, the prompt's left out."""
        return self.tree.depths[self.cursor]

    @property
    def index(self) -> int:
        """The piece under the cursor; the number of pieces at the end."""
        return self.depth + self._lead

    @property
    def under(self) -> int | None:
        """The node under the cursor: the token that follows it on the branch."""
        return self.path[self.depth] if self.depth < len(self.path) else None

    @property
    def at(self) -> At:
        """The cursor and the end of the branch."""
        return At(self.cursor, self.tip)

    def piece(self, index: int) -> At:
        """Where a piece is."""
        depth = min(max(index - self._lead, 0), len(self.path))
        return At(self.path[depth - 1] if depth else ROOT, self.tip)

    def adopt(self) -> None:
        """Go where the tree's own cursor is."""
        self.go(At(self.tree.cursor, self.tree.tip))

    def go(self, at: At) -> bool:
        """To a node on a branch. Returns whether the cursor moved."""
        moved, self.cursor = self.cursor != at.cursor, at.cursor
        if at.tip != self.tip or not self.pieces:
            self.path = self.tree.path(at.tip)
            self.on_path = {ROOT, *self.path}
            prompt = self.tree.opened.shown or self.tree.opened.prompt
            lead = [TextPiece(ROOT, prompt)] if prompt else []
            self._lead = len(lead)
            self.pieces = lead + [self._piece(node) for node in self.path]
        return moved

    def grow(self, token: Grown) -> None:
        """Follow a token that was written."""
        if token.parent != self.tip:
            self.go(At(token.node, token.node))
            return
        self.path.append(token.node)
        self.on_path.add(token.node)
        self.pieces.append(self._piece(token.node))
        self.cursor = token.node

    def mark(self, differing: Mapping[int, bool]) -> None:
        """Take in after which nodes another model would write something else."""
        self.differing.update(differing)
        self.pieces[self._lead :] = [self._piece(node) for node in self.path]

    def unknown(self) -> list[int]:
        """The nodes of the branch of which it is not known whether two models differ after them, the nearest first."""
        nodes = [ROOT, *self.path[:-1]]
        return [node for node in nodes if node not in self.differing]

    def _piece(self, node: int) -> TextPiece:
        token = self.tree.nodes[node]
        probability = math.exp(min(token.logprob, 0.0))
        return TextPiece(node, token.text, probability, self.differing.get(token.parent, False))
