"""Why a token has the probability that it has after the processors: what removed it and how, or what changed it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from genctl.config.listed_knobs import PROCESSORS

if TYPE_CHECKING:
    from genctl.decode.processors.trace import Stage
    from genctl.params import Generation


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
