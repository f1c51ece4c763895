"""A tree of tokens: the continuations tried after a prompt, and the cursor. Plain values, no model.

Nodes are numbered in the order in which they were written; 0 is the root, which stands for the prompt. Undo removes
the nodes of the last command, which are the newest. Writing a token again after the same tokens gives the same node.
A tree is the fold of its changes, which are the lines of its file (`saved`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from genctl.config.settings import SavedLayer
from genctl.config.shapes import Natural
from genctl.errors import InputError
from genctl.events import Amount, Id, Logprob, Rank, Seed

SCHEMA = "genctl-tree/2"
ROOT = 0

# Where a token comes from: the decode loop, an alternative that a person chose, a typed text, an expansion.
By: TypeAlias = Literal["generate", "take", "edit", "expand"]


@dataclass(frozen=True, slots=True)
class TreeOpened:
    """The first line of a file: the prompt, the checkpoint and the settings that the tree began with."""

    schema: str
    model: str  # as the user named it
    checkpoint: str  # `LoadedModel.fingerprint`
    prompt: str
    prompt_ids: tuple[Id, ...]
    seed: Seed  # of the tree; the seed of each generation is derived from it
    layers: tuple[SavedLayer, ...] = ()  # settings of generation, lowest first
    shown: str = ""  # the prompt as people read it, where it is a conversation


@dataclass(frozen=True, slots=True)
class TreeStep:
    """Begins a command that undo can take back. The nodes up to the next step belong to it."""

    line: str
    runs: Natural = 0  # generations begun in the tree so far, including this command's
    settings: dict[str, Any] | None = None  # from now on, on top of the tree's first ones; None: unchanged


@dataclass(frozen=True, slots=True)
class TokenNode:
    """A token."""

    node: Natural  # its number, from 1
    parent: Natural
    id: Id
    logprob: Logprob  # the model's own, in nats
    text: str = ""  # the whole characters that it completes after the tokens before it
    rank: Rank | None = None  # by the model's probability, from 1
    entropy: Amount | None = None  # of the model's distribution from which it was chosen, in nats
    seed: Seed | None = None  # None: not sampled
    start: Natural = 0  # the node where its command began
    by: By = "generate"


@dataclass(frozen=True, slots=True)
class At:
    """The cursor: commands act after node `cursor`, which is on the branch that ends at `tip`."""

    cursor: Natural
    tip: Natural
    note: str = ""  # why it did not move


@dataclass(frozen=True, slots=True)
class StepUndone:
    """The last step was undone."""


Change: TypeAlias = TreeOpened | TreeStep | TokenNode | At | StepUndone
KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in (TreeOpened, TreeStep, TokenNode, At, StepUndone)}


class Before(NamedTuple):
    """What undo restores."""

    line: str  # of the step
    size: int  # the number of nodes before it
    at: At
    settings: dict[str, Any]


class TokenTree:
    """A tree. Only `apply` changes it."""

    def __init__(self, opened: TreeOpened) -> None:
        self.opened = opened
        self.nodes = [TokenNode(ROOT, 0, -1, 0.0)]  # by number; the root is not a token
        self.joints = [0.0]  # log-probability of all tokens down to the node
        self.depths = [0]  # tokens after the prompt
        self.at = At(ROOT, ROOT)
        self.settings: dict[str, Any] = {}  # on top of those it began with; replaced, never mutated
        self.steps: list[Before] = []
        self.runs = 0  # generations begun, including undone ones
        self._children: list[dict[int, int]] = [{}]  # of each node: token id -> node, oldest first

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.nodes) - 1

    @property
    def cursor(self) -> int:
        """The node after which commands act."""
        return self.at.cursor

    @property
    def tip(self) -> int:
        """The end of the current branch."""
        return self.at.tip

    @property
    def leaves(self) -> dict[int, None]:
        """The ends of all branches."""
        return {node: None for node, children in enumerate(self._children) if not children}

    def children(self, node: int) -> list[int]:
        """The nodes after a node, oldest first."""
        return list(self._children[node].values())

    def child(self, node: int, id: int) -> int | None:
        """The child of a node with this token id, if there is one."""
        return self._children[node].get(id)

    def path(self, node: int, above: int = ROOT) -> list[int]:
        """The nodes after `above` down to `node`."""
        found = []
        while node != above:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def ids(self, node: int) -> tuple[int, ...]:
        """The prompt's tokens and those down to `node`."""
        return (*self.opened.prompt_ids, *(self.nodes[each].id for each in self.path(node)))

    def above(self, node: int, depth: int) -> int:
        """The ancestor of `node` that is `depth` tokens after the prompt; `node` itself if it is no deeper."""
        while self.depths[node] > depth:
            node = self.nodes[node].parent
        return node

    def is_on(self, node: int, end: int) -> bool:
        """Whether a node is on the branch down to `end`, or `end` itself."""
        return self.above(end, self.depths[node]) == node

    def under(self, at: At | None = None) -> int | None:
        """The node under the cursor: the next one on the branch; None at its end."""
        at = at or self.at
        return None if at.cursor == at.tip else self.above(at.tip, self.depths[at.cursor] + 1)

    def end_of(self, node: int) -> int:
        """The end of the newest branch through a node."""
        while self._children[node]:
            node = next(reversed(self._children[node].values()))
        return node

    # -- changes -------------------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        """Apply one change. Raises InputError for one that does not fit the earlier ones."""
        if isinstance(change, TokenNode):
            self._add(change)
        elif isinstance(change, At):
            self._move(change)
        elif isinstance(change, TreeStep):
            self.steps.append(Before(change.line, len(self.nodes), self.at, self.settings))
            self.runs = max(self.runs, change.runs)
            self.settings = self.settings if change.settings is None else change.settings
        elif isinstance(change, StepUndone):
            self._undo()
        else:
            raise InputError("a tree has one beginning")

    def _add(self, node: TokenNode) -> None:
        if node.node != len(self.nodes) or not self.steps:
            where = f"follows node {len(self.nodes) - 1}" if self.steps else "is outside of a step"
            raise InputError(f"node {node.node} {where}")
        if node.parent >= node.node or node.id in self._children[node.parent]:
            raise InputError(f"node {node.node} cannot stand after node {node.parent}")
        self.nodes.append(node)
        self.joints.append(self.joints[node.parent] + node.logprob)
        self.depths.append(self.depths[node.parent] + 1)
        self._children.append({})
        self._children[node.parent][node.id] = node.node
        self.at = At(node.node, node.node)  # where a command that is killed here leaves the cursor

    def _move(self, at: At) -> None:
        if not max(at.cursor, at.tip) < len(self.nodes) or not self.is_on(at.cursor, at.tip):
            raise InputError(f"the cursor, node {at.cursor}, is not on the branch of the tip, node {at.tip}")
        self.at = At(at.cursor, at.tip)

    def _undo(self) -> None:
        if not self.steps:
            raise InputError("nothing is left to undo")
        _, size, self.at, self.settings = self.steps.pop()
        for node in reversed(self.nodes[size:]):
            del self._children[node.parent][node.id]
        for column in (self.nodes, self.joints, self.depths, self._children):
            del column[size:]


