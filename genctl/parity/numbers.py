"""Which number an engine wrote of a token: from the reference's logits, without reading again.

M positions, V vocabulary, E entries: a token at a position whose number is known, the chosen one or one of the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from genctl.parity.filters import HEAD, InOrder, Kept, log_total

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


@dataclass(frozen=True)
class Number:
    """How a written number is made of logits. `causes`: keys of what is not as it should be, with its parameter."""

    causes: tuple[tuple[str, str], ...] = ()
    temperature: float = 1.0
    filters: tuple[tuple[str, float], ...] = ()  # after which the rest is renormalised
    filters_first: bool = False  # before the temperature
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    recent: bool = False  # penalties of the last tokens, prompts too, as llama.cpp has them
    shift: int = 0  # it belongs to the position so much later
    lists_too: bool = True  # the lists of best tokens are shifted, too
    first: bool = False  # it is the first choice's
    unit: str = ""
    parameters: int = 0  # fitted


RAW = Number()
_UNITS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda value: value,
    "base-2": lambda value: value * math.log(2),
    "base-10": lambda value: value * math.log(10),
    "probability": lambda value: value.clamp(min=0).log(),
    "percent": lambda value: (value / 100).clamp(min=0).log(),
    "negated": lambda value: -value,
}


def remains(number: Number, logits: Tensor, places: Entries) -> Tensor:
    """Written less predicted, in nats f64 [E]; NaN where there is no prediction. `logits` f64 [M, V]."""
    plain = logits = _penalised(number, logits, places)
    if number.temperature != 1.0:
        logits = logits / number.temperature
    whole = log_total(logits, places)
    at, token, missing = places.position, places.entry, None
    if number.shift:
        moved = at + number.shift
        there = moved.clamp(0, len(places.token) - 1)
        edge = places.follows[torch.maximum(at, there)] & (moved == there)
        shifted = places.chosen | number.lists_too
        missing = ~edge & shifted
        token = torch.where(places.chosen, places.token[there], token)
        at = torch.where(shifted, there, at)
    predicted = logits[at, token]
    if number.first:
        predicted = torch.where(places.chosen, logits.amax(-1)[at], predicted)
    predicted = predicted - whole[at, 0]
    if number.filters:
        predicted = _among_kept(number, plain, places)
    found = _UNITS[number.unit](places.value) - predicted
    if missing is None:
        return found
    return torch.where(missing, torch.where(places.value == 0, 0.0, torch.nan), found)  # 0 fills the place


def _among_kept(number: Number, logits: Tensor, places: Entries) -> Tensor:
    """Log-probabilities of entries among the tokens that filters keep [E]."""
    filters = dict(number.filters)
    for most in (HEAD, 0):
        if most < logits.shape[-1] // 2:
            kept = Kept(InOrder(logits, places, most), number.temperature, first=number.filters_first)
            if most == 0 or int(kept.counts(filters).max()) < most:
                break
    return kept.remains(filters)[0]


def _penalised(number: Number, logits: Tensor, places: Entries) -> Tensor:
    if number.repetition == 1.0 and not number.presence and not number.frequency:
        return logits
    logits = logits.clone()
    if number.repetition != 1.0:  # Keskar et al. 2019, arXiv:1909.05858
        at, token, _ = places.recent if number.recent else places.seen
        part = logits[at, token]
        logits[at, token] = part * torch.where(part > 0, 1 / number.repetition, number.repetition)
    if number.presence or number.frequency:
        at, token, times = places.recent if number.recent else places.written
        logits[at, token] -= number.presence + number.frequency * times
    return logits


# -- digits ------------------------------------------------------------------------------------------------------------


def resolution(places: Entries) -> tuple[tuple[str, str] | None, Tensor]:
    """The cause that numbers are cut to a grid, if all lie on one, and by how much each may be off, f64 [E]."""
    value = places.value
    some = value[value != 0]
    if len(some) >= 10:
        for digits in range(1, 7):
            scaled = some * 10**digits
            if bool(((scaled - scaled.round()).abs() <= 1e-9 * scaled.abs() + 1e-7).all()):
                return ("digits", str(digits)), torch.full_like(value, 10.0**-digits)
        for dtype, eps in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
            if bool((some.to(dtype).double() == some).all()):
                return ("dtype", str(dtype).removeprefix("torch.")), value.abs() * eps
    return None, torch.zeros_like(value)
