"""Where a fault is: the first layer of a model whose output differs by more than rounding does.

The method is that of the verdict (`noise`), on the outputs of layers instead of logits. A text is read in one pass
first. If both sides agree there, it is read step by step, and at last the batch is what remains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from genctl.errors import ModelError
from genctl.parity.noise import ALLOWANCE, TINY, MeasuredNoise
from genctl.parity.oracle import places_read
from genctl.parity.sides import LocalSide, Outputs, Sublayer, tapped
from genctl.parity.values import ENCODER, Fault, LayerDifference, Text

SEEDS = 2
POSITIONS = 32  # the last ones of a text, up to the first that parts; and the last ones of a source


@dataclass(frozen=True)
class FoundFault:
    """The fault, the curve of the text with the largest ratio, and a sentence on parts that only one side has."""

    fault: Fault | None = None
    curve: tuple[LayerDifference, ...] = ()
    notes: tuple[str, ...] = ()


class LayerCurve(NamedTuple):
    """A curve, and the first of its points that parts."""

    curve: tuple[LayerDifference, ...]
    first: LayerDifference | None


class _Expected(NamedTuple):
    """What weights and rounding explain of the outputs of both sides."""

    exact: tuple[Outputs, Outputs]
    rounding: list[Outputs]  # of the difference, for each seed
    eps: float


def find_fault(reference: LocalSide, other: LocalSide, measured: MeasuredNoise) -> FoundFault:
    """The first part that parts, read in one pass or in steps. Raises ModelError.

    Sides of different architectures have no parts in common: then there is no curve.
    """
    text, begin = _text(measured)
    expected = _expected(measured, text)
    if not expected.exact[0]:
        return FoundFault()
    notes: tuple[str, ...] = ()
    curve = LayerCurve((), None)
    for whole, how in (
        (True, "read in one pass"),
        (False, "only in steps: read in one pass both sides agree, so it is the cache, a position or a mask"),
    ):
        mine, theirs = (_outputs(side, text, whole=whole) for side in (reference, other))
        notes = _left_out(reference, mine, theirs) + _left_out(other, theirs, mine)
        curve = _compare(text, mine, theirs, expected)
        if not curve.curve:
            return FoundFault(notes=notes)
        if (point := curve.first) is not None:
            reason = f"{point.name} is the first part whose output differs, {how}"
            place = point.position + len(text.prompt_ids) * (not point.sublayer.startswith(ENCODER))
            fault = Fault(text.id, point.layer, point.sublayer, point.name, place, point.size, reason, curve.curve)
            return FoundFault(fault, curve.curve, notes)
    reason = "read alone both sides agree, in one pass and in steps: it is the batch, or what a prompt cache holds"
    place = len(text.prompt_ids) + begin
    fault = Fault(text.id, None, "batch", "", place, float(measured.ratios.max()), reason, curve.curve)
    return FoundFault(fault, curve.curve, notes)


def _left_out(side: LocalSide, own: Outputs, others: Outputs) -> tuple[str, ...]:
    """A sentence on the parts that the other side does not have, those of all layers as one."""
    kinds: dict[str, list[Sublayer]] = {}
    for part in own:
        if part not in others:
            kinds.setdefault(part.sublayer, []).append(part)
    if not kinds:
        return ()
    words = [f"{kind} ({parts[0].name}{', …' * (len(parts) > 1)})" for kind, parts in kinds.items()]
    return (f"layers: only {side.name} has {', '.join(words)}; this is left out",)


def _text(measured: MeasuredNoise) -> tuple[Text, int]:
    """The text with the largest ratio, up to a little beyond the first position that parts; and that position."""
    worst = int(measured.ratios.argmax())
    text, index = [(reading.text, index) for reading in measured.readings for index in reading.indices][worst]
    bound = min(measured.noise.allowed, max(measured.noise.typical_allowed, ALLOWANCE))
    ratios = zip(places_read(measured.readings), measured.ratios.tolist(), strict=True)
    parting = min((at for (id, at), ratio in ratios if id == text.id and ratio > bound), default=-1)
    first = index if parting < 0 else min(parting, index)
    return replace(text, token_ids=text.token_ids[: max(first + 4, min(POSITIONS, len(text.token_ids)))]), first


def _outputs(side: LocalSide, text: Text, *, whole: bool) -> Outputs:
    """What the parts of a side put out at the last `POSITIONS` of a text that is read alone. Raises ModelError."""
    length = len(text.token_ids)
    count = min(POSITIONS, length)
    with tapped(side.session, count) as (session, taps):
        alone = LocalSide(side.name, session, side.resolved, whole=whole)
        if whole:
            for _, logits in alone.whole_text(text, range(length - count, length)):
                taps.receive_logits(logits)
        elif failed := alone.read([text], lambda place, index, logits: taps.receive_logits(logits)):
            raise ModelError(failed[text.id])
        return taps.outputs()


def _expected(measured: MeasuredNoise, text: Text) -> _Expected:
    """The exact outputs of both sides, and the rounding of their difference."""
    pairs = [
        (oracle, dtype, partial(_outputs, oracle.side, text, whole=True))
        for oracle, dtype in zip(measured.oracles, measured.dtypes, strict=True)
    ]
    first, second = (oracle.exactly(dtype, read) for oracle, dtype, read in pairs)
    rounding: list[Outputs] = []
    for seed in range(SEEDS):
        one, another = (
            oracle.shakily(dtype, seed + place * SEEDS, read) for place, (oracle, dtype, read) in enumerate(pairs)
        )
        rounding.append({
            part: ((another[part] - second[part]) - (one[part] - first[part])).float()
            for part in one
            if all(part in outputs for outputs in (another, first, second))
        })  # fmt: skip
    return _Expected((first, second), rounding, max(torch.finfo(dtype).eps for dtype in measured.dtypes))


def _compare(text: Text, one: Outputs, another: Outputs, expected: _Expected) -> LayerCurve:
    """The curve over all parts that every reading has, in the order of the reference's."""
    curve: list[LayerDifference] = []
    first: LayerDifference | None = None
    exact, rounding, eps = expected
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
        # indices of the text, or of the source where the part is that of an encoder
        begin = len(text.prompt_ids if part.of_encoder else text.token_ids) - len(relative)
        points = [
            LayerDifference(
                part.layer, part.sublayer, part.name, float(relative[place]), float(explained[place]), begin + place
            )
            for place in (int(relative.argmax()), *beyond.nonzero()[:1, 0].tolist())
        ]
        curve.append(points[0])
        if first is None and points[1:]:
            first = points[1]
    return LayerCurve(tuple(curve), first)
