"""Which number an engine wrote of a token: from the reference's logits, without reading again.

M positions, V vocabulary, E entries: a token at a position whose number is known, the chosen one or one of the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

CAP = 20.0  # nats: a larger difference is no worse
FITTED = 48  # positions on which parameters are fitted
HEAD = 2048  # best tokens that are sorted; all others only where a filter keeps more
TAIL = 1024  # groups of alike tokens that stand for all others where parameters are fitted
_FEW = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.2, 1.5)  # with a filter
_KEPT = (*range(1, 101), 120, 128, 150, 200, 250, 256, 300, 400, 500, 512, 1000, 1024)
_DRAWN = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0)
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
    kept: tuple[str, float] | None = None  # a filter, after which the rest is renormalised
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
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
    logits = _penalised(number, logits, places)
    if number.temperature != 1.0:
        logits = logits / number.temperature
    whole = _whole(logits, places)
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
    if number.kept is not None:
        ordered, masses = _best_of(logits, whole, places, number.kept)
        count = _counts(number.kept[0], [number.kept[1]], ordered, masses)[:, 0]
        mass = masses.gather(1, (count - 1)[:, None])[:, 0]
        least = ordered.gather(1, (count - 1)[:, None])[:, 0]
        outside = predicted < least[at] - 1e-9
        predicted = torch.where(outside, -torch.inf, predicted - mass[at])
    found = _UNITS[number.unit](places.value) - predicted
    if missing is None:
        return found
    return torch.where(missing, torch.where(places.value == 0, 0.0, torch.nan), found)  # 0 fills the place


def _whole(logits: Tensor, places: Entries) -> Tensor:
    """The logarithm of the sum of all exp(logits) [M, V] -> [M, 1]."""
    return (logits if places.copies is None else logits + places.copies).logsumexp(-1, keepdim=True)


def _best_of(logits: Tensor, whole: Tensor, places: Entries, kept: tuple[str, float]) -> tuple[Tensor, Tensor]:
    """Log-probabilities in order, and the sums of their probabilities, of as many as a filter may keep [M, K]."""
    name, value = kept
    if logits.shape[-1] > 2 * HEAD and places.copies is None:
        ordered = logits.topk(HEAD).values - whole
        masses = ordered.exp().cumsum(-1).log()
        last = {"top-k": math.log(HEAD), "top-p": masses[:, -1], "min-p": ordered[:, 0] - ordered[:, -1]}[name]
        if bool((torch.as_tensor(last) > (-math.log(value) if name == "min-p" else math.log(value))).all()):
            return ordered, masses
    best, copies = _in_order(logits, places)
    return best - whole, ((best - whole).exp() * copies).cumsum(-1).log()


def _in_order(logits: Tensor, places: Entries) -> tuple[Tensor, Tensor | float]:
    """Logits in order [M, V], and how many tokens each stands for."""
    best, order = logits.sort(-1, descending=True)
    return best, 1.0 if places.copies is None else places.copies.gather(1, order).exp()


def _counts(name: str, values: Sequence[float], ordered: Tensor, masses: Tensor) -> Tensor:
    """How many tokens a filter keeps of log-probabilities in order [M, V], for each value -> int64 [M, P]."""
    given = torch.tensor(values, dtype=torch.float64).expand(len(ordered), -1).contiguous()
    if name == "top-k":
        return given.long().clamp(max=ordered.shape[-1])
    if name == "top-p":
        return (torch.searchsorted(masses.exp(), given - 1e-12) + 1).clamp(max=ordered.shape[-1])
    return torch.searchsorted(ordered[:, :1] - ordered, -given.log(), right=True)


def _penalised(number: Number, logits: Tensor, places: Entries) -> Tensor:
    if number.repetition == 1.0 and not number.presence and not number.frequency:
        return logits
    logits = logits.clone()
    if number.repetition != 1.0:  # Keskar et al. 2019, arXiv:1909.05858
        at, token, _ = places.seen
        part = logits[at, token]
        logits[at, token] = part * torch.where(part > 0, 1 / number.repetition, number.repetition)
    if number.presence or number.frequency:
        at, token, times = places.written
        logits[at, token] -= number.presence + number.frequency * times
    return logits


# -- fitting -----------------------------------------------------------------------------------------------------------


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


def _best_filter(
    drawn: float, name: str, logits: Tensor, places: Entries, best: tuple[Tensor, Tensor | float]
) -> tuple[float, float]:
    """The best parameter of a filter after a temperature, and what typically remains."""
    logits = logits / drawn
    whole = _whole(logits, places)
    ordered = best[0] / drawn - whole
    masses = (ordered.exp() * best[1]).cumsum(-1).log()
    if name == "top-k":
        values: list[float] = [count for count in _KEPT if count < logits.shape[-1]]
    elif name == "top-p":
        values = [place / 100 for place in range(10, 100)] + [0.995, 0.999]
    else:
        values = [0.001, 0.002, 0.005, *(place / 100 for place in range(1, 31))]
    counts = _counts(name, values, ordered, masses)
    predicted = logits[places.position, places.entry] - whole[places.position, 0]
    least, mass = (part.gather(1, counts - 1).T[:, places.position] for part in (ordered, masses))  # [P, E]
    sizes = places.sizes(torch.where(predicted < least - 1e-9, CAP, places.value - (predicted - mass)))
    sizes = sizes[:, places.known]
    typical = sizes.median(1).values + 1e-3 * sizes.mean(1)
    place = int(typical.argmin())
    return values[place], float(typical[place])


def _fitted_on(logits: Tensor, places: Entries) -> tuple[Entries, Tensor]:
    """Some positions with a number, and their logits; of a large vocabulary those of `HEAD` + `TAIL` columns."""
    known, owner = places.known.nonzero()[:, 0], places.owner
    most = FITTED if owner is None else FITTED // 4  # sums have several positions each
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


def _changed(one: Number, key: str, value: float) -> Number:
    """A number with one more cause, whose parameter is a field of it."""
    fields: Any = {key: value, "causes": (*one.causes, (key, f"{value:.4g}")), "parameters": one.parameters + 1}
    return replace(one, **fields)


def numbers(logits: Tensor, places: Entries) -> Iterator[Number]:
    """What the numbers may be, with fitted parameters. `logits` f64 [M, V] of a reading."""
    few, rows = _fitted_on(logits, places)
    for unit in ("base-2", "base-10", "probability", "percent", "negated"):
        yield Number(((unit, ""),), unit=unit)
    for shift in (-1, 1):
        for lists in (True, False) if bool((~places.chosen).any()) else (True,):
            yield Number((("shifted", "later" if shift > 0 else "earlier"),), shift=shift, lists_too=lists)
    if bool((logits.argmax(-1) != places.token).any()):
        yield Number((("drafted", ""),), first=True)
    yield _refined(partial(_changed, RAW, "temperature"), _DRAWN, rows, few)
    single: dict[str, float] = {}
    best = _in_order(rows, few)
    for name in ("top-k", "top-p", "min-p"):
        value, single[name] = _best_filter(1.0, name, rows, few, best)
        yield Number(((name, f"{value:g}"),), kept=(name, value), parameters=1)
    for name in ("top-k", "top-p", "min-p"):
        found = [(_best_filter(each, name, rows, few, best), each) for each in _FEW]
        (value, size), each = min(found, key=lambda one: one[0][1])
        if size < single[name]:
            place = _FEW.index(each)
            low, high = _FEW[max(place - 1, 0)], _FEW[min(place + 1, len(_FEW) - 1)]
            for _ in range(2):  # both parameters in turn
                between = [low + (high - low) * step / 6 for step in range(7)]
                found = [(_best_filter(one, name, rows, few, best), one) for one in between]
                (value, size), each = min(found, key=lambda one: one[0][1])
                low, high = each - (high - low) / 6, each + (high - low) / 6
            ends = (low, each, high)

            def both(drawn: float, name: str = name, value: float = value) -> Number:
                causes = (("temperature", f"{drawn:.4g}"), (name, f"{value:g}"))
                return Number(causes, temperature=drawn, kept=(name, value), parameters=2)

            fitted = _refined(both, ends, rows, few)
            yield fitted
            if few.copies is not None:  # a filter may end within a group
                yield both(round(fitted.temperature, 2))
    penalties = (1.01, 1.03, 1.05, 1.08, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)
    yield _refined(partial(_changed, RAW, "repetition"), penalties, rows, few)
    if any(written for _, written in few.before):
        for key in ("presence", "frequency"):
            amounts = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
            yield _refined(partial(_changed, RAW, key), amounts, rows, few)


def several(one: Number, logits: Tensor, places: Entries) -> Iterator[Number]:
    """`one` together with another cause, where both can be."""
    if one == RAW or one.kept is not None or one.temperature != 1.0:
        return
    few, rows = _fitted_on(logits, places)
    yield _refined(partial(_changed, one, "temperature"), _DRAWN, rows, few)


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
