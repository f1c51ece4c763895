"""A recorded reference: compare a side with the most probable tokens at each position of an earlier run.

Rounding is measured on the side itself. If it differs from the recorded side in a knob that changes the weights, and
has the same checkpoint, the recorded side is loaded temporarily, to subtract the effect of the weights as for two
sides; `noise` explains how.

A recording has the most probable tokens of each distribution, and the total probability of the others, so KL is only
bounded: from below by the log-sum inequality, with the others as one token; from above by putting their probability
on the token that the other side finds least probable. T known tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from genctl.config.check import Wrong, check
from genctl.engines.protocol import Request, never
from genctl.errors import GenctlError, UsageError, change, changed, checkpoint_change
from genctl.parity.measure import UNMEASURED, Parted, concluded, pick, verdict_of
from genctl.parity.noise import ALLOWANCE, MeasuredNoise, measure_noise, read_rows
from genctl.parity.oracle import places_read
from genctl.parity.sides import LocalSide
from genctl.parity.statistics import first_choice
from genctl.parity.values import Bounds, Golden, KnownTop, Parity, Place, Position, Text, TextParting, Verdict
from genctl.process import versions

# knobs that change what is computed from the same checkpoint; an adapter makes it another checkpoint
WEIGHTS = ("dtype", "quantize", "runtime")
CHECKED = 64  # most positions on which noise is measured
TOP = 20  # most tokens that are recorded of a distribution
ENOUGH = 1e-6  # no more are recorded once the others have less probability than this


def record(
    side: LocalSide,
    requests: Sequence[Request],
    texts: Sequence[Text],
    prompts: Mapping[str, str],
    interrupted: Callable[[], str] = never,
) -> tuple[Golden, dict[str, str]]:
    """Record what the side writes for requests, or reads of texts; also return why texts are missing, by id.

    `prompts` are as users wrote them, by id.
    """
    failed: dict[str, str] = {}
    if requests:
        texts, failed = side.write(requests, interrupted=interrupted)
    known: dict[Place, KnownTop] = {}

    def receive(place: int, index: int, logits: Tensor) -> None:
        text = texts[place]
        known[text.id, index] = known_top(logits.detach().float().cpu(), text.token_ids[index])

    failed |= side.read(texts, receive, interrupted=interrupted)
    knobs = _knobs(side)
    golden = Golden(
        reference=side.name,
        fingerprint=side.session.loaded.fingerprint(),
        dtype=knobs.pop("dtype"),
        knobs=knobs,
        vocabulary=side.vocabulary,
        written=bool(requests),
        new_tokens=side.resolved.generation.max_new_tokens,
        versions=versions("torch", "transformers"),
        texts=tuple(
            replace(text, prompt=text.prompt or prompts.get(text.id, "")) for text in texts if text.id not in failed
        ),
        known={place: one for place, one in known.items() if place[0] not in failed},
    )
    return golden, failed


def _knobs(side: LocalSide) -> dict[str, Any]:
    """The knobs of a side that affect what it computes, if set."""
    loaded, forward = side.session.loaded, side.session.forward
    found = {
        "quantize": loaded.quantize,
        "adapter": side.session.planner.runtime.adapter,
        "cache_implementation": side.resolved.generation.cache_implementation,
        # each runtime quantises other layers
        "runtime": None if loaded.quantize is None else forward.kind,
        "dtype": str(forward.dtype).removeprefix("torch."),
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
    own: dict[Place, tuple[float, float]] = {}  # the side's log-probabilities of both first choices, where these differ

    def receive(place: int, index: int, logits: Tensor) -> None:
        text = golden.texts[place]
        row = logits.detach().float().cpu()
        one = found[text.id, index] = position(
            (text.id, index, text.token_ids[index]), golden.known[text.id, index], row
        )
        if not one.same:
            now = logits.detach().double().log_softmax(-1)
            own[text.id, index] = float(now[one.first_reference]), float(now[one.first_other])
        on_position(one)

    failed = side.read(golden.texts, receive, interrupted=interrupted)
    order = [(text.id, index) for text in golden.texts for index in range(len(text.token_ids))]
    positions = [found[place] for place in order if place in found and place[0] not in failed]
    parted: dict[str, Position] = {}  # by text: the first position at which the side chooses another token
    for each in positions if golden.written else ():
        if not each.same:
            parted.setdefault(each.text, each)
    differ = differences(golden, side)
    measured: MeasuredNoise | None = None
    notes = list(differ.values())
    if any(each.shift for each in positions) and not interrupted():
        on_stage("measuring noise")
        try:
            measured = _measured(golden, side, positions, [*parted.values()], differ)
        except GenctlError as error:
            notes.append(f"rounding could not be measured: {error.message}")
    partings = []
    for each in parted.values():
        tokens = each.first_reference, each.first_other
        recorded = dict(golden.known[each.text, each.index].top)
        logprobs = recorded.get(tokens[0], math.nan), recorded.get(tokens[1], math.nan)
        parting = _verdict_of_parting(each, measured)
        now = own[each.text, each.index]
        partings.append(TextParting(each.text, each.index, *tokens, logprobs, now, each.margin, *parting))
    noise = UNMEASURED if measured is None else measured.noise
    if measured is not None:
        typical, largest = float(measured.ratios.median()), float(measured.ratios.max())
        measured = replace(measured, noise=replace(noise, typical_ratio=typical, largest_ratio=largest))
    shown = verdict_of(positions, measured, what="recorded number")
    one = concluded((golden.reference, side.name), golden.texts, positions, partings, shown, noise)
    return replace(one, notes=tuple(notes), failed=failed)


def differences(golden: Golden, side: LocalSide) -> dict[str, str]:
    """The knobs in which a side differs from the recorded one, each with a sentence; "checkpoint" counts as one."""
    found: dict[str, str] = {}
    then, now = golden.fingerprint, side.session.loaded.fingerprint()
    if then != now:
        found["checkpoint"] = checkpoint_change(side.name, then, now, before=golden.reference, what="the recording")
    for name, old, new in changed({**golden.knobs, "dtype": golden.dtype}, _knobs(side)):
        if name != "runtime" or None not in (old, new):
            found[name] = change(name, old, new)
    return found


def _measured(
    golden: Golden,
    side: LocalSide,
    positions: Sequence[Position],
    parted: Sequence[Position],
    differ: Mapping[str, str],
) -> MeasuredNoise:
    """The measured noise, with the ratios of the recorded log-probabilities at the checked positions."""
    texts = {text.id: text for text in golden.texts}
    pairs = [Parted(texts[each.text], texts[each.text], each.index) for each in parted]
    readings = pick(positions, golden.texts, pairs, CHECKED)
    recorded = _recorded(golden, side) if {*differ} & {*WEIGHTS} and "checkpoint" not in differ else side
    rows = read_rows(side, readings)
    measured = measure_noise(
        recorded, side, readings, (rows if recorded is side else read_rows(recorded, readings), rows)
    )
    remains, scales, largest = [], [], 0.0
    for number, place in enumerate(places_read(readings)):
        ids, values = map(list, zip(*golden.known[place].top, strict=True))
        logprobs = rows[number].double().log_softmax(-1)[ids]
        remains.append(shift_of(logprobs - torch.tensor(values, dtype=torch.float64) - measured.weights[number, ids]))
        shaken = shift_of(measured.rounding[:, number, ids])
        smallest = torch.finfo(torch.float32).eps * float(logprobs.abs().max())  # the file stores float32
        scales.append(max(float(shaken.square().mean().sqrt()), smallest))
        largest = max(largest, float(shaken.max()))
    floor = ALLOWANCE * largest / measured.noise.allowed  # as for two sides: rounding may jump anywhere
    ratios = torch.stack(remains) / torch.tensor(scales).clamp(min=floor)
    return replace(measured, ratios=ratios, equal=not differ)


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


def _verdict_of_parting(each: Position, measured: MeasuredNoise | None) -> tuple[Verdict, str]:
    """The verdict where the side's own text diverges from the recorded one."""
    if measured is None:
        return "drift", "rounding could not be measured"
    noise, ratios = measured.noise, dict(zip(places_read(measured.readings), measured.ratios.tolist(), strict=True))
    margin, ratio = f"the margin is {each.margin:.2g} nats", ratios.get((each.text, each.index), 0.0)
    if each.margin <= noise.margin:
        return "tie", f"the margin of {each.margin:.2g} nats is below the noise of {noise.margin:.2g}"
    if ratio > noise.allowed:
        return "defect", f"{margin}, and the rest is {ratio:.2g} × rounding error"
    return "tie" if measured.equal else "drift", f"{margin}, and what differs is explained"


