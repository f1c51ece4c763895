"""Whose fault it is: the first sublayer of a model whose output parts by more than rounding does.

The method is that of the verdict (`noise`), on the outputs of sublayers instead of logits. A text is read in one pass
first. If both sides agree there, it is read step by step, and at last the batch is what remains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from genctl.errors import ModelError
from genctl.parity.noise import ALLOWANCE, TINY, MeasuredNoise
from genctl.parity.oracle import Oracle, places_read
from genctl.parity.sides import LocalSide
from genctl.parity.taps import Outputs, Sublayer, tapped
from genctl.parity.values import ENCODER, Fault, LayerDifference, Text

SEEDS = 2
POSITIONS = 32  # the last ones of a text, up to the first that parts; and the last ones of a source


@dataclass(frozen=True)
class LayerCurve:
    """A curve, and the first of its points that parts."""

    curve: tuple[LayerDifference, ...]
    first: LayerDifference | None


@dataclass(frozen=True)
class FoundFault:
    """The fault, the curve of the text with the largest ratio, and a sentence on parts that only one side has."""

    fault: Fault | None = None
    curve: tuple[LayerDifference, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Window:
    """The tokens whose layers are compared: the last `count` of a text."""

    text: Text
    count: int

    def index(self, part: Sublayer, place: int, size: int) -> int:
        """The index of a token: of the text, or, for one of the `size` positions of an encoder, of the source."""
        length = len(self.text.prompt_ids) if part.of_encoder else len(self.text.token_ids)
        return length - size + place


def find_fault(reference: LocalSide, other: LocalSide, measured: MeasuredNoise) -> FoundFault:
    """The first part that parts, read in one pass or in steps. Raises ModelError.

    Sides of different architectures have no parts in common: then there is no curve.
    """
    text, begin = _window(measured)
    ratio = measured.ratios > measured.noise.allowed
    parting = begin if not bool(ratio.any()) else _first(measured, text)
    window = _Window(text, min(POSITIONS, len(text.token_ids)))
    exact, rounding = _explained(measured, window)
    if not exact[0]:
        return FoundFault()
    eps = max(torch.finfo(dtype).eps for dtype in measured.dtypes)
    notes: tuple[str, ...] = ()

    def compared(*, whole: bool) -> LayerCurve:
        nonlocal notes
        outputs = [_outputs(side, window, whole=whole) for side in (reference, other)]
        notes = _left_out(reference, outputs[0], outputs[1]) + _left_out(other, outputs[1], outputs[0])
        return _compare(window, outputs[0], outputs[1], exact, rounding, eps)

    whole = compared(whole=True)
    if not whole.curve:
        return FoundFault(notes=notes)
    if whole.first is not None:
        return FoundFault(_fault(text, whole, "read in one pass"), whole.curve, notes)
    steps = compared(whole=False)
    if steps.first is not None:
        how = "only in steps: read in one pass both sides agree, so it is the cache, a position or a mask"
        return FoundFault(_fault(text, steps, how), steps.curve, notes)
    reason = "read alone both sides agree, in one pass and in steps: it is the batch, or what a prompt cache holds"
    place = len(text.prompt_ids) + parting
    fault = Fault(text.id, None, "batch", "", place, float(measured.ratios.max()), reason, steps.curve)
    return FoundFault(fault, steps.curve, notes)


def _fault(text: Text, found: LayerCurve, how: str) -> Fault:
    point = found.first
    assert point is not None
    where = "before the first layer or after the last" if point.layer is None else f"layer {point.layer}"
    reason = f"{point.sublayer} of {where} ({point.name}) is the first part whose output differs, {how}"
    place = point.position if point.sublayer.startswith(ENCODER) else len(text.prompt_ids) + point.position
    return Fault(text.id, point.layer, point.sublayer, point.name, place, point.size, reason, found.curve)


def _left_out(side: LocalSide, own: Outputs, others: Outputs) -> tuple[str, ...]:
    """A sentence on the parts that the other side does not have, those of all layers as one."""
    kinds: dict[tuple[str, str], list[Sublayer]] = {}
    for part in own:
        if part not in others:
            kinds.setdefault((part.sublayer, part.beside), []).append(part)
    if not kinds:
        return ()
    words = [f"{kind} ({parts[0].name}{', …' * (len(parts) > 1)})" for (kind, _), parts in kinds.items()]
    return (f"layers: only {side.name} has {', '.join(words)}; this is left out",)


def _window(measured: MeasuredNoise) -> tuple[Text, int]:
    """The text with the largest ratio, up to a little beyond the first position that parts; and that position."""
    places = [(reading.text, index) for reading in measured.readings for index in reading.indices]
    text, index = places[int(measured.ratios.argmax())]
    first = _first(measured, text)
    first = index if first < 0 else min(first, index)
    return replace(text, token_ids=text.token_ids[: max(first + 4, min(POSITIONS, len(text.token_ids)))]), first


def _first(measured: MeasuredNoise, text: Text) -> int:
    """The first checked position of a text that parts; -1 if none does."""
    bound = min(measured.noise.allowed, max(measured.noise.typical_allowed, ALLOWANCE))
    found = [
        index
        for (id, index), ratio in zip(places_read(measured.readings), measured.ratios.tolist(), strict=True)
        if id == text.id and ratio > bound
    ]
    return min(found, default=-1)


def _outputs(side: LocalSide, window: _Window, *, whole: bool) -> Outputs:
    """What the parts of a side put out at the last positions of a text that is read alone. Raises ModelError."""
    with tapped(side.session, window.count) as (session, taps):
        alone = LocalSide(side.name, session, side.resolved, whole=whole)
        if whole:
            length = len(window.text.token_ids)
            for _, logits in alone.whole_text(window.text, range(length - window.count, length)):
                taps.receive_logits(logits)
            return taps.outputs()
        failed = alone.read([window.text], lambda place, index, logits: taps.receive_logits(logits))
        if failed:
            raise ModelError(failed[window.text.id])
        return taps.outputs()


def _explained(measured: MeasuredNoise, window: _Window) -> tuple[tuple[Outputs, Outputs], list[Outputs]]:
    """The exact outputs of both sides, and the rounding of their difference for each seed."""
    (mine, theirs), dtypes = measured.oracles, measured.dtypes

    def read(oracle: Oracle) -> Callable[[], Outputs]:
        return lambda: _outputs(oracle.side, window, whole=True)

    exact = mine.exactly(dtypes[0], read(mine)), theirs.exactly(dtypes[1], read(theirs))
    rounding: list[Outputs] = []
    for seed in range(SEEDS):
        one = mine.shakily(dtypes[0], seed, read(mine))
        another = theirs.shakily(dtypes[1], SEEDS + seed, read(theirs))
        rounding.append({
            part: ((another[part] - exact[1][part]) - (one[part] - exact[0][part])).float()
            for part in one
            if all(part in outputs for outputs in (another, *exact))
        })  # fmt: skip
    return exact, rounding


def _compare(
    window: _Window,
    one: Outputs,
    another: Outputs,
    exact: tuple[Outputs, Outputs],
    rounding: list[Outputs],
    eps: float,
) -> LayerCurve:
    """The curve over all parts that every reading has, in the order of the reference's."""
    curve: list[LayerDifference] = []
    first: LayerDifference | None = None
    for part, output in one.items():
        if not all(part in outputs for outputs in (another, *exact, *rounding)):
            continue
        a, b = output.double(), another[part].double()
        if a.shape != b.shape:
            continue
        size = a.norm(dim=-1).clamp(min=TINY)
        difference = b - a
        by_weights = exact[1][part] - exact[0][part]
        shaken = torch.stack([each[part].double().norm(dim=-1) for each in rounding])  # [SEEDS, positions]
        # a result is rounded at least once, also where no operation of torch is seen
        scale = torch.maximum(shaken.square().mean(0).sqrt(), eps * size)
        spread = float((shaken.amax(0) / shaken.amin(0).clamp(min=TINY)).median())
        remains = (difference - by_weights).norm(dim=-1)
        beyond = remains > ALLOWANCE * max(spread, 2.0) * scale
        relative = difference.norm(dim=-1) / size
        explained = (by_weights.norm(dim=-1).square() + scale.square()).sqrt() / size
        places = [int(relative.argmax()), *beyond.nonzero()[:1, 0].tolist()]
        points = [
            LayerDifference(
                part.layer,
                part.sublayer,
                part.name,
                float(relative[place]),
                float(explained[place]),
                window.index(part, place, len(relative)),
            )
            for place in places
        ]
        curve.append(points[0])
        if first is None and points[1:]:
            first = points[1]
    return LayerCurve(tuple(curve), first)
