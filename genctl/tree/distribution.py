"""The distribution of the next token over the whole vocabulary: the model's, and after the processors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from genctl.decode.processors import trace
from genctl.decode.processors.trace import Stage
from genctl.events import Trace
from genctl.kernels.ops import log_softmax
from genctl.tree.results import Alternative, Effect


class Distribution:
    """The distribution of the token after a node, over V tokens."""

    def __init__(
        self,
        node: int,
        logits: torch.Tensor,  # f32 [V], the model's
        scores: torch.Tensor,  # f32 [1, V], after the processors
        stages: Sequence[Stage],
        piece: Callable[[int], str],
        *,
        after_eos: bool = False,  # whether the text has ended before
    ) -> None:
        self.node, self.stages, self._piece, self.after_eos = node, stages, piece, after_eos
        self.logprobs: NDArray[np.float32] = log_softmax(logits[None])[0].cpu().numpy()
        self.processed = processed_logprobs(scores[0]).float().cpu().numpy() if stages else self.logprobs

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
    def ranks(self) -> NDArray[np.int64]:
        """The rank of each id by the model's probability, from 1."""
        ranks = np.empty(len(self), np.int64)
        ranks[self.order] = np.arange(1, len(self) + 1)
        return ranks

    @cached_property
    def entropy(self) -> float:
        """The entropy of the model's distribution, in nats."""
        possible = self.logprobs[self.logprobs > -np.inf].astype(np.float64)
        return float(-(np.exp(possible) * possible).sum()) + 0.0

    def mass(self, count: int) -> float:
        """The model's probability of the `count` most probable tokens together."""
        return float(np.exp(self.logprobs[self.order[:count]].astype(np.float64)).sum())

    def of(self, id: int) -> Alternative:
        """One token."""
        remover = ""
        if self.processed[id] == -np.inf:
            removes = (stage.name for stage in self.stages if not is_alive(stage.after[0, id]))
            remover = next(removes, "")
        logprob, processed = float(self.logprobs[id]), float(self.processed[id])
        return Alternative(id, self._piece(id), int(self.ranks[id]), logprob, processed, remover)

    def at(self, rank: int) -> Alternative:
        """The token of a rank, from 1 to V."""
        return self.of(int(self.order[rank - 1]))

    def top(self, count: int) -> list[Alternative]:
        """The `count` most probable tokens."""
        return [self.of(int(id)) for id in self.order[:count]]

    def containing(self, text: str) -> Iterator[Alternative]:
        """The tokens whose text contains `text`, the most probable first."""
        wanted = text.casefold()
        return (self.of(int(id)) for id in self.order if wanted in self._piece(int(id)).casefold())

    @cached_property
    def effects(self) -> tuple[Effect, ...]:
        """What each processor did, in their order."""
        return tuple(Effect(one.processor, one.removed, one.moved) for one in self.why(int(self.order[0])))

    def why(self, id: int) -> tuple[Trace, ...]:
        """What each processor did to one token, in their order."""
        row = torch.zeros(1, dtype=torch.long)
        stages = [Stage(one.name, one.before.cpu(), one.after.cpu()) for one in self.stages]
        return trace.traces(stages, row, torch.tensor([id]))[0]


def is_alive(scores: torch.Tensor) -> torch.Tensor:
    """bool, of the shape of `scores`: whether a token may still be chosen after processors."""
    return scores > torch.finfo(scores.dtype).min


def processed_logprobs(scores: torch.Tensor) -> torch.Tensor:
    """Log-probabilities f64 [V] of scores [V] after processors; -inf: removed, which all tokens may be."""
    alive = is_alive(scores)
    remaining = scores.double().masked_fill(~alive, -torch.inf)
    return remaining.log_softmax(-1) if bool(alive.any()) else remaining
