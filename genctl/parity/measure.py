"""Compare two sides: both read the reference's texts, both write their own, and the noise between them is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import torch

from genctl.engines.protocol import Request, never
from genctl.errors import GenctlError
from genctl.events import shared_length
from genctl.parity.fault import FoundFault, different_settings, equal_weights, find_fault, other_weights
from genctl.parity.noise import MeasuredNoise, measure_noise
from genctl.parity.oracle import Reading
from genctl.parity.reading import ReadBoth, ReadOnce
from genctl.parity.sides import LocalSide
from genctl.parity.statistics import summary
from genctl.parity.values import Noise, Parity, Position, Text, TextParting, Verdict, worst

CHECKED, LEAST_CHECKED = 128, 16  # positions on which noise is measured at most, and at least
CHECKED_LOGITS = 2**21  # logits of a side at these positions: 16 MiB in float64
WEIGHTS = "weights and dtype"
NOTHING_COMPARED = "no position was compared"
UNMEASURED = Noise(
    0, (), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "every logit is equal, so that there is nothing to explain"
)
UNKNOWN = (math.nan, math.nan)  # log-probabilities


class Parted(NamedTuple):
    """Two texts after one prompt."""

    mine: Text
    theirs: Text
    first: int  # the index of the first token that differs


def measure(
    reference: LocalSide,
    other: LocalSide,
    requests: Sequence[Request] = (),
    texts: Sequence[Text] = (),
    *,
    layers: bool = False,
    on_position: Callable[[Position], object] = lambda position: None,
    on_stage: Callable[[str], object] = lambda stage: None,
    interrupted: Callable[[], str] = never,
) -> Parity:
    """Compare a side with the reference on given `texts`, and on those that the reference writes for `requests`.

    With `layers` there is a curve by layer whatever the verdict is. `on_position` receives each position as it is
    compared, `on_stage` what begins, in words. Raises ModelError, UsageError and InputError.
    """
    failed: dict[str, str] = {}
    parted: list[Parted] = []
    if requests:
        on_stage("writing")
        written, failed = reference.write(requests, interrupted=interrupted)
        texts = [*texts, *written]
        others, missing = other.write(_same_prompts(requests, written, other), interrupted=interrupted)
        failed |= missing
        by_id = {text.id: text for text in written}
        pairs = [(by_id[text.id], text) for text in others if by_id[text.id].token_ids != text.token_ids]
        parted = [Parted(*pair, shared_length(*(text.token_ids for text in pair))) for pair in pairs]
    on_stage("reading")
    positions: list[Position] = []

    def receive(position: Position) -> None:
        positions.append(position)
        on_position(position)

    measured: MeasuredNoise | None = None
    notes: list[str] = []
    with ExitStack() as stack:
        mine = reference if isinstance(reference, ReadOnce) else stack.enter_context(ReadOnce(reference))
        both = ReadBoth(mine, stack.enter_context(ReadOnce(other)), texts, interrupted=interrupted)
        both.read(receive)
        failed |= both.failed
        parted = [each for each in parted if each.mine.id not in failed]
        equal = not any(position.shift for position in positions)
        if positions and not (equal and not parted) and not interrupted():
            on_stage("measuring noise")
            most = min(CHECKED, max(CHECKED_LOGITS // reference.vocabulary, LEAST_CHECKED))
            readings = pick(positions, texts, parted, most)
            try:
                measured = measure_noise(reference, other, readings, both.rows(readings))
            except GenctlError as error:
                notes.append(f"rounding could not be measured: {error.message}")
        noise = UNMEASURED if measured is None else measured.noise
        partings = _partings(both, parted, noise, measured)
    loaded = [side.session.loaded for side in (reference, other)]
    are_apart = loaded[0].path != loaded[1].path
    differ = different_settings(*(one.path for one in loaded)) if are_apart and not equal else ""
    if differ:
        notes.append(f"config.json differs in {differ}: what that changes counts as explained, as weights do")
    verdict = verdict_of(positions, equal, measured, "weights, dtype and config.json" if differ else WEIGHTS)
    one = concluded((reference.name, other.name), texts, positions, partings, verdict, noise)
    if one.verdict == "drift" and are_apart:
        how = [(side.session.forward.dtype, side.session.loaded.quantize) for side in (reference, other)]
        if why := other_weights(*loaded):
            why += f"; config.json differs in {differ}" if differ else ""
        elif differ and how[0] == how[1] and equal_weights(*loaded):
            why = f"config.json differs in {differ}, and the weights are equal"
        one = replace(one, verdict="other weights", reason=why) if why else one
    found = FoundFault()
    if measured is not None and (one.verdict == "defect" or layers) and not interrupted():
        on_stage("comparing layers")
        try:
            found = find_fault(reference, other, measured)
            notes += found.notes
        except GenctlError as error:
            notes.append(f"layers could not be compared: {error.message}")
    fault = found.fault if one.verdict == "defect" else None
    return replace(one, fault=fault, curve=found.curve, notes=tuple(notes), failed=failed)


def _same_prompts(requests: Sequence[Request], written: Sequence[Text], other: LocalSide) -> list[Request]:
    """The prompts of texts, in the tokens that the reference read, with the settings of the other side.

    Its texts may be as long as those of the reference.
    """
    prompts, same = {text.id: text.prompt_ids for text in written}, []
    for request in requests:
        if request.id in prompts:
            most = request.resolved.generation.max_new_tokens
            resolved = replace(other.resolved, generation=replace(other.resolved.generation, max_new_tokens=most))
            ids = prompts[request.id]
            same.append(replace(request, resolved=resolved, prompt=None, messages=None, prompt_ids=ids))
    return same


def pick(positions: Sequence[Position], texts: Sequence[Text], parted: Sequence[Parted], most: int) -> list[Reading]:
    """The positions on which noise is measured: at most `most`, of the text with the largest shift and of some others.

    The position with the largest shift is among them: what explains it explains the others, too. So are the first
    partings. The other positions are spread evenly.
    """
    by_id = {text.id: text for text in texts}
    largest = max(positions, key=lambda position: position.shift)
    partings = {each.mine.id: each.first for each in parted if each.first < len(each.mine.token_ids)}
    chosen = list(dict.fromkeys([largest.text, *[*partings][:2], *(position.text for position in positions)]))[:4]
    share = max(most // len(chosen), 1)
    readings = []
    for id in chosen:
        indices = [position.index for position in positions if position.text == id]
        wanted = {largest.index} if id == largest.text else set()
        wanted |= {partings[id]} & set(indices) if id in partings else set()
        step = max(len(indices) / share, 1.0)
        wanted |= {indices[int(number * step)] for number in range(min(share, len(indices)))}
        readings.append(Reading(by_id[id], tuple(sorted(wanted))))
    return readings


# -- the verdict -------------------------------------------------------------------------------------------------------


def verdict_of(
    positions: Sequence[Position], equal: bool, measured: MeasuredNoise | None, explained_by: str = WEIGHTS
) -> tuple[Verdict | None, str]:
    """The verdict of positions, with its reason; there is none without a position.

    `explained_by` names what the sides have of their own.
    """
    if not positions:
        return None, NOTHING_COMPARED
    if equal:
        return "tie", "every logit is equal"
    if measured is None:
        return "drift", "the logits differ, and rounding could not be measured"
    noise = measured.noise
    remains = f"the rest is {noise.typical_ratio:.2g} × rounding error"
    unexplained = f"{explained_by} do not explain this"
    if noise.typical_ratio > noise.typical_allowed:
        return "defect", f"{unexplained}: {remains}, and rounding reaches {noise.typical_allowed:.2g}"
    if noise.largest_ratio > noise.allowed:
        where = measured.token(int(measured.ratios.argmax()))
        most = f"the rest is {noise.largest_ratio:.2g} × rounding error"
        return "defect", f"{where}: {unexplained}: {most}, and rounding reaches {noise.allowed:.2g}"
    if measured.equal:
        return "tie", f"rounding explains this: the difference is {noise.typical_ratio:.2g} × rounding error"
    return "drift", f"{explained_by} explain this; {remains}"


def concluded(
    names: tuple[str, str],
    texts: Sequence[Text],
    positions: Sequence[Position],
    partings: Sequence[TextParting],
    shown: tuple[Verdict | None, str],
    noise: Noise,
) -> Parity:
    """What is found about a pair: the worst of what its positions show, with the reason (`shown`), and its partings."""
    verdict, reason = shown
    by_id = {text.id: text for text in texts}
    for each in partings:
        if each.verdict == "defect" and verdict != "defect":
            reason = f"{by_id[each.text].token(each.index)}: {each.reason}"
        verdict = worst(verdict, each.verdict)
    read, parted, figures = tuple(positions), tuple(partings), summary(positions)
    return Parity(*names, tuple(texts), read, parted, figures, noise, verdict, reason)


# -- where texts part that both sides write on their own ---------------------------------------------------------------


def _partings(
    both: ReadBoth, parted: Sequence[Parted], noise: Noise, measured: MeasuredNoise | None
) -> list[TextParting]:
    readings = [Reading(each.mine, (each.first,)) for each in parted if each.first < len(each.mine.token_ids)]
    rows: dict[str, list[torch.Tensor]] = {}
    if readings:
        pairs = zip(*both.rows(readings), strict=True)
        rows = {
            reading.text.id: [row.double().log_softmax(-1) for row in pair]
            for reading, pair in zip(readings, pairs, strict=True)
        }
    found = []
    for text, other, index in parted:
        mine, theirs = (one.token_ids[index] if index < len(one.token_ids) else None for one in (text, other))
        if mine is None or theirs is None:
            reason = "one text ends where the other continues: its length limit or a stop ended it"
            found.append(TextParting(text.id, index, mine, theirs, UNKNOWN, UNKNOWN, math.nan, "drift", reason))
            continue
        own, others = ((float(row[mine]), float(row[theirs])) for row in rows[text.id])
        margin = own[0] - own[1]
        reach = noise.margin if measured is None else measured.reach(text.id, index, (mine, theirs))
        parting = _verdict_of_margin(margin, margin - (others[0] - others[1]), noise, reach)
        found.append(TextParting(text.id, index, mine, theirs, own, others, margin, *parting))
    return found


def _verdict_of_margin(margin: float, moved: float, noise: Noise, reach: float) -> tuple[Verdict, str]:
    """The verdict of a parting, whose `margin` the other side moves by `moved`; `reach` of it is explained."""
    if abs(margin) <= noise.margin:
        return "tie", f"the margin of {margin:.2g} nats is below the noise of {noise.margin:.2g}"
    change = f"the other side moves the margin of {margin:.2g} nats by {abs(moved):.2g}"
    if abs(moved) < abs(margin) - noise.margin:
        # read with the same text before it, the other side chooses as the reference does
        return "defect", f"{change} only, so that its own distribution does not choose the token that it wrote"
    if abs(moved) <= max(reach, noise.margin):
        return "drift", f"{change}; weights and rounding explain up to {reach:.2g}"
    return "defect", f"{change}; weights and rounding explain only {reach:.2g}"
