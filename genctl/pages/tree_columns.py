"""The search tree of a lane as columns of short numbers, which a page can carry by the ten thousand.

A node is one token. Node 0 is the prompt and has no entry; entry i - 1 of each column belongs to node i.
Log-probabilities and entropies are whole numbers of 1/SCALE nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from genctl.events import Token
from genctl.pages.search_tree import Node, SearchTree

SCALE = 10_000
LETTERS = {"inner": "i", "returned": "r", "finished": "f", "died": "d", "left": "l", "live": "v"}


@dataclass(frozen=True)
class TreeDetail:
    """How much of a tree is on the page. `alternatives`, `numbers` (rank and entropy): of all tokens, of those of
    returned sequences, or of none. Without `dead` only what leads to a sequence is left.
    """

    alternatives: str = "all"  # all | returned | none
    numbers: str = "all"
    dead: bool = True


class Vocabulary:
    """Numbers for the (id, text) pairs of a page, so that each text is on it once."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, str], int] = {}

    def number(self, id: int, text: str) -> int:
        """The number of a token, which is new or was met before."""
        return self.entries.setdefault((id, text), len(self.entries))

    def listed(self) -> list[list[Any]]:
        """`[id, text]` of each number."""
        return [[id, text] for id, text in self.entries]


def columns(tree: SearchTree, vocabulary: Vocabulary, detail: TreeDetail) -> dict[str, Any]:
    """The tree of a lane. Columns without any value are left out.

    `up`: how many entries before a node its parent stands · `token`: its number in the vocabulary, -1 for a row that
    ended without a token · `logprob` · `extra`: what processors and penalties added to the total in this step ·
    `step`, where it is not the depth · `state`: a letter (LETTERS) each · `rank`, `entropy` · by node number: `note`,
    `top` (token, log-probability, token, …), `trace`, `watched` · `ends`: the hypotheses, with the node at which each
    ends.
    """
    on_path = _paths(node for node in tree.nodes if node.place is not None)
    kept = tree.nodes[1:]
    if not detail.dead:
        wanted = _paths(node for node in tree.nodes if node.hypothesis is not None) or on_path
        kept = [node for node in kept if node in wanted]
    numbers = {tree.root: 0} | {node: place for place, node in enumerate(kept, 1)}
    written: list[Token] = [node.token or Token(-1, 0.0) for node in kept]

    def chosen(which: str, node: Node) -> bool:
        return which == "all" or (which == "returned" and node in on_path)

    columns: dict[str, Any] = {
        "up": [numbers[node] - numbers[_parent(node)] for node in kept],
        "token": [-1 if node.token is None else vocabulary.number(node.token.id, node.token.text) for node in kept],
        "logprob": [scaled(token.logprob) for token in written],
        "extra": _extra(kept),
        "state": "".join(LETTERS[node.state] for node in kept),
    }
    depths = tree.depths()
    if any(node.step != depths[node] - 1 for node in kept):
        columns["step"] = [node.step for node in kept]
    for name, value in _NUMBERS.items():
        column = [
            value(token) if chosen(detail.numbers, node) else 0 for node, token in zip(kept, written, strict=True)
        ]
        if any(column):
            columns[name] = column
    for name, entry in _PARTS.items():
        of_node = {
            numbers[node]: entry(token, vocabulary)
            for node, token in zip(kept, written, strict=True)
            if chosen(detail.alternatives, node) and getattr(token, name)
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
    """Nats in whole 1/SCALE; None where there is no finite number."""
    return None if value is None or not math.isfinite(value) else round(value * SCALE)


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
    """What each total has beyond its parent's and the log-probability of the token."""
    extra = []
    totals: dict[Node, float] = {}
    for node in nodes:
        before = totals.get(_parent(node), 0.0)
        own = 0.0 if node.token is None else node.token.logprob
        total = before + own if node.total is None or not math.isfinite(node.total) else node.total
        totals[node] = total
        added = scaled(total - before - own) or 0
        extra.append(0 if abs(added) <= 1 else added)  # float32 sums
    return extra


def _top(token: Token, vocabulary: Vocabulary) -> list[Any]:
    return [number for id, text, value in token.top for number in (vocabulary.number(id, text), scaled(value))]


def _trace(token: Token, vocabulary: Vocabulary) -> list[Any]:
    return [
        [act.processor, act.removed, round(act.moved, 4), int(act.changed), round(act.before, 6), round(act.after, 6)]
        for act in token.trace
    ]


def _watched(token: Token, vocabulary: Vocabulary) -> list[Any]:
    return [
        cell for id, text, value, rank in token.watched for cell in (vocabulary.number(id, text), scaled(value), rank)
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
        "total": scaled(hypothesis.total),
        "logprob": scaled(hypothesis.logprob),
        "score": scaled(hypothesis.score),
    }
    optional = {
        "place": node.place,
        "cause": hypothesis.cause,
        "unmet": list(hypothesis.unmet),
        "incomplete": hypothesis.incomplete,
    }
    return end | {name: value for name, value in optional.items() if value}