# -- moves: from one place to another; commands use them for the tree's cursor, keys for the screen's ------------------


def left(tree: TokenTree, at: At, n: int) -> At:
    """`n` tokens back on the branch."""
    node = tree.above(at.cursor, max(tree.depths[at.cursor] - n, 0))
    return At(node, at.tip, "" if node != at.cursor else "this is the beginning")


def right(tree: TokenTree, at: At, n: int) -> At:
    """`n` tokens forward on the branch."""
    node = tree.above(at.tip, tree.depths[at.cursor] + n)
    return At(node, at.tip, "" if node != at.cursor else "this is the end of the branch")


def up(tree: TokenTree, at: At) -> At:
    """The previous one of the branches that fork at the cursor."""
    return _sibling(tree, at, -1)


def down(tree: TokenTree, at: At) -> At:
    """The next one of the branches that fork at the cursor."""
    return _sibling(tree, at, 1)


def _sibling(tree: TokenTree, at: At, by: int) -> At:
    siblings, under = tree.children(at.cursor), tree.under(at)
    if under is None or len(siblings) < 2:
        return At(at.cursor, at.tip, "no branches part here")
    return At(at.cursor, tree.end_of(siblings[(siblings.index(under) + by) % len(siblings)]))


def start(tree: TokenTree, at: At) -> At:
    """The end of the prompt."""
    return At(ROOT, at.tip)


def end(tree: TokenTree, at: At) -> At:
    """The end of the branch."""
    return At(at.tip, at.tip)


def goto(tree: TokenTree, at: At, node: int) -> At:
    """Go to a node, on this branch if it has the node, else on the newest one through it. Raises InputError."""
    if node >= len(tree.nodes):
        raise InputError(f"there is no node {node}: the nodes are 0 to {len(tree)}")
    return At(node, at.tip if tree.is_on(node, at.tip) else tree.end_of(node))
