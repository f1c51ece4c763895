"""Whose fault it is: the first sublayer of a model whose output parts by more than rounding does.

The method is that of the verdict (`noise`), on the outputs of sublayers instead of logits. A text is read in one pass
first. If both sides agree there, it is read step by step, and at last the batch is what remains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from genctl.parity.noise import ALLOWANCE, MeasuredNoise
from genctl.parity.oracle import Oracle
from genctl.parity.sides import LocalSide
from genctl.parity.taps import Sublayer, tapped
from genctl.parity.values import Fault, LayerDifference, Text

SEEDS = 2
POSITIONS = 32  # the last ones of a text, up to the first that parts
Outputs = dict[Sublayer, Tensor]  # f64 [positions, E] of each part


@dataclass(frozen=True)
class LayerCurve:
    """A curve, and the first of its points that parts."""

    curve: tuple[LayerDifference, ...]
    first: LayerDifference | None


def find_fault(
    reference: LocalSide, other: LocalSide, measured: MeasuredNoise
) -> tuple[Fault | None, tuple[LayerDifference, ...]]:
    """The fault, and the curve of the text with the largest ratio. Raises ModelError.

    Sides of different architectures or runtimes have no parts in common: then there is neither.
    """
    text, begin = _window(measured)
    ratio = measured.ratios > measured.noise.allowed
    parting = begin if not bool(ratio.any()) else _first(measured, text)
    count = min(POSITIONS, len(text.token_ids))
    exact, rounding = _explained(measured, text, count)
    if not exact[0]:
        return None, ()
    eps = max(torch.finfo(dtype).eps for dtype in measured.dtypes)

    def compared(*, whole: bool) -> LayerCurve:
        outputs = [_outputs(side, text, count, whole=whole) for side in (reference, other)]
        return _compare(outputs[0], outputs[1], exact, rounding, eps)

    whole = compared(whole=True)
    length = len(text.token_ids) - count  # of the tokens before the window
    if not whole.curve:
        return None, ()
    if whole.first is not None:
        return _fault(text, whole, length, "read in one pass"), _shifted(whole.curve, length)
    steps = compared(whole=False)
    if steps.first is not None:
        found = _fault(
            text,
            steps,
            length,
            "only in steps: read in one pass both sides agree, so it is the cache, a position or a mask",
        )
        return found, found.curve
    reason = "read alone both sides agree, in one pass and in steps: it is the batch, or what a prompt cache holds"
    curve = _shifted(steps.curve, length)
    place = len(text.prompt_ids) + parting
    return Fault(text.id, None, "batch", "", place, float(measured.ratios.max()), reason, curve), curve


def _fault(text: Text, found: LayerCurve, length: int, how: str) -> Fault:
    point = found.first
    assert point is not None
    where = "before the first layer or after the last" if point.layer is None else f"layer {point.layer}"
    reason = f"{point.sublayer} of {where} ({point.name}) is the first part whose output differs, {how}"
    place = len(text.prompt_ids) + length + point.position
    return Fault(
        text.id, point.layer, point.sublayer, point.name, place, point.size, reason, _shifted(found.curve, length)
    )


def _shifted(curve: tuple[LayerDifference, ...], length: int) -> tuple[LayerDifference, ...]:
    """Positions as indices of a text's tokens."""
    return tuple(replace(point, position=point.position + length) for point in curve)


def _window(measured: MeasuredNoise) -> tuple[Text, int]:
    """The text with the largest ratio, up to a little beyond the first position that parts; and that position."""
    places = [(reading.text, index) for reading in measured.readings for index in reading.indices]
    text, index = places[int(measured.ratios.argmax())]
    first = _first(measured, text)
    first = index if first < 0 else min(first, index)
    return replace(text, token_ids=text.token_ids[: max(first + 4, min(POSITIONS, len(text.token_ids)))]), first


def _first(measured: MeasuredNoise, text: Text) -> int:
    """The first checked position of a text that parts; -1 if none does."""
    places = [(reading.text.id, index) for reading in measured.readings for index in reading.indices]
    bound = min(measured.noise.allowed, max(measured.noise.typical_allowed, ALLOWANCE))
    found = [
        index
        for (id, index), ratio in zip(places, measured.ratios.tolist(), strict=True)
        if id == text.id and ratio > bound
    ]
    return min(found, default=-1)


def _outputs(side: LocalSide, text: Text, count: int, *, whole: bool) -> Outputs:
    """What the parts of a side put out at the last `count` positions of a text that is read alone."""
    with tapped(side.session) as (session, taps):
        alone = LocalSide(side.name, session, side.resolved, whole=whole)
        alone.read([text], lambda place, index, logits: None)
        return taps.last(count)


def _explained(measured: MeasuredNoise, text: Text, count: int) -> tuple[tuple[Outputs, Outputs], list[Outputs]]:
    """The exact outputs of both sides, and the rounding of their difference for each seed."""
    (mine, theirs), dtypes = measured.oracles, measured.dtypes

    def read(oracle: Oracle) -> Callable[[], Outputs]:
        return lambda: _outputs(oracle.side, text, count, whole=True)

    exact = mine.exactly(dtypes[0], read(mine)), theirs.exactly(dtypes[1], read(theirs))
    rounding: list[Outputs] = []
    for seed in range(SEEDS):
        one = mine.shakily(dtypes[0], seed, read(mine))
        another = theirs.shakily(dtypes[1], SEEDS + seed, read(theirs))
        rounding.append(
            {part: another[part] - exact[1][part] - one[part] + exact[0][part] for part in one if part in another}
        )
    return exact, rounding


def _compare(
    one: Outputs, another: Outputs, exact: tuple[Outputs, Outputs], rounding: list[Outputs], eps: float
) -> LayerCurve:
    """The curve over all parts that every reading has, in the order of the reference's."""
    tiny = torch.finfo(torch.float64).tiny
    curve: list[LayerDifference] = []
    first: LayerDifference | None = None
    for part, a in one.items():
        if not all(part in outputs for outputs in (another, *exact, *rounding)):
            continue
        size = a.norm(dim=-1).clamp(min=tiny)
        difference = another[part] - a
        by_weights = exact[1][part] - exact[0][part]
        shaken = torch.stack([each[part].norm(dim=-1) for each in rounding])  # [SEEDS, positions]
        # a result is rounded at least once, also where no operation of torch is seen
        scale = torch.maximum(shaken.square().mean(0).sqrt(), eps * size)
        spread = float((shaken.amax(0) / shaken.amin(0).clamp(min=tiny)).median())
        remains = (difference - by_weights).norm(dim=-1)
        beyond = remains > ALLOWANCE * max(spread, 2.0) * scale
        relative = difference.norm(dim=-1) / size
        explained = (by_weights.norm(dim=-1).square() + scale.square()).sqrt() / size
        place = int(relative.argmax())
        point = LayerDifference(*part, float(relative[place]), float(explained[place]), place)
        curve.append(point)
        if first is None and bool(beyond.any()):
            place = int(beyond.nonzero()[0])
            first = LayerDifference(*part, float(relative[place]), float(explained[place]), place)
    return LayerCurve(tuple(curve), first)
