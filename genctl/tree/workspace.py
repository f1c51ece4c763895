"""Checks of the tree of a chat against its checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from genctl.errors import InputError
from genctl.tree.nodes import Tree


def check_ids(tree: Tree, size: int, name: str) -> None:
    """Raises InputError for a token beyond the vocabulary."""
    places = [(f"prompt_ids.{place}", id) for place, id in enumerate(tree.opened.prompt_ids)]
    places += [(f"node {each.node}: id", each.id) for each in tree.nodes[1:]]
    for place, id in places:
        if not 0 <= id < size:
            raise InputError(f"{name} is damaged: {place}: {id} is none of the {size} ids of the checkpoint")


def has_texts(tree: Tree, size: int, piece: Callable[[int], str]) -> bool:
    """Whether tokens have the texts that the tree has of them; compared where one token is whole ASCII text."""
    for node in tree.nodes[1:]:
        if node.id >= size:
            return False
        text, here = node.text.strip(), piece(node.id).strip()
        if text and text.isascii() and here.isascii() and text != here:
            return False
    return True
