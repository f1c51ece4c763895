"""Parameters of numbers that an engine may have written, fitted to a trace.

M positions, E entries, V vocabulary, P values of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from genctl.parity.entries import CAP, Entries
from genctl.parity.numbers import FILTERS, HEAD, RAW, InOrder, Kept, Number, remains

FITTED = 48  # positions on which parameters are fitted, at least
LARGE = 2**18  # their logits, where there are more positions
TAIL = 1024  # groups of alike tokens that stand for all others where parameters are fitted
_NEUTRAL = {"temperature": 1.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0}  # parameters that change nothing
ALIKE = 1.02  # times as much is left by parameters that are as good
_DRAWN = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0)
_FEW = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5)  # with filters
_VALUES: dict[str, tuple[float, ...]] = {
    "top-k": (*range(1, 101), 120, 128, 150, 200, 250, 256, 300, 400, 500, 512, 1000, 1024),
    "top-p": (*(place / 100 for place in range(10, 100)), 0.995, 0.999),
    "min-p": (0.001, 0.002, 0.005, *(place / 100 for place in range(1, 31))),
}
_DEFAULTS = {"top-k": 40.0, "top-p": 0.95, "min-p": 0.05}  # of llama-server
_AMOUNTS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
_PENALTIES = (  # with a sign: less than 1, or than 0, rewards what is repeated
    ("repetition", 1, (1.01, 1.03, 1.05, 1.08, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)),
    ("repetition", 1, (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99)),
    *((key, sign, _AMOUNTS) for key in ("presence", "frequency") for sign in (1, -1)),
)
ROUNDS = 3  # of all filters in turn
STARTS = 3  # from which they are sought


def _typical(number: Number, logits: Tensor, places: Entries) -> float:
    sizes = places.sizes(remains(number, logits, places))[places.known]
    return float(sizes.median() + 1e-3 * sizes.mean())


def _refined(make: Callable[[float], Number], grid: Sequence[float], logits: Tensor, places: Entries) -> Number:
    """The best parameter near the best one of a grid, by golden sections (Kiefer 1953) of its logarithm."""
    found = [_typical(make(value), logits, places) for value in grid]
    best = found.index(min(found))
    low, high = math.log(grid[max(best - 1, 0)]), math.log(grid[min(best + 1, len(grid) - 1)])
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    sizes = [_typical(make(math.exp(value)), logits, places) for value in (left, right)]
    for _ in range(16):
        if sizes[0] < sizes[1]:
            high, right = right, left
            left = high - ratio * (high - low)
            sizes = [_typical(make(math.exp(left)), logits, places), sizes[0]]
        else:
            low, left = left, right
            right = low + ratio * (high - low)
            sizes = [sizes[1], _typical(make(math.exp(right)), logits, places)]
    value = math.exp((low + high) / 2)
    plain = [float(f"{value:.{digits}g}") for digits in (1, 2, 3)]  # settings are round numbers
    least = min([*sizes, min(found)])
    value = next((one for one in plain if _typical(make(one), logits, places) <= 1.02 * least + 1e-9), value)
    return make(value)


# -- filters and a temperature -----------------------------------------------------------------------------------------


def _left(kept: Kept, filters: Mapping[str, Tensor | float], places: Entries) -> Tensor:
    """What typically remains, for one value of each filter or for P of one: f64 [P]."""
    sizes = places.sizes((places.value - kept.remains(filters)).nan_to_num(CAP, CAP, -CAP))[:, places.known]
    return sizes.median(1).values + 1e-3 * sizes.mean(1)


def _round(values: Sequence[float]) -> float:
    """The roundest number, as settings are: of few digits, the last one 0 or 5."""
    middle = values[len(values) // 2]
    return min(
        values, key=lambda one: (len(digits := f"{one:g}".strip("0.")), digits[-1:] not in "05", abs(one - middle))
    )


def _best_of(kept: Kept, places: Entries, name: str, others: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """What typically remains for the best value of a filter beside others, and all of them."""
    values = [one for one in _VALUES[name] if name != "top-k" or one < kept.ordered.shape[-1]]
    sizes = _left(kept, {**others, name: torch.tensor(values, dtype=torch.float64)}, places).tolist()
    alike = [one for one, size in zip(values, sizes, strict=True) if size <= ALIKE * min(sizes) + 1e-9]
    return min(sizes), {**others, name: _round(alike)}


def _best_filters(kept: Kept, places: Entries, filters: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Filters that leave the least, each found beside the others in turn, and what they leave."""
    least, filters = float(_left(kept, filters, places)[0]), dict(filters)
    for _ in range(ROUNDS):
        before = least
        for name in FILTERS:
            others = {key: value for key, value in filters.items() if key != name}
            without, (size, more) = float(_left(kept, others, places)[0]), _best_of(kept, places, name, others)
            if without <= ALIKE * min(size, least) + 1e-9:  # it changes nothing
                filters, least = others, without
            elif size < least:
                filters, least = more, size
        if least >= before:
            break
    return least, filters


