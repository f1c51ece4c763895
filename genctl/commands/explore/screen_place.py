"""Where the screen is in the tree: a cursor on a branch, and the pieces of text that it shows.

The keys move it at once, also while the model runs; a command takes it to the tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from genctl.commands.explore.flow import TextPiece
from genctl.tree.changes import Grown
from genctl.tree.nodes import ROOT, Tree
from genctl.tree.results import At


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
