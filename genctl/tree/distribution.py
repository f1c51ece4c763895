"""The distribution after a node over the whole vocabulary: the model's, and what each processor made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from genctl.config.listed_knobs import PROCESSORS
from genctl.decode.processors import trace
from genctl.decode.processors.trace import Stage
from genctl.events import Trace
from genctl.kernels.ops import log_softmax
from genctl.params import Generation
from genctl.tree.results import Alternative, Effect

TOP = 20  # alternatives that are listed where nobody says how many


class Distribution:
    """The distribution of the token after a node, over V tokens."""

    def __init__(
        self,
        node: int,
        logits: torch.Tensor,  # f32 [V], the model's
        scores: torch.Tensor,  # f32 [1, V], after the processors
        stages: Sequence[Stage],
        piece: Callable[[int], str],
        generation: Generation,
    ) -> None:
        self.node, self.stages, self._piece = node, stages, piece
        self._reasons = Reasons(stages, generation)
        self.logprobs: NDArray[np.float32] = log_softmax(logits[None])[0].cpu().numpy()
        self.processed: NDArray[np.float32] = self.logprobs
        if stages:
            self.processed = processed_logprobs(scores[0]).float().cpu().numpy()

    @property
    def is_dead(self) -> bool:
        """Whether the processors left no token: nothing can follow."""
        return bool((self.processed == -np.inf).all())

    def __len__(self) -> int:
        """V."""
        return len(self.logprobs)

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """The ids by the model's probability, the most probable first; equal ones by id."""
        return np.argsort(-self.logprobs, kind="stable")

    @cached_property
    def _ranks(self) -> NDArray[np.int64]:
        ranks = np.empty(len(self), np.int64)
        ranks[self.order] = np.arange(1, len(self) + 1)
        return ranks

    @cached_property
    def entropy(self) -> float:
        """Of the model's distribution, in nats."""
        return _entropy(self.logprobs)

    def mass(self, count: int) -> float:
        """The model's probability of the `count` most probable tokens together."""
        return float(np.exp(self.logprobs[self.order[:count]].astype(np.float64)).sum())

    def rank(self, id: int) -> int:
        """The place of a token by the model's probability, from 1."""
        return int(self._ranks[id])

    def of(self, id: int) -> Alternative:
        """One token."""
        return Alternative(
            id, self._piece(id), self.rank(id), float(self.logprobs[id]), float(self.processed[id]), self._remover(id)
        )

    def at(self, rank: int) -> Alternative:
        """The token of a rank, from 1 to V."""
        return self.of(int(self.order[rank - 1]))

    def top(self, count: int = TOP, begin: int = 0) -> list[Alternative]:
        """`count` tokens from rank `begin` + 1 on."""
        return [self.of(int(id)) for id in self.order[begin : begin + count]]

    def containing(self, text: str) -> Iterator[Alternative]:
        """The tokens whose text has `text` in it, the most probable first."""
        wanted = text.casefold()
        return (self.of(int(id)) for id in self.order if wanted in self._piece(int(id)).casefold())

    @cached_property
    def best(self) -> int:
        """The most probable token after the processors."""
        return int(self.processed.argmax())

    def how(self, id: int) -> str:
        """What removed a token or changed it, in a few words; "" for nothing."""
        return self._reasons.how(id)

    @cached_property
    def effects(self) -> tuple[Effect, ...]:
        """What each processor did, in their order."""
        return tuple(Effect(one.processor, one.removed, one.moved) for one in self.why(int(self.order[0])))

    def why(self, id: int) -> tuple[Trace, ...]:
        """What each processor did to one token, in their order."""
        row = torch.zeros(1, dtype=torch.long)
        stages = [Stage(one.name, one.before.cpu(), one.after.cpu()) for one in self.stages]
        return trace.traces(stages, row, torch.tensor([id]))[0]

    def _remover(self, id: int) -> str:
        if self.processed[id] > -np.inf:
            return ""
        for stage in self.stages:
            if not float(stage.after[0, id]) > torch.finfo(stage.after.dtype).min:
                return stage.name
        return ""


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


def processed_logprobs(scores: torch.Tensor) -> torch.Tensor:
    """Log-probabilities f64 [V] of scores [V] after processors; -inf: removed, which all tokens may be."""
    alive = scores > torch.finfo(scores.dtype).min
    kept = scores.double().masked_fill(~alive, -torch.inf)
    return kept.log_softmax(-1) if bool(alive.any()) else kept


def _entropy(logprobs: NDArray[np.float32]) -> float:
    kept = logprobs[logprobs > -np.inf].astype(np.float64)
    return float(-(np.exp(kept) * kept).sum()) + 0.0