def _filtered(logits: InOrder, *, first: bool) -> Iterator[Number]:
    """Filters before (`first`) or behind a temperature, which may be 1."""
    places = logits.places
    begun: list[tuple[float, dict[str, float], float]] = []
    for drawn in _FEW:
        kept = Kept(logits, drawn, first=first)
        begun += [(*_best_of(kept, places, name, {}), drawn) for name in FILTERS]
        begun.append((float(_left(kept, _DEFAULTS, places)[0]), _DEFAULTS, drawn))
    begun.sort(key=lambda one: one[0])
    if not first:
        _, filters, _ = next(one for one in begun if one[2] == 1.0)
        yield _number(1.0, _best_filters(Kept(logits, 1.0, first=False), places, filters)[1], first=False)
    found = [
        (*_best_filters(Kept(logits, drawn, first=first), places, filters), drawn)
        for _, filters, drawn in begun[:STARTS]
    ]
    _, filters, drawn = min(found, key=lambda one: one[0])
    place = _FEW.index(drawn)
    low, high = _FEW[max(place - 1, 0)], _FEW[min(place + 1, len(_FEW) - 1)]
    for _ in range(2):  # the temperature and the filters in turn
        between = [low + (high - low) * step / 6 for step in range(7)]
        found = [(*_best_filters(Kept(logits, one, first=first), places, filters), one) for one in between]
        _, filters, drawn = min(found, key=lambda one: one[0])
        low, high = drawn - (high - low) / 6, drawn + (high - low) / 6
    fitted = _refined(partial(_number, filters=filters, first=first), (low, drawn, high), logits.logits, places)
    _, filters = _best_filters(Kept(logits, fitted.temperature, first=first), places, filters)
    yield _number(fitted.temperature, filters, first=first)
    if places.copies is not None:  # a filter may end within a group
        yield _number(round(fitted.temperature, 2), filters, first=first)


def _number(drawn: float, filters: Mapping[str, float], *, first: bool) -> Number:
    """What is written after a temperature and filters, in the order in which they are applied."""
    causes = tuple((name, f"{filters[name]:g}") for name in FILTERS if name in filters)
    own = (("temperature", f"{drawn:.4g}"),) if drawn != 1.0 else ()
    kept = tuple((name, float(value)) for name, value in filters.items())
    return Number(
        (*causes, *own) if first else (*own, *causes), temperature=drawn, filters=kept, filters_first=first,
        parameters=len(causes) + len(own),
    )  # fmt: skip


