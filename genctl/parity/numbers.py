"""Which number an engine logged for a token: computed from the reference's logits, with parameters fitted to a trace.

Filters of samplers renormalise what they keep. They are applied in the order of transformers and llama.cpp; a
temperature comes before them (transformers, vLLM) or after them (llama.cpp).

M positions, V vocabulary, E entries: tokens with a logged number at a position, the chosen one or a listed one.
P values of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias

import torch
from torch import Tensor

CAP = 20.0  # nats: a larger difference counts as this
HEAD = 2048  # most probable tokens that are sorted; all others only if a filter keeps more
TAIL = 1024  # groups of similar tokens that stand for the others when parameters are fitted
FITTED = 16  # fewest positions on which parameters are fitted
LARGE = 2**18  # logits of these positions, if that allows more
ALIKE = 1.02  # parameters that leave up to this many times the least are as good
STEPS = 12  # of a golden-section search
Ids: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Entries:
    """Positions in order, and their entries."""

    token: Tensor  # int64 [M], the chosen one
    follows: Tensor  # bool [M]: whether the position before belongs to the token before
    position: Tensor  # int64 [E]
    entry: Tensor  # int64 [E], a token
    chosen: Tensor  # bool [E]: whether it is the chosen token
    value: Tensor  # f64 [E], as written
    before: tuple[tuple[Ids, Ids], ...] = ()  # [M]: the prompt, and the tokens written so far

    def few(self, keep: Tensor) -> Entries:
        """The entries at some positions int64 [K], in order."""
        number = torch.full((len(self.token),), -1)
        number[keep] = torch.arange(len(keep))
        entries = number[self.position] >= 0
        follows = self.follows[keep].clone()
        follows[1:] &= keep[1:] == keep[:-1] + 1
        follows[:1] = False
        return Entries(
            self.token[keep], follows, number[self.position[entries]], self.entry[entries], self.chosen[entries],
            self.value[entries], tuple(self.before[place] for place in keep.tolist()),
        )  # fmt: skip

    def sizes(self, residual: Tensor) -> Tensor:
        """The root mean square of residuals at each position [..., M], from those of entries [..., E]."""
        residual = residual.nan_to_num(CAP, CAP, -CAP).clamp(-CAP, CAP)
        total = torch.zeros(*residual.shape[:-1], len(self.token), dtype=torch.float64)
        return (total.index_add_(-1, self.position, residual.square()) / self.counts.clamp(min=1)).sqrt()

    @cached_property
    def seen(self) -> tuple[Tensor, Tensor]:
        """Positions, and the tokens before each (also those of the prompt): int64 [P] each."""
        pairs = {(place, id) for place, row in enumerate(self.before) for part in row for id in part}
        found = torch.tensor([*pairs], dtype=torch.long).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    @cached_property
    def known(self) -> Tensor:
        """Whether a position has a number, bool [M]."""
        return self.counts > 0

    @cached_property
    def counts(self) -> Tensor:
        """Entries at each position, f64 [M]."""
        return torch.bincount(self.position, minlength=len(self.token)).double()


# -- numbers -----------------------------------------------------------------------------------------------------------

FILTERS = ("top-k", "top-p", "min-p")  # in the order in which they are applied
_UNITS: dict[str, Callable[[Tensor], Tensor]] = {  # from the logged value to nats
    "": lambda value: value,
    "base-2": lambda value: value * math.log(2),
    "base-10": lambda value: value * math.log(10),
    "probability": lambda value: value.clamp(min=0).log(),
    "percent": lambda value: (value / 100).clamp(min=0).log(),
    "negated": lambda value: -value,
}


@dataclass(frozen=True)
class Number:
    """How a logged number is computed from logits."""

    temperature: float = 1.0
    filters: tuple[tuple[str, float], ...] = ()  # what they keep is renormalised
    filters_first: bool = False  # before the temperature
    repetition: float = 1.0  # for tokens of the prompt, too
    shift: int = 0  # it is the number of the token this many positions later
    first: bool = False  # it is the number of the first choice
    unit: str = ""

    @property
    def fitted(self) -> tuple[tuple[str, str], ...]:
        """Keys of causes with a fitted parameter, and this parameter."""
        fields = {"repetition": self.repetition, "temperature": self.temperature}
        own = [(key, f"{value:.4g}") for key, value in fields.items() if value != 1.0]
        filters = [(name, f"{value:g}") for name, value in self.filters]
        return (*filters, *own) if self.filters_first else (*own, *filters)

    @property
    def causes(self) -> tuple[tuple[str, str], ...]:
        """Keys of its causes, each with its parameter."""
        shifted = (("shifted", "later" if self.shift > 0 else "earlier"),) if self.shift else ()
        return (*self.fitted, *shifted, *((("drafted", ""),) * self.first), *(((self.unit, ""),) * bool(self.unit)))

    @property
    def changes_something(self) -> bool:
        """Whether no fitted parameter is shown as the value that changes nothing."""
        return all(float(value) != 1.0 for key, value in self.fitted if key in ("repetition", "temperature"))


RAW = Number()


def remains(number: Number, logits: Tensor, places: Entries) -> Tensor:
    """Written less predicted, in nats f64 [E]; NaN where there is no prediction. `logits` f64 [M, V]."""
    if number.repetition != 1.0:  # Keskar et al. 2019, arXiv:1909.05858
        part = logits[places.seen]
        logits = logits.index_put(places.seen, part * torch.where(part > 0, 1 / number.repetition, number.repetition))
    at, token, missing = places.position, places.entry, None
    if number.shift:
        moved = at + number.shift
        there = moved.clamp(0, len(places.token) - 1)
        missing = ~(places.follows[torch.maximum(at, there)] & (moved == there))
        token, at = torch.where(places.chosen, places.token[there], token), there
    if number.filters:
        predicted = _among_kept(number, logits, places)
    else:
        logits = logits / number.temperature
        predicted = logits[at, token]
        if number.first:
            predicted = torch.where(places.chosen, logits.amax(-1)[at], predicted)
        predicted = predicted - logits.logsumexp(-1)[at]
    found = _UNITS[number.unit](places.value) - predicted
    if missing is None:
        return found
    return torch.where(missing, torch.where(places.value == 0, 0.0, torch.nan), found)  # 0 as a filler


def _among_kept(number: Number, logits: Tensor, places: Entries) -> Tensor:
    """Log-probabilities of entries among the tokens that filters keep, f64 [E]."""
    filters, most = dict(number.filters), HEAD
    kept = Kept(logits, in_order(logits, most), places, number.temperature, first=number.filters_first)
    if int(kept.counts(filters).max()) >= most:
        ordered = in_order(logits, logits.shape[-1])
        kept = Kept(logits, ordered, places, number.temperature, first=number.filters_first)
    return kept.predicted(filters)[0]


def in_order(logits: Tensor, most: int = HEAD) -> Tensor:
    """The largest of logits f64 [M, V], in order: all, unless there are more than about twice `most`."""
    size = logits.shape[-1]
    return logits.topk(most if most < size // 2 else size).values


def grouped(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in order, in a large vocabulary the best and groups of similar others; and the log of each group's size.

    To sum over all 150,000 tokens in each trial of a temperature took two minutes.
    """
    if logits.shape[-1] <= 2 * HEAD:
        return in_order(logits), torch.zeros(1)
    ordered = logits.sort(-1, descending=True).values
    size = -(-(logits.shape[-1] - HEAD) // TAIL)  # tokens of a group
    rest = torch.nn.functional.pad(ordered[:, HEAD:], (0, HEAD + size * TAIL - logits.shape[-1]), value=-torch.inf)
    alike = torch.full((HEAD + TAIL,), math.log(size), dtype=torch.float64)
    alike[:HEAD] = 0.0
    groups = rest.view(-1, TAIL, size).logsumexp(-1) - math.log(size)
    return torch.cat([ordered[:, :HEAD], groups], -1), alike


class Kept:
    """What filters keep of logits, with a temperature before or after them."""

    def __init__(
        self, logits: Tensor, ordered: Tensor, places: Entries, temperature: float, *, first: bool,
        alike: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`ordered`: from `in_order`, or with `alike` from `grouped`. `first`: filters come before the temperature."""
        every, copies = (logits, torch.zeros(1)) if alike is None else (ordered, alike)

        def spread(drawn: float) -> tuple[Tensor, Tensor]:
            """Log-probabilities in order, and those of entries [E]."""
            whole = (every / drawn + copies).logsumexp(-1, keepdim=True)
            entries = logits[places.position, places.entry] / drawn - whole[places.position, 0]
            return ordered / drawn - whole, entries

        drawn = spread(temperature)
        self._places, self._drawn = places, drawn[1]
        self._ordered, self._filtered = spread(1.0) if first else drawn
        self._masses = (self._ordered + copies).exp().cumsum(-1)
        self._whole = (drawn[0] + copies).exp().cumsum(-1).log()

    def counts(self, filters: Mapping[str, Tensor | float]) -> Tensor:
        """How many tokens are kept, for one value of each filter or for P of one: int64 [M, P]."""
        size = self._ordered.shape[-1]
        count = torch.full((len(self._ordered), 1), size)
        for name in FILTERS:
            if name in filters:
                value = torch.as_tensor(filters[name], dtype=torch.float64).reshape(1, -1).expand(len(count), -1)
                if name == "top-k":
                    kept = value.clamp(max=size).long()
                elif name == "top-p":  # of what earlier filters keep
                    whole = torch.where(count < size, self._masses.gather(1, count - 1), 1.0)
                    kept = torch.searchsorted(self._masses, value * whole - 1e-12) + 1
                else:
                    gaps = self._ordered[:, :1] - self._ordered
                    kept = torch.searchsorted(gaps, -value.clamp(min=1e-300).log(), right=True)
                count = torch.minimum(count, kept)
        return count

    def predicted(self, filters: Mapping[str, Tensor | float]) -> Tensor:
        """Log-probabilities of entries among what is kept [P, E]; -inf for the others."""
        if not filters:
            return self._drawn[None]
        count = self.counts(filters) - 1
        at = self._places.position
        least, whole = (part.gather(1, count).T[:, at] for part in (self._ordered, self._whole))
        return torch.where(self._filtered < least - 1e-9, -torch.inf, self._drawn - whole)

    def typical(self, filters: Mapping[str, Tensor | float]) -> Tensor:
        """The typical residual, for one value of each filter or for P of one: f64 [P]."""
        return _typical(self._places.value - self.predicted(filters), self._places)


# -- parameters that fit a trace ---------------------------------------------------------------------------------------

_PENALTIES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)  # below 1 it rewards
_DRAWN = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0)
_FILTERS: dict[str, tuple[float, ...]] = {
    "top-k": (*range(1, 101), 120, 128, 150, 200, 250, 256, 300, 400, 500, 512, 1000, 1024),
    "top-p": (*(place / 100 for place in range(10, 100)), 0.995, 0.999),
    "min-p": (0.001, 0.002, 0.005, *(place / 100 for place in range(1, 31))),
}


def numbers(logits: Tensor, places: Entries) -> Iterator[Number]:
    """Candidates for the logged number, with fitted parameters that change something. `logits` f64 [M, V]."""
    yield from (Number(unit=unit) for unit in _UNITS if unit)
    yield from (Number(shift=shift) for shift in (-1, 1))
    if bool((logits.argmax(-1) != places.token).any()):
        yield Number(first=True)
    few, rows = _fitted_on(logits, places)

    def left(number: Number) -> tuple[float, Number]:
        return float(_typical(remains(number, rows, few), few)), number

    ordered, alike = grouped(rows)
    kept = partial(Kept, rows, ordered, few, alike=alike)
    own = [
        _refined(lambda value: (float(kept(value, first=False).typical({})), Number(temperature=value)), _DRAWN),
        _refined(lambda value: left(Number(repetition=value)), _PENALTIES),
        _filtered(kept, False, 1.0)[1],
    ]
    own += [_refined(partial(_filtered, kept, first), _DRAWN) for first in (False, True)]
    if bool(alike.any()):  # a filter may end within a group
        own += [replace(number, temperature=round(number.temperature, 2)) for number in own]
    yield from (number for number in dict.fromkeys(own) if number.causes and number.changes_something)


def _fitted_on(logits: Tensor, places: Entries) -> tuple[Entries, Tensor]:
    """Some positions with a number, and their logits."""
    known, most = places.known.nonzero()[:, 0], max(FITTED, LARGE // logits.shape[-1])
    some = known[torch.linspace(0, len(known) - 1, min(most, len(known))).long()]
    return places.few(some), logits[some]


def _typical(residual: Tensor, places: Entries) -> Tensor:
    """The typical residual of [..., E]: f64 [...]."""
    sizes = places.sizes(residual)[..., places.known]
    return sizes.median(-1).values + 1e-3 * sizes.mean(-1)


def _refined(fit: Callable[[float], tuple[float, Number]], grid: Sequence[float]) -> Number:
    """The best number near the best value of a grid, by golden sections (Kiefer 1953); prefers round values."""
    found = {value: fit(value) for value in grid}

    def left(value: float) -> float:
        if value not in found:
            found[value] = fit(value)
        return found[value][0]

    place = grid.index(min(grid, key=left))
    low, high = grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)]
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(STEPS):
        inner, outer = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, outer) if left(inner) < left(outer) else (inner, high)
    best = min(found, key=left)
    plain = [float(f"{best:.{digits}g}") for digits in (1, 2, 3)]
    return found[next((value for value in plain if value and left(value) <= ALIKE * left(best) + 1e-9), best)][1]


def _filtered(kept: Callable[..., Kept], first: bool, drawn: float) -> tuple[float, Number]:
    """The filters that leave the least at a temperature, each fitted in turn beside the others; and what they leave."""
    one = kept(drawn, first=first)

    def best_of(name: str, others: dict[str, float]) -> tuple[float, dict[str, float]]:
        """The least that a filter leaves beside others, and the filters with its roundest value that is as good."""
        sizes = one.typical({**others, name: torch.tensor(_FILTERS[name], dtype=torch.float64)}).tolist()
        least = ALIKE * min(sizes) + 1e-9
        alike = [value for value, size in zip(_FILTERS[name], sizes, strict=True) if size <= least]
        middle = alike[len(alike) // 2]

        def roughness(value: float) -> tuple[int, bool, float]:  # settings have few digits, the last one 0 or 5
            digits = f"{value:g}".strip("0.")
            return len(digits), digits[-1:] not in "05", abs(value - middle)

        return min(sizes), {**others, name: min(alike, key=roughness)}

    least, filters = min((best_of(name, {}) for name in FILTERS), key=lambda found: found[0])
    for name in (*FILTERS, *FILTERS):
        others = {key: value for key, value in filters.items() if key != name}
        without, (size, more) = float(one.typical(others)), best_of(name, others)
        if without <= ALIKE * min(size, least) + 1e-9:  # this filter changes nothing
            filters, least = others, without
        elif size < least:
            filters, least = more, size
    named = tuple((name, filters[name]) for name in FILTERS if name in filters)
    return least, Number(temperature=drawn, filters=named, filters_first=first)


def resolution(places: Entries) -> tuple[tuple[str, str] | None, Tensor]:
    """The cause if all numbers lie on a grid (cut digits, a dtype), and by how much each may be off, f64 [E]."""
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
