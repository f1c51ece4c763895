"""Moves: from a place in the tree, the cursor on the branch of a tip, to another one.

Commands move the tree's own cursor by them, and the keys of the screen the screen's.
"""

from __future__ import annotations

from collections.abc import Iterable

from genctl.tree.nodes import ROOT, Tree
from genctl.tree.results import At


def left(tree: Tree, at: At, n: int) -> At:
    """`n` tokens up the branch."""
    node = tree.above(at.cursor, max(tree.depths[at.cursor] - n, 0))
    return At(node, at.tip, "" if node != at.cursor else "this is the beginning")


def right(tree: Tree, at: At, n: int) -> At:
    """`n` tokens down the branch."""
    node = tree.above(at.tip, min(tree.depths[at.cursor] + n, tree.depths[at.tip]))
    return At(node, at.tip, "" if node != at.cursor else "this is the end of the branch")


def up(tree: Tree, at: At) -> At:
    """The branch above, of those that part at the cursor."""
    return _sibling(tree, at, -1)


def down(tree: Tree, at: At) -> At:
    """The branch below."""
    return _sibling(tree, at, 1)


def _sibling(tree: Tree, at: At, by: int) -> At:
    siblings = tree.children(at.cursor)
    if at.cursor == at.tip or len(siblings) < 2:
        return At(at.cursor, at.tip, "no branches part here")
    under = tree.above(at.tip, tree.depths[at.cursor] + 1)
    place = (siblings.index(under) + by) % len(siblings)
    return At(at.cursor, tree.end_of(siblings[place]))


def start(tree: Tree, at: At) -> At:
    """The end of the prompt."""
    return At(ROOT, at.tip)


def end(tree: Tree, at: At) -> At:
    """The end of the branch."""
    return At(at.tip, at.tip)


def goto(tree: Tree, at: At, name: str) -> At:
    """A node by its number or its bookmark. Raises InputError."""
    return to(tree, at, tree.named(name))


def to(tree: Tree, at: At, node: int) -> At:
    """A node, on this branch if that has it, else on the newest through it."""
    return At(node, at.tip if tree.is_on(node, at.tip) else tree.end_of(node))


def next_uncertain(tree: Tree, at: At, entropy: float) -> At:
    """The next token of the branch where the entropy was at least `entropy` nats."""
    ahead = range(tree.depths[at.cursor] + 2, tree.depths[at.tip] + 1)
    return _uncertain(tree, at, (tree.above(at.tip, depth) for depth in ahead), entropy, "after")


def previous_uncertain(tree: Tree, at: At, entropy: float) -> At:
    """The one before."""
    return _uncertain(tree, at, tree.upwards(at.cursor), entropy, "before")


def _uncertain(tree: Tree, at: At, nodes: Iterable[int], entropy: float, where: str) -> At:
    for node in nodes:
        if (tree.nodes[node].entropy or 0.0) >= entropy:
            return At(tree.nodes[node].parent, at.tip)
    unit = "nat" if entropy == 1.0 else "nats"
    note = f"no token {where} this one was chosen with an entropy of {entropy:g} {unit} or more"
    return At(at.cursor, at.tip, note)
