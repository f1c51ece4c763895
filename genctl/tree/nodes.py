"""The tree: nodes are token ids; a place in it, branches, bookmarks, undo and redo. Plain values, no model.

Every operation costs what it changes, or the length of one branch; none walks over all nodes. Nodes are never removed:
undo hides them. A token that is written again after the same tokens is the same node.

What is above what is found by skips: each node has one to a node further up, so that a way of n nodes takes log n
(Myers 1983, "An applicative random-access stack").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from genctl.errors import InputError
from genctl.tree.changes import Begun, Change, Grown, Knobs, Opened, Reached, Redone, Settled, Undone

ROOT = 0
CHAT = ("say ", "answer ", "message ")  # how lines of a chat begin, one of which each has
Node: TypeAlias = Grown


@dataclass(frozen=True, slots=True)
class TreeView:
    """What undo restores besides the nodes that are shown."""

    cursor: int = ROOT  # commands act on what follows this node
    tip: int = ROOT  # the end of the current branch, which the cursor is on
    settings: int = 0
    bookmarks: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """A command that can be undone: the view before it and after it, and the nodes that it shows."""

    line: str
    before: TreeView
    after: TreeView
    shown: list[int]
    runs: int = 0  # generations before it
    tool: str = ""  # `Begun.tool`
    end: int = ROOT  # the tip when it was done, wherever the branch went later


class Tree:
    """A tree of tokens. It changes by `apply` alone, so that the same changes give the same tree."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.nodes: list[Node] = [Grown(ROOT, -1, -1, 0.0)]  # by number; the root is not a token
        self.joints: list[float] = [0.0]  # log-probability of all tokens from the root to the node
        self.depths: list[int] = [0]  # tokens after the prompt
        self._skips: list[int] = [ROOT]  # a node further up, by number
        self.settings: list[dict[str, Any]] = [{}]  # the knobs of each entry, above those the tree began with
        self.view = TreeView()
        self.hidden: set[int] = set()
        self.leaves: dict[int, None] = {ROOT: None}  # shown nodes without shown children, in no order of meaning
        self.steps: list[Step] = []  # to be undone
        self.undone: list[Step] = []  # to be redone
        self.command: Begun | None = None  # begun and not settled
        self.runs = 0  # generations that were begun, undone ones included
        self._children: list[list[int]] = [[]]  # hidden ones included
        self._shown_children: list[int] = [0]
        self._places: dict[tuple[int, int], int] = {}  # (parent, id) -> node
        self._ends: dict[int, int] = {}  # of the newest branch through a node, where it was asked for
        self._entries: dict[str, int] = {_key({}): 0}  # knobs -> their first place in the table of settings

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and self._state() == other._state()

    __hash__ = None  # type: ignore[assignment]

    def _state(self) -> tuple[Any, ...]:
        return (
            self.opened, self.nodes, self.settings, self.view, self.hidden, self.leaves.keys(), self.steps,
            self.undone, self.command, self.runs,
        )  # fmt: skip

    # -- what is there -------------------------------------------------------------------------------------------------

    @property
    def cursor(self) -> int:
        """The node after which everything happens."""
        return self.view.cursor

    @property
    def tip(self) -> int:
        """The end of the current branch."""
        return self.view.tip

    @property
    def is_chat(self) -> bool:
        """Whether `genctl chat` has begun the tree: then its steps are not commands of `genctl explore`."""
        return any(not step.tool and step.line.startswith(CHAT) for step in (*self.steps, *self.undone))

    @property
    def bookmarks(self) -> Mapping[str, int]:
        """Named nodes."""
        return self.view.bookmarks

    @property
    def knobs(self) -> dict[str, Any]:
        """The current settings, above those that the tree began with."""
        return self.settings[self.view.settings]

    def __len__(self) -> int:
        """The number of shown tokens."""
        return len(self.nodes) - 1 - len(self.hidden)

    def is_shown(self, node: int) -> bool:
        """Whether the node exists and was not undone."""
        return 0 <= node < len(self.nodes) and node not in self.hidden

    def children(self, node: int) -> list[int]:
        """The shown nodes after a node, oldest first."""
        return [child for child in self._children[node] if child not in self.hidden]

    def find(self, node: int, id: int) -> int | None:
        """The node of a token after a node, undone or not."""
        return self._places.get((node, id))

    def child(self, node: int, id: int) -> int | None:
        """The node of a token after a node, if it is shown."""
        found = self._places.get((node, id))
        return None if found is None or found in self.hidden else found

    def path(self, node: int, above: int = ROOT) -> list[int]:
        """The nodes after `above` down to `node`. Without `above` all, but for the root."""
        if not self.is_on(above, node):
            raise InputError(f"node {above} is not above the other one")
        return list(self.upwards(node, above))[::-1]

    def upwards(self, node: int, above: int = ROOT) -> Iterator[int]:
        """The nodes from `node` up to `above`, which is left out."""
        while node != above:
            yield node
            node = self.nodes[node].parent

    def ids(self, node: int) -> tuple[int, ...]:
        """The prompt's tokens and those down to `node`."""
        return (*self.opened.prompt_ids, *(self.nodes[each].id for each in self.path(node)))

    def length(self, node: int) -> int:
        """The number of tokens down to `node`, the prompt's included."""
        return len(self.opened.prompt_ids) + self.depths[node]

    def branch(self) -> list[int]:
        """The nodes of the current branch, down to the tip."""
        return self.path(self.tip)

    def under(self) -> int | None:
        """The token under the cursor: the next one of the current branch; None at its end."""
        return None if self.cursor == self.tip else self.above(self.tip, self.depths[self.cursor] + 1)

    def above(self, node: int, depth: int) -> int:
        """The node `depth` tokens after the prompt on the branch down to `node`, which is no higher itself."""
        while self.depths[node] > depth:
            skip = self._skips[node]
            node = skip if self.depths[skip] >= depth else self.nodes[node].parent
        return node

    def is_on(self, node: int, end: int) -> bool:
        """Whether a node is on the branch down to `end`, its end included."""
        return self.above(end, self.depths[node]) == node

    def end_of(self, node: int) -> int:
        """The end of the newest branch through `node`, which is known until a node is shown or hidden."""
        if node not in self._ends:
            end = node
            while self._shown_children[end]:
                end = next(child for child in reversed(self._children[end]) if child not in self.hidden)
            self._ends[node] = end
        return self._ends[node]

    def fork_of(self, a: int, b: int) -> int:
        """The last node that two branches share."""
        depth = min(self.depths[a], self.depths[b])
        a, b = self.above(a, depth), self.above(b, depth)
        while a != b:  # skips from one depth lead to one depth
            one, two = self._skips[a], self._skips[b]
            a, b = (one, two) if one != two else (self.nodes[a].parent, self.nodes[b].parent)
        return a

    def entry_of(self, knobs: Mapping[str, Any]) -> int | None:
        """The place of knobs in the table of settings; None where they are not in it."""
        return self._entries.get(_key(knobs))

    def subtree(self, node: int = ROOT) -> Iterator[int]:
        """The shown nodes from `node` on, parents first, one branch after another."""
        stack = [node]
        while stack:
            yield (here := stack.pop())
            stack += reversed(self.children(here))

    def named(self, name: str) -> int:
        """The node of a bookmark or of a number. Raises InputError."""
        if name in self.bookmarks:
            return self.bookmarks[name]
        if name.isascii() and name.isdigit() and len(name) < 18 and self.is_shown(int(name)):
            return int(name)
        marks = ", ".join(self.bookmarks) or "there are none yet"
        raise InputError(f"{name!r:.60} is no bookmark ({marks}) and no node from 0 to {len(self.nodes) - 1}")

    # -- changes -------------------------------------------------------------------------------------------------------

    def take_back(self, changes: Sequence[Change]) -> None:
        """Remove the last step, which is not settled and consists of `changes`, as if it had never begun."""
        step = self.steps.pop()
        for node in reversed(step.shown):
            self.hidden.add(node)
            self._count(node, -1)
        for change in reversed(changes):
            if isinstance(change, Knobs):
                self.settings.pop()
                if self._entries.get(_key(change.values)) == len(self.settings):
                    del self._entries[_key(change.values)]
            elif isinstance(change, Grown):
                self.nodes.pop()
                self.joints.pop()
                self.depths.pop()
                self._skips.pop()
                self._children.pop()
                self._shown_children.pop()
                self._children[change.parent].pop()  # the newest
                del self._places[change.parent, change.id]
                self.hidden.discard(change.node)
                self.leaves.pop(change.node, None)
        self.view, self.runs, self.command = step.before, step.runs, None

    def apply(self, change: Change) -> None:
        """Take in one change. Raises InputError for one that cannot follow those before it."""
        if isinstance(change, Grown):
            self._grow(change)
        elif isinstance(change, Reached):
            self._reach(change.node)
            self._place(change.node)
        elif isinstance(change, Begun):
            self._begin(change)
        elif isinstance(change, Settled):
            self._settle(change)
        elif isinstance(change, Knobs):
            self._entries.setdefault(_key(change.values), len(self.settings))
            self.settings.append(change.values)
        elif isinstance(change, Undone):
            self._undo()
        elif isinstance(change, Redone):
            self._redo()
        else:
            raise InputError("a tree has one beginning")

    def _check(self, node: int) -> None:
        if not 0 <= node < len(self.nodes):
            raise InputError(f"node {node} is not there: the tree has {len(self.nodes)}")

    def _check_shown(self, node: int, what: str) -> None:
        self._check(node)
        if node in self.hidden:
            raise InputError(f"{what} is node {node}, which is undone")

    def _begin(self, command: Begun) -> None:
        self.command = command
        if command.step:
            self.steps.append(Step(command.line, self.view, self.view, [], self.runs, command.tool, self.view.tip))
            self.undone = []
        self.runs = max(self.runs, command.run)

    def _reach(self, node: int) -> None:
        self._check(node)
        if self.nodes[node].parent in self.hidden:
            raise InputError(f"node {node} continues node {self.nodes[node].parent}, which is undone")
        if node in self.hidden and (self.command is None or not self.command.step):
            raise InputError(f"node {node} is shown again outside of a step")
        self._show(node)

    def _grow(self, node: Node) -> None:
        self._check(node.parent)
        if self.command is None or not self.command.step:
            raise InputError(f"node {node.node} is outside of a step")
        if node.node != len(self.nodes):
            raise InputError(f"node {node.node} follows node {len(self.nodes) - 1}")
        if (node.parent, node.id) in self._places:
            raise InputError(f"node {node.node} is there already: node {self._places[node.parent, node.id]}")
        if not 0 <= node.settings < len(self.settings):
            raise InputError(f"node {node.node} has settings {node.settings}, and there are {len(self.settings)}")
        self._check(node.start)
        if not self.is_on(node.start, node.parent):
            raise InputError(f"node {node.node} began at node {node.start}, which is not above it")
        if node.parent in self.hidden:
            raise InputError(f"node {node.node} continues node {node.parent}, which is undone")
        self.nodes.append(node)
        self.joints.append(self.joints[node.parent] + node.logprob)
        self.depths.append(self.depths[node.parent] + 1)
        self._skips.append(skip_from(node.parent, self.depths, self._skips))
        self._children.append([])
        self._shown_children.append(0)
        self._children[node.parent].append(node.node)
        self._places[node.parent, node.id] = node.node
        self.hidden.add(node.node)
        self._show(node.node)
        self._place(node.node)

    def _place(self, node: int) -> None:
        """The branch ends here, and the cursor is at its end: what a command leaves behind if it is cut short."""
        self.view = replace(self.view, cursor=node, tip=node)
        self._keep_view()

    def _keep_view(self) -> None:
        if self.command is not None and self.command.step:
            self.steps[-1].after, self.steps[-1].end = self.view, self.view.tip

    def _settle(self, done: Settled) -> None:
        changed: dict[str, Any] = {
            name: value
            for name in ("cursor", "tip", "settings", "bookmarks")
            if (value := getattr(done, name)) is not None
        }
        view = replace(self.view, **changed)
        for what, node in (("the cursor", view.cursor), ("the tip", view.tip)):
            self._check_shown(node, what)
        if not self.is_on(view.cursor, view.tip):
            raise InputError(f"the cursor, node {view.cursor}, is not on the branch of the tip, node {view.tip}")
        for name, node in changed.get("bookmarks", {}).items():
            self._check_shown(node, f"the bookmark {name!r:.40}")
        if not 0 <= view.settings < len(self.settings):
            raise InputError(f"there are no settings {view.settings}: the table has {len(self.settings)}")
        self.view = view
        self._keep_view()
        self.command = None

    def _show(self, node: int) -> None:
        if node not in self.hidden:
            return
        self.hidden.discard(node)
        self._count(node, 1)
        if self.command is not None and self.command.step:
            self.steps[-1].shown.append(node)

    def _count(self, node: int, more: int) -> None:
        """Keep the leaves right after a node was shown (1) or hidden (-1)."""
        parent = self.nodes[node].parent
        self._ends.clear()
        self._shown_children[parent] += more
        for each in (parent, node):
            if each not in self.hidden and not self._shown_children[each]:
                self.leaves[each] = None
            else:
                self.leaves.pop(each, None)

    def _undo(self) -> None:
        if not self.steps:
            raise InputError("nothing is left to undo")
        step = self.steps.pop()
        step.after = self.view
        for node in reversed(step.shown):
            self.hidden.add(node)
            self._count(node, -1)
        self.view = step.before
        self.undone.append(step)
        self.command = None

    def _redo(self) -> None:
        if not self.undone:
            raise InputError("nothing is left to redo")
        step = self.undone.pop()
        step.before = self.view
        for node in step.shown:
            self.hidden.discard(node)
            self._count(node, 1)
        self.view = step.after
        self.steps.append(step)
        self.command = None


def skip_from(parent: int, depths: Sequence[int], skips: Sequence[int]) -> int:
    """Where a child of `parent` skips to: over both skips before it if they are equally long, else to `parent`."""
    first = skips[parent]
    second = skips[first]
    return second if depths[parent] - depths[first] == depths[first] - depths[second] else parent


def _key(knobs: Mapping[str, Any]) -> str:
    return json.dumps(knobs, sort_keys=True)
