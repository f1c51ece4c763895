"""The distribution of the next token over the whole vocabulary: the model's, and after each processor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

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
        *,
        after_eos: bool = False,  # whether the text has ended before
    ) -> None:
        self.node, self.stages, self._piece, self._generation = node, stages, piece, generation
        self.after_eos = after_eos
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
        possible = self.logprobs[self.logprobs > -np.inf].astype(np.float64)
        return float(-(np.exp(possible) * possible).sum()) + 0.0

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
        """What removed a token and how, or changed it alone: `top_k 40 at 57`, `repetition_penalty × 1.2`; or ""."""
        words: list[str] = []
        for stage, change in zip(self.stages, self._changes, strict=True):
            value: Any = getattr(self._generation, stage.name, None)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            limit = f" {value:g}" if is_number else ""
            row = PROCESSORS.get(stage.name)
            measure = "" if row is None else row.measure
            if change.removed[id]:
                own = change.probabilities[id]
                better = change.probabilities[change.probabilities > own]
                at = {"mass": f"{min(math.fsum(better), 1.0):.2f}", "rank": f"{len(better) + 1}"}
                place = f" at {at.get(measure, f'{own:.2g}')}" if is_number else ""
                return ", ".join([*words, f"{stage.name}{limit}{place}"])
            if change.singled_out[id]:
                words.append(f"{stage.name}{' ×' if measure == 'factor' else ''}{limit}")
        return ", ".join(words)

    @cached_property
    def _changes(self) -> list[StageChange]:
        return [StageChange.of(stage) for stage in self.stages]

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


class StageChange(NamedTuple):
    """What one processor did to each of V tokens."""

    probabilities: NDArray[np.float64]  # before it
    removed: NDArray[np.bool_]
    singled_out: NDArray[np.bool_]  # changed, by a processor that leaves most tokens as they are

    @classmethod
    def of(cls, stage: Stage) -> StageChange:
        """The change of a stage of one row."""
        before = stage.before[0].double().cpu().numpy()
        after = stage.after[0].double().cpu().numpy()
        least = float(np.finfo(np.float32).min)
        alive, stays = before > least, after > least
        both = alive & stays
        moved = both & (after != before)
        if moved.sum() > both.sum() / 2:  # such as by a temperature
            moved[:] = False
        raised = np.exp(before - before.max())
        return cls(raised / raised.sum(), alive & ~stays, moved)


def processed_logprobs(scores: torch.Tensor) -> torch.Tensor:
    """Log-probabilities f64 [V] of scores [V] after processors; -inf: removed, which all tokens may be."""
    alive = scores > torch.finfo(scores.dtype).min
    remaining = scores.double().masked_fill(~alive, -torch.inf)
    return remaining.log_softmax(-1) if bool(alive.any()) else remaining
