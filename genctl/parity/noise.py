"""How far apart two sides may be while computing the same function: measured at a few positions.

docs/parity.md, "How the verdict is found", explains the method. a and b are the logits of the reference and of the
other side, A and B those of exact arithmetic with the weights of each. The weights explain B - A. The rest,
r = (b - a) - (B - A), is rounding if both sides compute the same; shaken readings show how large rounding is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from genctl.errors import GenctlError, count
from genctl.parity.oracle import Oracle, Reading, places_read
from genctl.parity.sides import LocalSide
from genctl.parity.statistics import quantiles, shift
from genctl.parity.values import Noise, Variation

EQUAL = 1e-9  # times the largest logit
TINY = torch.finfo(torch.float64).tiny
SEEDS = 4  # shaken readings of each side
ALLOWANCE = 2.0  # an implementation may round twice as much as the shaken readings of another


@dataclass(frozen=True)
class MeasuredNoise:
    """The noise at the M checked positions, in the order of the readings."""

    noise: Noise
    readings: tuple[Reading, ...]
    ratios: Tensor  # f64 [M], of the rest r to rounding
    weights: Tensor  # f64 [M, V], what the weights explain: B - A
    rounding: Tensor  # f32 [SEEDS, M, V], of the difference between both sides
    moved: float  # nats: the most by which rounding moves the margin of the first two choices
    equal: bool  # whether both sides have equal weights and compute in one dtype
    oracles: tuple[Oracle, Oracle]
    dtypes: tuple[torch.dtype, torch.dtype]

    def token(self, place: int) -> str:
        """A checked position, as messages call it."""
        return [reading.text.token(index) for reading in self.readings for index in reading.indices][place]

    def reach(self, text: str, index: int, tokens: tuple[int, int]) -> float:
        """The most by which weights and rounding move the margin between two tokens at a position, in nats.

        For a position that was not checked: the most at those that were.
        """
        places = places_read(self.readings)
        if (text, index) not in places:
            return ALLOWANCE * (self.moved + float(self.weights.abs().amax()))
        place, (mine, theirs) = places.index((text, index)), tokens
        by_weights = abs(float(self.weights[place, mine] - self.weights[place, theirs]))
        here = float((self.rounding[:, place, mine] - self.rounding[:, place, theirs]).abs().max())
        return by_weights + ALLOWANCE * max(here, self.moved)


def measure_noise(
    reference: LocalSide,
    other: LocalSide,
    readings: Sequence[Reading],
    rows: tuple[Tensor, Tensor],
) -> MeasuredNoise:
    """Measure noise on `readings`; `rows` are the logits f32 [M, V] of both sides there. Raises ModelError."""
    a, b = rows
    mine, theirs = _oracles(reference, other)
    dtypes = reference.session.forward.dtype, other.session.forward.dtype
    exact_a = mine.exact(readings, dtypes[0])
    same = theirs is mine and dtypes[0] == dtypes[1]
    exact_b = exact_a if same else theirs.exact(readings, dtypes[1])
    by_weights = torch.zeros_like(exact_a) if same else exact_b - exact_a
    # such as a folder and its GGUF file: with equal weights, float64 differs only by the order of sums
    same = same or (dtypes[0] == dtypes[1] and float(by_weights.abs().max()) < EQUAL * float(exact_a.abs().max()))
    form = other.resolved.generation.cache_implementation
    if form == "quantized" != reference.resolved.generation.cache_implementation:
        generation = replace(reference.resolved.generation, cache_implementation=form)
        coded = LocalSide(
            reference.name, reference.session, replace(reference.resolved, generation=generation), width=reference.width
        )
        by_weights = by_weights + read_rows(coded, readings).double() - a  # the effect of rounding keys and values
        same = False
    best = a.topk(min(2, a.shape[-1]), -1).indices
    # holds one reading of the vocabulary at a time; what stays is in float32
    rounding, shaken, margins = [], [], list[float]()
    before: Tensor | None = None
    for seed in range(SEEDS):
        own_rounding = mine.shaken(readings, dtypes[0], seed) - exact_a
        if before is not None:
            margins.append(_margin(best, own_rounding - before))
        difference = theirs.shaken(readings, dtypes[1], SEEDS + seed) - exact_b - own_rounding
        shaken.append(shift(difference))
        rounding.append(difference.float())
        before = own_rounding.float()
    del exact_b, before
    variations, own = [], []
    widths = {} if reference.whole else {"alone": 1, "together": max(2, min(len(readings), 8))}
    for name, width in widths.items():  # the reference against itself
        each = read_rows(reference, readings, width=width)
        moved = each.double() - a
        own.append(shift(moved))
        margins.append(_margin(best, moved))
        variations.append(Variation(name, quantiles(own[-1].tolist()), torch.equal(each, a)))
    name = str(dtypes[1]).removeprefix("torch.")
    from_exact = shift(a - exact_a)
    variations.append(Variation("float64", quantiles(from_exact.tolist()), False))
    variations.append(Variation(f"{name} rounding", quantiles(torch.cat(shaken).tolist()), False))
    by_rounding = torch.stack(shaken)  # [SEEDS, M]
    scale = by_rounding.square().mean(0).sqrt()
    for each in own:
        scale = torch.maximum(scale, each)  # what the reference does to itself is no fault of the other
    spread = by_rounding / mean_of_others(by_rounding).sqrt().clamp(min=TINY)  # the `ratios` of a side without a fault
    remains = shift(b.double() - a - by_weights)
    typical = float((remains / scale.clamp(min=TINY)).median())
    # 8-bit codes make rounding jump at some positions, perhaps where no shaken reading jumped
    scale = torch.maximum(scale, by_rounding.max() / spread.max())
    ratios = remains / scale.clamp(min=TINY)
    allowed, typical_allowed = reached(spread)
    explained = (shift(by_weights).square() + scale.square()).sqrt()
    noise = Noise(
        positions=len(a),
        variations=tuple(variations),
        margin=max(margins, default=0.0),
        reference=float(from_exact.median()),
        explained=float(explained.median()),
        residual=float(remains.median()),
        allowed=allowed,
        typical_ratio=typical,
        largest_ratio=float(ratios.max()),
        how=(
            f"{count(len(a), 'position')}: float64 reference, {SEEDS} runs with random {name} rounding, "
            "single and batched"
        ),
        typical_allowed=typical_allowed,
    )
    largest = max(_margin(best, each) for each in rounding)
    return MeasuredNoise(
        noise, tuple(readings), ratios, by_weights, torch.stack(rounding), largest, same, (mine, theirs), dtypes
    )


def _margin(best: Tensor, difference: Tensor) -> float:
    """The most by which a difference [M, V] moves the margin between the two best tokens int64 [M, 2], in nats."""
    return float(difference.gather(1, best).diff(dim=1).abs().max()) if best.shape[1] > 1 else 0.0


def reached(spread: Tensor) -> tuple[float, float]:
    """The largest and the typical ratio allowed, from the ratios of shaken readings among themselves [SEEDS, M]."""
    return ALLOWANCE * float(spread.max()), ALLOWANCE * max(float(spread.median(dim=1).values.max()), 1.0)


def mean_of_others(shaken: Tensor) -> Tensor:
    """For each shaken reading the mean square of the others, [SEEDS, M]."""
    square = shaken.square()
    return (square.sum(0, keepdim=True) - square) / (len(shaken) - 1)


def _oracles(reference: LocalSide, other: LocalSide) -> tuple[Oracle, Oracle]:
    """The oracle of each side: a shared one if they have the same files and weights."""
    kind: Any = reference.session.forward.kind
    own: Any = other.session.forward.kind
    adapters = [side.session.planner.runtime.adapter for side in (reference, other)]
    quantized = [side.session.loaded.quantize for side in (reference, other)]
    mine = Oracle(reference, kind, quantize=quantized[0])
    same = quantized[0] == quantized[1] and adapters[0] == adapters[1]
    if quantized[0] is not None:  # runtime and dtype decide which layers have codes, and of which numbers
        same = same and kind == own and reference.session.forward.dtype == other.session.forward.dtype
    if same and reference.session.loaded.fingerprint() == other.session.loaded.fingerprint():
        return mine, mine
    if quantized[1] is not None or adapters[1] is not None:  # the side's own codes explain the difference
        return mine, Oracle(other, own, quantize=quantized[1])
    try:
        return mine, Oracle(other, kind)
    except GenctlError:
        if kind == own:
            raise
        return mine, Oracle(other, own)


def read_rows(side: LocalSide, readings: Sequence[Reading], *, width: int | None = None) -> Tensor:
    """The logits f32 [M, V] of a side at the positions of readings."""
    own = LocalSide(side.name, side.session, side.resolved, width=width or side.width, whole=side.whole)
    wanted = {(place, index) for place, reading in enumerate(readings) for index in reading.indices}
    rows: dict[tuple[int, int], Tensor] = {}

    def receive(place: int, index: int, logits: Tensor) -> None:
        if (place, index) in wanted:
            rows[place, index] = logits.detach().float().cpu().clone()

    texts = [
        replace(reading.text, token_ids=reading.text.token_ids[: max(reading.indices) + 1]) for reading in readings
    ]
    failed = own.read(texts, receive)
    if failed:
        raise GenctlError(next(iter(failed.values())))
    return torch.stack([rows[place] for place in sorted(rows)])
