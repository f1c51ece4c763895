"""The numbers that an engine wrote of tokens, by position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

RECENT = 64  # tokens that llama.cpp's penalties look back
CAP = 20.0  # nats: a larger difference is no worse
Ids: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Entries:
    """Positions in order, and the entries at them."""

    token: Tensor  # int64 [M], the chosen one
    follows: Tensor  # bool [M]: whether the position before is the one of the token before
    position: Tensor  # int64 [E]
    entry: Tensor  # int64 [E], a token
    chosen: Tensor  # bool [E]: whether the number is that of the chosen token
    value: Tensor  # f64 [E], as written
    before: tuple[tuple[Ids, Ids], ...] = ()  # [M]: the prompt, and what is written so far
    owner: Tensor | None = None  # int64 [E]: where one number is the sum of several entries, the position it counts at
    copies: Tensor | None = None  # f64 [M, V]: the logarithm of how many tokens each logit stands for, if not one

    def few(self, keep: Tensor) -> Entries:
        """The places at some positions int64 [K], in order."""
        number = torch.full((len(self.token),), -1)
        number[keep] = torch.arange(len(keep))
        entries = number[self.position] >= 0
        follows = self.follows[keep].clone()
        follows[1:] &= keep[1:] == keep[:-1] + 1
        follows[:1] = False
        return Entries(
            self.token[keep], follows, number[self.position[entries]], self.entry[entries], self.chosen[entries],
            self.value[entries], tuple(self.before[place] for place in keep.tolist()),
            None if self.owner is None else torch.where(
                self.owner[entries] < 0, -1, number[self.owner[entries].clamp(min=0)]),
        )  # fmt: skip

    def sizes(self, residual: Tensor) -> Tensor:
        """The root mean square of what remains at each position [..., M], from that of entries [..., E]."""
        return (self._sums(residual.nan_to_num(CAP, CAP, -CAP).clamp(-CAP, CAP)) / self.counts.clamp(min=1)).sqrt()

    def added(self, square: Tensor) -> Tensor:
        """Squares of what rounds at positions [..., M]: where a number is a sum, those of its tokens, added up.

        Rounding of one token does not depend on that of another.
        """
        if self.owner is None:
            return square
        shared = self.owner >= 0
        at = self.owner[shared]
        return square.index_fill(-1, at, 0.0).index_add(-1, at, square[..., self.position[shared]])

    def _sums(self, residual: Tensor) -> Tensor:
        """The sum of squares at each position."""
        total = torch.zeros(*residual.shape[:-1], len(self.token), dtype=torch.float64)
        if self.owner is None:
            return total.index_add_(-1, self.position, residual.square())
        shared = self.owner >= 0
        total.index_add_(-1, self.owner[shared], residual[..., shared])
        return total.square().index_add_(-1, self.position[~shared], residual[..., ~shared].square())

    @cached_property
    def written(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positions, the tokens that are written before each, and how often: int64, int64, f64 [P]."""
        return self._times(lambda prompt, written: written)

    @cached_property
    def seen(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same of prompts, too."""
        return self._times(lambda prompt, written: (*prompt, *written))

    @cached_property
    def recent(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same of the last `RECENT` tokens."""
        return self._times(lambda prompt, written: (*prompt, *written)[-RECENT:])

    def _times(self, part: Callable[[Ids, Ids], Ids]) -> tuple[Tensor, Tensor, Tensor]:
        rows = [part(*each) for each in self.before]
        at = torch.tensor([place for place, row in enumerate(rows) for _ in row], dtype=torch.long)
        ids = torch.tensor([id for row in rows for id in row], dtype=torch.long)
        step = int(ids.max()) + 1 if len(ids) else 1
        pairs, times = torch.unique(at * step + ids, return_counts=True)
        return pairs // step, pairs % step, times.double()

    @property
    def known(self) -> Tensor:
        """Whether a position has a number, bool [M]."""
        return self.counts > 0

    @property
    def counts(self) -> Tensor:
        """Entries at each position, f64 [M]."""
        total = torch.zeros(len(self.token), dtype=torch.float64)
        alone = slice(None) if self.owner is None else self.owner < 0
        if self.owner is not None:
            total[self.owner[self.owner >= 0]] = 1.0
        return total.index_add_(0, self.position[alone], torch.ones_like(self.value[alone]))
