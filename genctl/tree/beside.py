"""Two distributions on one tree: of a second model, or of other settings, and where the two part."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from genctl.engines.session import Session
from genctl.errors import UsageError
from genctl.tree.distribution import Distribution
from genctl.tree.results import Beside
from genctl.tree.workspace import Workspace


class Second:
    """What is beside the tree's own distribution: a model, settings on top of the tree's, or both.

    Raises UsageError for a model whose tokens are others, PresetError for settings that cannot be.
    """

    def __init__(
        self, space: Workspace, *, session: Session | None = None, knobs: Mapping[str, Any] | None = None
    ) -> None:
        self.space = space
        self.other = space if session is None else mirrored(space, session)
        self.settings = None if knobs is None else self.other.aside({**space.tree.knobs, **knobs})

    def distribution(self, node: int) -> Distribution:
        """The second distribution of the token after a node."""
        self.other.tree.view = self.space.tree.view
        return self.other.distribution(node, self.space.tree.view.settings if self.settings is None else self.settings)

    def along(self, node: int) -> Iterator[Beside]:
        """Both distributions at each token of the branch down to `node`, and after it."""
        tree = self.space.tree
        path = tree.path(node)
        for before, after in zip([0, *path], [*path, None], strict=True):
            id = None if after is None else tree.nodes[after].id
            yield self._at(before, id)

    def _at(self, node: int, id: int | None) -> Beside:
        one, two = self.space.distribution(node), self.distribution(node)
        best = one.best, two.best
        moved = float(0.5 * np.abs(np.exp(one.processed) - np.exp(two.processed)).sum())
        return Beside(
            node,
            None if id is None else (one.of(id), two.of(id)),
            (one.of(best[0]), two.of(best[1])),
            min(moved, 1.0),
            best[0] != best[1],
        )

    def total(self, node: int, start: int) -> tuple[float, int | None]:
        """The log-probability of the tokens after `start` by the second distribution, and where the two first part.

        The place counts tokens from `start`; None: they would always write the same token.
        """
        path = self.space.tree.path(node, start)
        total, parts = 0.0, None
        for place, (before, after) in enumerate(zip([start, *path[:-1]], path, strict=True)):
            two = self.distribution(before)
            total += float(two.processed[self.space.tree.nodes[after].id])
            if parts is None and self.space.distribution(before).best != two.best:
                parts = place
        return total, parts


def mirrored(space: Workspace, session: Session) -> Workspace:
    """The same nodes, read by another model. Raises UsageError if its tokens are others."""
    one, two = space.session, session
    if one.forward.vocab_size != two.forward.vocab_size or _tokens(one) != _tokens(two):
        raise UsageError(
            f"{one.about.name} and {two.about.name} do not have the same tokens, so they cannot share a tree",
            hint="genctl compare shows models with different tokenizers side by side",
        )
    mirror = copy.copy(space.tree)  # its lists and tables are those of the tree
    mirror.opened = replace(mirror.opened, model=two.about.name, checkpoint=two.loaded.fingerprint())
    return Workspace(two, mirror, file=space.file)


def _tokens(session: Session) -> dict[str, int]:
    tokenizer = session.loaded.tokenizer
    return {} if tokenizer is None else dict(tokenizer.get_vocab())
