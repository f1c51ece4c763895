"""Large trees of a shape, as the lines of their files: no model is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from genctl.tree.saved import tree_of_lines
from genctl.tree.token_tree import SCHEMA, TokenTree

OPENED = {
    "event": "treeopened",
    "schema": SCHEMA,
    "model": "m",
    "checkpoint": "c",
    "prompt": "p",
    "prompt_ids": [1],
    "seed": 7,
}
Line = dict[str, Any]


def grown(node: int, parent: int, id: int, **more: Any) -> Line:
    return {"event": "tokennode", "node": node, "parent": parent, "id": id, "logprob": -0.5, "text": f" w{id}", **more}


def step(*inside: Line, line: str = "generate", **at: int) -> Iterator[Line]:
    yield {"event": "treestep", "line": line}
    yield from inside
    if at:
        yield {"event": "at", **at}


def chain(size: int) -> Iterator[Line]:
    """One long branch."""
    yield from step(*(grown(node, node - 1, node) for node in range(1, size + 1)), cursor=0, tip=size)


def teeth(size: int) -> Iterator[Line]:
    """A long branch with a side branch of one token at each of its nodes, the first of which is current."""
    nodes = [grown(1, 0, 0), grown(2, 0, 1)]
    for node in range(3, 2 * size + 1, 2):
        nodes += [grown(node, node - 2, 0), grown(node + 1, node - 2, 1)]
    yield from step(*nodes, cursor=0, tip=2)


def fork(size: int) -> Iterator[Line]:
    """Two long branches."""
    nodes = [grown(1, 0, 0), grown(2, 0, 1)]
    nodes += [grown(node, node - 2, node) for node in range(3, 2 * size + 1)]
    yield from step(*nodes, cursor=0, tip=2 * size)


def fan(size: int) -> Iterator[Line]:
    """Many short branches from one place."""
    yield from step(*(grown(node, 0, node) for node in range(1, size + 1)), cursor=0, tip=1)


def takes(size: int) -> Iterator[Line]:
    """Many steps of one token."""
    for node in range(1, size + 1):
        yield from step(grown(node, node - 1, node, start=node - 1))


SHAPES = {shape.__name__: shape for shape in (chain, fork, fan, takes)}


def content(lines: Iterator[Line] | list[Line], opened: Line = OPENED) -> list[bytes]:
    return [json.dumps(line).encode() + b"\n" for line in (opened, *lines)]


def tree(lines: Iterator[Line] | list[Line]) -> TokenTree:
    return tree_of_lines(content(lines), "tree", [])