# -- distributions with only the most probable tokens known ------------------------------------------------------------


def known_top(logits: Tensor, token: int) -> KnownTop:
    """What is recorded of logits f32 [V]."""
    logprobs = logits.detach().cpu().double().log_softmax(-1)
    first = int(first_choice(logits.detach().cpu().float()[None])[0])  # the first on a tie, as everywhere
    values, ids = (part.tolist() for part in logprobs.topk(min(TOP, logprobs.shape[-1])))
    top, left = [], 1.0
    for id, value in sorted(zip(ids, values, strict=True), key=lambda one: (-one[1], one[0] != first, one[0])):
        top.append((id, f32(value)))
        left -= math.exp(value)
        if left < ENOUGH:
            break
    others = logprobs.index_fill(0, torch.tensor([id for id, _ in top]), -torch.inf)
    return KnownTop(f32(float(logprobs[token])), tuple(top), f32(math.exp(float(others.logsumexp(-1)))))


def f32(value: float) -> float:
    """The nearest float32."""
    return float(torch.tensor(value, dtype=torch.float32))


def position(place: tuple[str, int, int], known: KnownTop, logits: Tensor) -> Position:
    """The figures of a position (text, index, token). `logits` f32 [V] are those of the other side.

    Regret and rank are lower bounds if the other side's first choice is not among the known tokens.
    """
    logits = logits.detach().cpu()
    q = logits.double().log_softmax(-1)
    ids = torch.tensor([id for id, _ in known.top])
    p = torch.tensor([value for _, value in known.top], dtype=torch.float64)
    mine = dict(known.top)
    first = int(first_choice(logits.float()[None])[0])
    best = float(p[0])
    own = mine.get(first, float(p[-1]))
    rank = [id for id, _ in known.top].index(first) + 1 if first in mine else len(p) + 1
    same_numbers = known_top(logits, place[2]) == known
    low, high = (0.0, 0.0) if same_numbers else _bounds(known, p, ids, q)
    return Position(
        *place,
        kl=low,
        same=first == known.top[0][0],
        regret=max(best - own, 0.0),
        first_reference=known.top[0][0],
        first_other=first,
        rank_in_reference=rank,
        rank_in_other=1 + int((q > q[known.top[0][0]]).sum()),
        logprob_reference=known.logprob,
        logprob_other=known.logprob if same_numbers else float(q[place[2]]),
        shift=0.0 if same_numbers else float(shift_of(q[ids] - p)),
        margin=best - float(p[1]) if len(p) > 1 else 0.0,
        kl_bounds=Bounds(low, high),
    )


def _bounds(known: KnownTop, p: Tensor, ids: Tensor, q: Tensor) -> tuple[float, float]:
    sure = float((p.exp() * (p - q[ids])).sum())
    rest = q.clone()
    rest[ids] = -torch.inf
    if known.tail <= 0 or not bool(rest.isfinite().any()):
        return max(sure, 0.0), max(sure, 0.0)
    tail = math.log(known.tail)
    least = float(q[rest.isfinite()].min())
    low = sure + known.tail * (tail - float(rest.logsumexp(-1)))
    high = sure + known.tail * (min(tail, float(p[-1])) - least)
    return max(low, 0.0), max(high, low, 0.0)


def shift_of(difference: Tensor) -> Tensor:
    """Root mean square of differences over known tokens [..., T] without their mean -> [...]."""
    return (difference - difference.mean(-1, keepdim=True)).square().mean(-1).sqrt()
