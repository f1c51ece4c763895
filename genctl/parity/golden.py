"""A reference that is a recording: compare a side with the best tokens of each position of an earlier run.

What rounding does is measured on the side itself. Where it differs from the recorded one in a knob that changes the
weights, and has the same checkpoint, the recorded side is loaded for a moment, so that the effect of the weights can be
taken away as for two sides; `noise` explains how.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from genctl.config.check import Wrong, check
from genctl.engines.protocol import never
from genctl.errors import GenctlError, UsageError
from genctl.identity import change, changed, checkpoint_change, versions
from genctl.parity.measure import NOTHING_COMPARED, UNMEASURED, pick
from genctl.parity.noise import ALLOWANCE, MeasuredNoise, measure_noise, read_rows
from genctl.parity.oracle import places_read
from genctl.parity.partial import known_top, position, rows_of, shift_of
from genctl.parity.partings import concluded
from genctl.parity.sides import LocalSide
from genctl.parity.values import Golden, KnownTop, Parity, Place, Position, Text, TextParting, Verdict

# knobs that change what is computed from the same checkpoint; with an adapter it is another one
WEIGHTS = ("dtype", "quantize", "runtime")
Chances: TypeAlias = tuple[tuple[float, float], tuple[float, float]]
CHECKED = 64  # positions on which noise is measured at most


def record(
    side: LocalSide, texts: Sequence[Text], *, written: bool, interrupted: Callable[[], str] = never
) -> tuple[Golden, dict[str, str]]:
    """What the side computes before each token of texts; and why texts are missing, by id."""
    known: dict[Place, KnownTop] = {}

    def receive(place: int, index: int, logits: Tensor) -> None:
        text = texts[place]
        known[text.id, index] = known_top(logits.detach().float().cpu(), text.token_ids[index])

    failed = side.read(texts, receive, interrupted=interrupted)
    kept = tuple(text for text in texts if text.id not in failed)
    golden = Golden(
        reference=side.name,
        fingerprint=side.session.loaded.fingerprint(),
        dtype=_dtype(side),
        knobs=_knobs(side),
        vocabulary=side.vocabulary,
        written=written,
        new_tokens=side.resolved.generation.max_new_tokens,
        versions=versions("torch", "transformers"),
        texts=kept,
        known={place: one for place, one in known.items() if place[0] not in failed},
    )
    return golden, failed


def _dtype(side: LocalSide) -> str:
    return str(side.session.forward.dtype).removeprefix("torch.")


def _knobs(side: LocalSide) -> dict[str, Any]:
    runtime = side.session.planner.runtime
    found = {
        "quantize": side.session.loaded.quantize,
        "adapter": runtime.adapter,
        "cache_implementation": side.resolved.generation.cache_implementation,
        # each runtime rounds layers of its own to codes
        "runtime": None if side.session.loaded.quantize is None else side.session.forward.kind,
    }
    return {name: value for name, value in found.items() if value is not None}


def compare(
    golden: Golden,
    side: LocalSide,
    *,
    on_position: Callable[[Position], object] = lambda position: None,
    on_stage: Callable[[str], object] = lambda stage: None,
    interrupted: Callable[[], str] = never,
) -> Parity:
    """Compare a side with a recording. Raises ModelError."""
    on_stage("reading")
    found: dict[Place, Position] = {}
    chances: dict[Place, Chances] = {}  # where first choices differ

    def receive(place: int, index: int, logits: Tensor) -> None:
        text = golden.texts[place]
        known = golden.known[text.id, index]
        one = position((text.id, index, text.token_ids[index]), known, logits.detach().float().cpu())
        found[text.id, index] = one
        if not one.same:
            chances[text.id, index] = _chances(one, known, logits)
        on_position(one)

    failed = side.read(golden.texts, receive, interrupted=interrupted)
    order = [(text.id, index) for text in golden.texts for index in range(len(text.token_ids))]
    positions = [found[place] for place in order if place in found and place[0] not in failed]
    parted = _parted(positions) if golden.written else []
    changed = differences(golden, side)
    judged: _Judged | None = None
    notes = list(changed.values())
    if any(each.shift for each in positions) and not interrupted():
        on_stage("noise")
        try:
            judged = _judged(golden, side, positions, parted, changed)
        except GenctlError as error:
            notes.append(f"rounding could not be measured: {error.message}")
    partings = [_parting(each, judged, changed, chances[each.text, each.index]) for each in parted]
    return concluded(
        (golden.reference, side.name),
        golden.texts,
        positions,
        partings,
        _verdict(golden, positions, judged, changed),
        noise=UNMEASURED if judged is None else judged.measured.noise,
        notes=tuple(notes),
        failed=failed,
    )


def differences(golden: Golden, side: LocalSide) -> dict[str, str]:
    """The knobs in which a side differs from the recorded one, with sentences; "checkpoint" is one of them."""
    found: dict[str, str] = {}
    then, now = golden.fingerprint, side.session.loaded.fingerprint()
    if then != now:
        found["checkpoint"] = checkpoint_change(side.name, then, now, before=golden.reference, what="the recording")
    recorded, own = {**golden.knobs, "dtype": golden.dtype}, {**_knobs(side), "dtype": _dtype(side)}
    for name, old, new in changed(recorded, own):
        if name != "runtime" or None not in (old, new):
            found[name] = change(name, old, new)
    return found


def _chances(one: Position, known: KnownTop, logits: Tensor) -> Chances:
    """The log-probabilities of both first choices on both sides; NaN where the recording does not have them."""
    recorded, now = dict(known.top), logits.detach().double().log_softmax(-1)
    tokens = one.first_reference, one.first_other
    mine, theirs = ([recorded.get(token, math.nan) for token in tokens], [float(now[token]) for token in tokens])
    return (mine[0], mine[1]), (theirs[0], theirs[1])


def _parted(positions: Iterable[Position]) -> list[Position]:
    """The first position of each text at which the side chooses another token: there its own text parts."""
    first: dict[str, Position] = {}
    for each in positions:
        if not each.same:
            first.setdefault(each.text, each)
    return list(first.values())


@dataclass(frozen=True)
class _Judged:
    """MeasuredNoise noise, and what remains at each checked position, as a multiple of the rounding there."""

    measured: MeasuredNoise
    ratios: Mapping[Place, float]


def _judged(
    golden: Golden, side: LocalSide, positions: Sequence[Position], parted: Sequence[Position], changed: Iterable[str]
) -> _Judged:
    texts = {text.id: text for text in golden.texts}
    readings = pick(
        positions, golden.texts, [(texts[each.text], texts[each.text], each.index) for each in parted], CHECKED
    )
    recorded = _recorded(golden, side) if {*changed} & {*WEIGHTS} and "checkpoint" not in changed else side
    rows = read_rows(side, readings)
    measured = measure_noise(
        recorded, side, readings, (rows if recorded is side else read_rows(recorded, readings), rows)
    )
    places = places_read(readings)
    ids, values = rows_of([golden.known[place] for place in places])
    remains, scales, largest = [], [], 0.0
    for number in range(len(places)):
        logprobs, own = rows[number].double().log_softmax(-1)[ids[number]], ids[number]
        remains.append(float(shift_of(logprobs - values[number] - measured.weights[number, own])))
        shaken = shift_of(measured.rounding[:, number, own])
        smallest = torch.finfo(torch.float32).eps * float(logprobs.abs().max())  # the file has float32 numbers
        scales.append(max(float(shaken.square().mean().sqrt()), smallest))
        largest = max(largest, float(shaken.max()))
    floor = ALLOWANCE * largest / measured.noise.allowed  # as for two sides: rounding may jump anywhere
    ratios = {place: left / max(scale, floor) for place, left, scale in zip(places, remains, scales, strict=True)}
    return _Judged(measured, ratios)


def _recorded(golden: Golden, side: LocalSide) -> LocalSide:
    """The recorded side, loaded from the same checkpoint with the knobs of the recording."""
    planner = side.session.planner
    changes: dict[str, Any] = {name: golden.knobs.get(name) for name in WEIGHTS}
    changes |= {"dtype": golden.dtype, "runtime": changes["runtime"] or planner.runtime.runtime}
    for name, value in changes.items():
        try:
            check(name, value)
        except Wrong as mistake:
            raise UsageError(f"of the recording: {mistake}") from None
    checkpoint = side.session.loaded.checkpoint
    unpacked = checkpoint is not None and bool(checkpoint.gguf) and changes["quantize"] is None
    runtime = replace(planner.runtime, **changes, dequantize=unpacked)
    return LocalSide(golden.reference, side.loaded_again(runtime), side.resolved, width=side.width)


def _verdict(
    golden: Golden, positions: Sequence[Position], judged: _Judged | None, changed: Mapping[str, str]
) -> tuple[Verdict | None, str]:
    if not positions:
        return None, NOTHING_COMPARED
    if not any(each.shift for each in positions):
        return "tie", "every recorded number is equal"
    if judged is None:
        return "drift", "the numbers differ, and rounding could not be measured"
    noise, ratios = judged.measured.noise, sorted(judged.ratios.values())
    median, (place, largest) = ratios[len(ratios) // 2], max(judged.ratios.items(), key=lambda pair: pair[1])
    is_explained = median <= noise.typical_allowed and all(ratio <= noise.allowed for ratio in ratios)  # NaN is not
    explained = (
        "weights and dtype explain this; the rest is" if changed else "rounding explains this: the difference is"
    )
    if not is_explained:
        text = next(text for text in golden.texts if text.id == place[0])
        reason = f"{text.token(place[1])}: the rest is {largest:.2g} × rounding error"
        return "defect", f"{reason}, and rounding reaches {noise.allowed:.2g}"
    return ("drift" if changed else "tie"), f"{explained} {median:.2g} × rounding error"


def _parting(each: Position, judged: _Judged | None, changed: Mapping[str, str], chances: Chances) -> TextParting:
    """Where the side's own text parts from the recorded one."""
    verdict: Verdict = "drift"
    reason = "rounding could not be measured"
    if judged is not None:
        noise, ratio = judged.measured.noise, judged.ratios.get((each.text, each.index))
        if each.margin <= noise.margin:
            verdict, reason = "tie", f"the margin of {each.margin:.2g} nats is below the noise of {noise.margin:.2g}"
        elif ratio is not None and ratio > noise.allowed:
            verdict = "defect"
            reason = f"the margin is {each.margin:.2g} nats, and what remains is {ratio:.2g} times the rounding"
        else:
            verdict = "drift" if changed else "tie"
            reason = f"the margin is {each.margin:.2g} nats, and what differs is explained"
    tokens = each.first_reference, each.first_other
    return TextParting(each.text, each.index, *tokens, *chances, each.margin, verdict, reason)