def _fitted_on(logits: Tensor, places: Entries) -> tuple[Entries, Tensor]:
    """Some positions with a number, and their logits; of a large vocabulary those of `HEAD` + `TAIL` columns."""
    known, owner = places.known.nonzero()[:, 0], places.owner
    most = FITTED if owner is None else FITTED // 4  # sums have several positions each
    most = max(most, LARGE // logits.shape[-1])
    some = known[torch.linspace(0, len(known) - 1, min(most, len(known))).long()]
    if owner is not None:
        at = torch.where(owner < 0, places.position, owner)
        some = torch.unique(places.position[torch.isin(at, some)])
    places, logits = places.few(some), logits[some]
    if logits.shape[-1] <= 2 * (HEAD + TAIL):
        return places, logits
    order = logits.argsort(-1, descending=True)
    own = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order[:, :HEAD], True)  # these stay alone
    own[places.position, places.entry] = own[range(len(own)), places.token] = True
    for row, (prompt, written) in zip(own, places.before, strict=True):
        row[[*prompt, *written]] = True
    own = own.gather(1, order)
    most = int(own.sum(1).max())
    step = -(-logits.shape[-1] // TAIL)
    column = torch.where(own, own.cumsum(1) - 1, most + ((~own).cumsum(1) - 1) // step)
    found = torch.zeros(len(logits), most + TAIL + 1, dtype=torch.float64)
    highest = logits.amax(-1, keepdim=True)
    sums = found.scatter_add(1, column, (logits.gather(1, order) - highest).exp())
    copies = found.scatter_add(1, column, torch.ones_like(logits))
    place = torch.empty_like(order).scatter_(1, order, column)
    before = tuple(
        (tuple(row[[*prompt]].tolist()), tuple(row[[*written]].tolist()))
        for row, (prompt, written) in zip(place, places.before, strict=True)
    )
    places = replace(places, token=place[range(len(place)), places.token], before=before, copies=copies.log(),
                     entry=place[places.position, places.entry])  # fmt: skip
    return places, (sums / copies.clamp(min=1)).log() + highest


def _changed(one: Number, key: str, value: float, sign: int = 1) -> Number:
    """A number with one more cause, whose parameter is a field of it."""
    value *= sign
    fields: Any = {key: value, "causes": (*one.causes, (key, f"{value:.4g}")), "parameters": one.parameters + 1}
    return replace(one, **fields)


def changes_something(one: Number) -> bool:
    """Whether no parameter of a number has the value, as it is written, that changes nothing."""
    return all(float(value) != _NEUTRAL[key] for key, value in one.causes if key in _NEUTRAL)


def numbers(logits: Tensor, places: Entries) -> Iterator[Number]:
    """What the numbers may be, with fitted parameters that change something. `logits` f64 [M, V] of a reading."""
    return filter(changes_something, _fitted(logits, places))


def _fitted(logits: Tensor, places: Entries) -> Iterator[Number]:
    few, rows = _fitted_on(logits, places)
    for unit in ("base-2", "base-10", "probability", "percent", "negated"):
        yield Number(((unit, ""),), unit=unit)
    for shift in (-1, 1):
        for lists in (True, False) if bool((~places.chosen).any()) else (True,):
            yield Number((("shifted", "later" if shift > 0 else "earlier"),), shift=shift, lists_too=lists)
    if bool((logits.argmax(-1) != places.token).any()):
        yield Number((("drafted", ""),), first=True)
    yield _refined(partial(_changed, RAW, "temperature"), _DRAWN, rows, few)
    ordered = InOrder(rows, few)
    for filters_first in (False, True):
        yield from _filtered(ordered, first=filters_first)
    for recent in (False, True):
        for key, sign, values in _PENALTIES:
            if any(written for _, written in few.before) or key == "repetition":
                yield _refined(partial(_changed, replace(RAW, recent=recent), key, sign=sign), values, rows, few)


def several(one: Number, logits: Tensor, places: Entries) -> Iterator[Number]:
    """`one` together with another cause, where both can be."""
    if one == RAW or one.filters or one.temperature != 1.0:
        return
    few, rows = _fitted_on(logits, places)
    found = _refined(partial(_changed, one, "temperature"), _DRAWN, rows, few)
    if changes_something(found):
        yield found
