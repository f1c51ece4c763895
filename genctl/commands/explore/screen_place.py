"""Where the screen is in the tree: a cursor on a branch, and the pieces of text that it shows.

The keys move it at once, also while the model runs; a command takes it to the tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from genctl.commands.explore.flow import TextPiece
from genctl.tree.changes import Grown
from genctl.tree.nodes import ROOT, Tree

UNCERTAIN = 1.0  # nats of entropy from which on a choice is uncertain


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

    def adopt(self) -> None:
        """Go where the tree's own cursor is."""
        self.go(self.tree.cursor, self.tree.tip)

    def go(self, cursor: int, tip: int | None = None) -> None:
        """To a node, on the branch that ends with `tip`; None: on this branch if it is on it, else on the newest."""
        if tip is None:
            tip = self.tip if cursor in self.on_path else self.tree.end_of(cursor)
        path = self.tree.path(tip)
        self.cursor = cursor
        if path == self.path and self.pieces:
            return
        self.path = path
        self.on_path = {ROOT, *path}
        prompt = self.tree.opened.shown or self.tree.opened.prompt
        lead = [TextPiece(ROOT, prompt)] if prompt else []
        self._lead = len(lead)
        self.pieces = lead + [self._piece(node) for node in path]

    def grow(self, token: Grown) -> None:
        """Follow a token that was written."""
        if token.parent != self.tip:
            self.go(token.node, token.node)
            return
        self.path.append(token.node)
        self.on_path.add(token.node)
        self.pieces.append(self._piece(token.node))
        self.cursor = token.node

    def mark(self, differing: Mapping[int, bool]) -> None:
        """Take in after which nodes another model would write something else."""
        self.differing.update(differing)
        self.pieces[self._lead :] = [self._piece(node) for node in self.path]

    def move(self, index: int) -> bool:
        """Put the cursor on a piece. Returns whether it moved."""
        depth = min(max(index - self._lead, 0), len(self.path))
        node = self.path[depth - 1] if depth else ROOT
        moved, self.cursor = node != self.cursor, node
        return moved

    def uncertain(self, direction: int) -> int | None:
        """The index of the next (1) or previous (-1) token that was chosen with a high entropy."""
        depths = range(self.depth + 1, len(self.path)) if direction > 0 else range(self.depth - 1, -1, -1)
        for depth in depths:
            entropy = self.tree.nodes[self.path[depth]].entropy
            if entropy is not None and entropy >= UNCERTAIN:
                return depth + self._lead
        return None

    def unknown(self) -> list[int]:
        """The nodes of the branch of which it is not known whether two models differ after them, the nearest first."""
        nodes = [ROOT, *self.path[:-1]]
        return [node for node in nodes if node not in self.differing]

    def _piece(self, node: int) -> TextPiece:
        token = self.tree.nodes[node]
        probability = math.exp(min(token.logprob, 0.0))
        return TextPiece(node, token.text, probability, self.differing.get(token.parent, False))
