"""Which number an engine wrote of a token: from the reference's logits, without reading again.

M positions, V vocabulary, E entries: a token at a position whose number is known, the chosen one or one of the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from genctl.parity.entries import Entries
from genctl.parity.filters import HEAD, InOrder, Kept, log_total


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
