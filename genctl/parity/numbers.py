"""Which number an engine wrote of a token: from the reference's logits, without reading again.

Filters of samplers renormalise what they keep. They follow one another as in transformers and llama.cpp; a temperature
comes before them (transformers, vLLM) or behind them (llama.cpp).

M positions, V vocabulary, E entries: a token at a position whose number is known, the chosen one or one of the best.
P values of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from genctl.parity.entries import Entries

FILTERS = ("top-k", "top-p", "min-p")  # in the order in which they are applied
HEAD = 2048  # best tokens that are sorted; all others only where a filter keeps more


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
    at, token, missing = places.position, places.entry, None
    if number.shift:
        moved = at + number.shift
        there = moved.clamp(0, len(places.token) - 1)
        edge = places.follows[torch.maximum(at, there)] & (moved == there)
        shifted = places.chosen | number.lists_too
        missing = ~edge & shifted
        token = torch.where(places.chosen, places.token[there], token)
        at = torch.where(shifted, there, at)
    if number.filters:
        predicted = _among_kept(number, plain, places)
    else:
        predicted = logits[at, token]
        if number.first:
            predicted = torch.where(places.chosen, logits.amax(-1)[at], predicted)
        predicted = predicted - log_total(logits, places)[at, 0]
    found = _UNITS[number.unit](places.value) - predicted
    if missing is None:
        return found
    return torch.where(missing, torch.where(places.value == 0, 0.0, torch.nan), found)  # 0 fills the place


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


def log_total(logits: Tensor, places: Entries) -> Tensor:
    """The logarithm of the sum of all exp(logits) [M, V] -> [M, 1]."""
    return (logits if places.copies is None else logits + places.copies).logsumexp(-1, keepdim=True)


# -- filters -----------------------------------------------------------------------------------------------------------


def _among_kept(number: Number, logits: Tensor, places: Entries) -> Tensor:
    """Log-probabilities of entries among the tokens that filters keep [E]."""
    filters = dict(number.filters)
    for most in (HEAD, 0):
        if most < logits.shape[-1] // 2:
            kept = Kept(InOrder(logits, places, most), number.temperature, first=number.filters_first)
            if most == 0 or int(kept.counts(filters).max()) < most:
                break
    return kept.remains(filters)[0]


class InOrder:
    """Logits f64 [M, V] in order, which they keep at every temperature."""

    def __init__(self, logits: Tensor, places: Entries, most: int = 0) -> None:
        """`most`: tokens that are sorted, 0 for all."""
        self.logits, self.places = logits, places
        self.best, order = logits.topk(most) if most else logits.sort(-1, descending=True)
        self.copies = 1.0 if places.copies is None else places.copies.gather(1, order).exp()

    def at(self, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities in order [M, V], the sums of their probabilities, and those of entries [E]."""
        whole, places = log_total(self.logits / temperature, self.places), self.places
        ordered = self.best / temperature - whole
        entries = self.logits[places.position, places.entry] / temperature - whole[places.position, 0]
        return ordered, (ordered.exp() * self.copies).cumsum(-1), entries


class Kept:
    """What filters keep of logits, with a temperature before or behind them."""

    def __init__(self, logits: InOrder, temperature: float, *, first: bool) -> None:
        """`first`: before the temperature."""
        self.places = logits.places
        drawn = logits.at(temperature)
        self.ordered, self.masses, self.filtered = logits.at(1.0) if first else drawn
        self.drawn, self.predicted = drawn[1].log(), drawn[2]

    def counts(self, filters: Mapping[str, Tensor | float]) -> Tensor:
        """How many tokens are kept, for one value of each filter or for P of one: int64 [M, P]."""
        size = self.ordered.shape[-1]
        count = torch.full((len(self.ordered), 1), size)
        for name in FILTERS:
            if name in filters:
                value = torch.as_tensor(filters[name], dtype=torch.float64).reshape(1, -1).expand(len(count), -1)
                if name == "top-k":
                    kept = value.clamp(max=size).long()
                elif name == "top-p":  # of what is kept before
                    whole = torch.where(count < size, self.masses.gather(1, count - 1), 1.0)
                    kept = torch.searchsorted(self.masses, value * whole - 1e-12) + 1
                else:
                    gaps = self.ordered[:, :1] - self.ordered
                    kept = torch.searchsorted(gaps, -value.clamp(min=1e-300).log(), right=True)
                count = torch.minimum(count, kept)
        return count

    def remains(self, filters: Mapping[str, Tensor | float]) -> Tensor:
        """Log-probabilities of entries among what is kept [P, E]; -inf of those that are not."""
        count = self.counts(filters)
        least, mass = ((part.gather(1, count - 1)).T[:, self.places.position] for part in (self.ordered, self.drawn))
        return torch.where(self.filtered < least - 1e-9, -torch.inf, self.predicted - mass)


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
