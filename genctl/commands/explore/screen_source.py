"""What the screen shows of a tree and its checkpoint, and of a second model or preset beside it."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from genctl.commands.explore.screen_worker import NodeLook
from genctl.config.listed_knobs import PROCESSORS
from genctl.engines.local.session import Session
from genctl.errors import GenctlError
from genctl.tree.beside import mirrored
from genctl.tree.distribution import Distribution
from genctl.tree.explorer import Explorer
from genctl.tree.nodes import Tree
from genctl.tree.results import Alternative
from genctl.tree.workspace import Workspace

if TYPE_CHECKING:
    from genctl.decode.processors.trace import Stage
    from genctl.params import Generation


# -- why a token has the probability that it has after the processors: what removed it and how, or what changed it -----


class Reasons:
    """The effects of processors on single tokens of one distribution."""

    def __init__(self, stages: Sequence[Stage], generation: Generation) -> None:
        self._stages, self._generation = stages, generation
        self._known: dict[int, _Effect] = {}

    def how(self, id: int) -> str:
        """`top_k 40 at 57`, `repetition_penalty × 1.2`; "" for a token that nothing singled out."""
        words: list[str] = []
        for place in range(len(self._stages)):
            effect = self._effect(place)
            name = self._stages[place].name
            if effect.removed[id]:
                return ", ".join([*words, self._removed(name, effect, id)])
            if effect.touched is not None and effect.touched[id]:
                words.append(self._changed(name))
        return ", ".join(words)

    def _effect(self, place: int) -> _Effect:
        if place not in self._known:
            self._known[place] = _Effect(self._stages[place])
        return self._known[place]

    def _removed(self, name: str, effect: _Effect, id: int) -> str:
        limit, measure = self._value(name), _measure(name)
        if measure == "mass":
            return f"{name} {limit} at {effect.mass_at(id):.2f}"
        if measure == "rank":
            return f"{name} {limit} at {effect.rank_of(id)}"
        if isinstance(getattr(self._generation, name, None), (int, float)):
            return f"{name} {limit} at {effect.probability(id):.2g}"
        return f"{name} {limit}".rstrip()

    def _changed(self, name: str) -> str:
        between = "× " if _measure(name) == "factor" else ""
        return f"{name} {between}{self._value(name)}".rstrip()

    def _value(self, name: str) -> str:
        value: Any = getattr(self._generation, name, None)
        return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else ""


def _measure(name: str) -> str:
    row = PROCESSORS.get(name)
    return row.measure if row is not None else ""


class _Effect:
    """What one processor did to each of V tokens."""

    def __init__(self, stage: Stage) -> None:
        self._before = stage.before[0].float().cpu().numpy().astype(np.float64)
        after = stage.after[0].float().cpu().numpy().astype(np.float64)
        least = float(np.finfo(np.float32).min)
        alive, then = self._before > least, after > least
        self.removed: NDArray[np.bool_] = alive & ~then
        both = then & alive
        delta = np.where(both, after - np.where(both, self._before, 0.0), 0.0)
        moved = delta != 0.0
        # what changes most tokens, such as a temperature, singles out none
        self.touched: NDArray[np.bool_] | None = moved if 0 < moved.sum() <= both.sum() / 2 else None
        self._probabilities: NDArray[np.float64] | None = None

    def _softmax(self) -> NDArray[np.float64]:
        if self._probabilities is None:
            raised = np.exp(self._before - self._before.max())
            self._probabilities = raised / raised.sum()
        return self._probabilities

    def probability(self, id: int) -> float:
        """Before the processor."""
        return float(self._softmax()[id])

    def mass_at(self, id: int) -> float:
        """Of the tokens that are more probable before the processor."""
        found = self._softmax()
        return min(math.fsum(found[found > found[id]]), 1.0)

    def rank_of(self, id: int) -> int:
        """Before the processor, from 1."""
        return int((self._before > self._before[id]).sum()) + 1


BEST = 4096  # nodes whose most probable token is kept


class ExplainedDistribution:
    """A distribution, with words for what the processors did."""

    def __init__(self, distribution: Distribution, reasons: Reasons) -> None:
        self._distribution, self._reasons = distribution, reasons

    def __len__(self) -> int:
        """V."""
        return len(self._distribution)

    @property
    def order(self) -> NDArray[Any]:
        """int [V], ids by the model's probability."""
        return self._distribution.order

    @property
    def entropy(self) -> float:
        """Of the model's distribution, in nats."""
        return self._distribution.entropy

    @cached_property
    def best(self) -> int:
        """The most probable token after the processors."""
        return int(self._distribution.processed.argmax())

    def of(self, id: int, /) -> Alternative:
        """One token."""
        return self._distribution.of(id)

    def rank(self, id: int, /) -> int:
        """By the model, from 1."""
        return self._distribution.rank(id)

    def how(self, id: int, /) -> str:
        """What removed a token or changed it."""
        return self._reasons.how(id)


class TreeSource:
    """A tree with the explorer that works on it; `other` is a second model, settings beside the tree's own, or both.

    Raises UsageError for a model whose tokens are others.
    """

    def __init__(
        self,
        explorer: Explorer,
        *,
        other_model: Session | None = None,
        other_settings: Mapping[str, Any] | None = None,
        names: tuple[str, str] | None = None,
    ) -> None:
        self.explorer = explorer
        self.names = names
        self._space = explorer.space
        self._other: Workspace | None = None
        self._entry: int | None = None  # of the tree's settings, for the second distribution
        if other_model is not None:
            self._other = mirrored(self._space, other_model)
        if other_settings is not None:
            self._other = self._other or self._space
            self._entry = self._other.aside({**explorer.tree.knobs, **other_settings})
        self._rest: Iterator[Any] = iter(())  # of the command that was cut short
        self._best: OrderedDict[tuple[int, int, bool], int] = OrderedDict()

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
        from genctl.config import presets
        from genctl.config.check import known

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
        settings = self.tree.view.settings
        first = self._shown(self._space, node, settings)
        other = None if self._other is None else self._shown(self._other, node, self._second(settings))
        shared, own = self._space.branches.shared(node)
        return NodeLook(node, settings, first, other, shared, own)

    def differs(self, node: int, /) -> bool:
        """Whether the two would write different tokens after a node."""
        if self._other is None:
            return False
        settings = self.tree.view.settings
        return self._best_of(self._space, node, settings) != self._best_of(self._other, node, self._second(settings))

    def vocabulary(self) -> Sequence[str]:
        """The text of every token, by id."""
        return [self._space.piece(id) for id in range(self._space.session.forward.vocab_size)]

    def _second(self, settings: int) -> int:
        return settings if self._entry is None else self._entry

    def _best_of(self, space: Workspace, node: int, settings: int) -> int:
        key = node, settings, space is self._space
        if key not in self._best:
            self._best[key] = int(_distribution(space, self.tree, node, settings).processed.argmax())
            while len(self._best) > BEST:
                self._best.popitem(last=False)
        return self._best[key]

    def _shown(self, space: Workspace, node: int, settings: int) -> ExplainedDistribution:
        found = _distribution(space, self.tree, node, settings)
        # sorted in the worker's thread: the screen only looks them up (40 ms for 150,000 tokens)
        _ = found.rank(0), found.entropy
        return ExplainedDistribution(found, Reasons(found.stages, space.resolved(settings).generation))


def _failing(error: GenctlError) -> Iterator[Any]:
    raise error
    yield


def _distribution(space: Workspace, tree: Tree, node: int, settings: int) -> Distribution:
    space.tree.view = tree.view
    return space.distribution(node, settings)
