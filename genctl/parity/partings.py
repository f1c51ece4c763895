"""Where texts that two sides write on their own part, and whether rounding and weights explain it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from genctl.events import shared_length
from genctl.parity.noise import MeasuredNoise
from genctl.parity.oracle import Reading
from genctl.parity.statistics import summary
from genctl.parity.values import Noise, Parity, Position, Text, TextParting, Verdict, worst


def first_difference(reference: Text, other: Text) -> int | None:
    """The index of the first token that differs; None for equal texts."""
    if reference.token_ids == other.token_ids:
        return None
    return shared_length(reference.token_ids, other.token_ids)


def readings_of(parted: Sequence[tuple[Text, Text, int]]) -> list[Reading]:
    """The positions at which texts part, where the reference goes on."""
    return [Reading(mine, (index,)) for mine, _, index in parted if index < len(mine.token_ids)]


def parting(
    reference: Text,
    other: Text,
    index: int,
    rows: tuple[Tensor, Tensor] | None,
    noise: Noise,
    measured: MeasuredNoise | None,
) -> TextParting:
    """The parting of two texts at `index`. `rows`: the logits f32 [V] of both sides there, after the same text."""
    mine = reference.token_ids[index] if index < len(reference.token_ids) else None
    theirs = other.token_ids[index] if index < len(other.token_ids) else None
    unknown = (math.nan, math.nan)
    if rows is None or mine is None or theirs is None:
        reason = "one text ends where the other goes on: a limit or a stop of its settings ended it"
        return TextParting(reference.id, index, mine, theirs, unknown, unknown, math.nan, "drift", reason)
    own, others = ((float(row[mine]), float(row[theirs])) for row in (each.double().log_softmax(-1) for each in rows))
    margin = own[0] - own[1]
    moved = margin - (others[0] - others[1])
    verdict, reason = judge_margin(margin, moved, noise, reach_of(reference.id, index, (mine, theirs), noise, measured))
    return TextParting(reference.id, index, mine, theirs, own, others, margin, verdict, reason)


def reach_of(text: str, index: int, tokens: tuple[int, int], noise: Noise, measured: MeasuredNoise | None) -> float:
    """The most by which weights and rounding move the margin, in nats."""
    if measured is None:
        return noise.margin
    place = measured.place(text, index)
    return measured.reach_anywhere if place is None else measured.reach(place, tokens)


def worst_of(
    verdict: Verdict | None, reason: str, partings: Sequence[TextParting], texts: Sequence[Text]
) -> tuple[Verdict | None, str]:
    """The verdict of a side with its reason, from that of its positions and those of the `partings` of `texts`."""
    by_id = {text.id: text for text in texts}
    for each in partings:
        if each.verdict == "defect" and verdict != "defect":
            reason = f"{by_id[each.text].token(each.index)}: {each.reason}"
        verdict = worst(verdict, each.verdict)
    return verdict, reason


def concluded(
    names: tuple[str, str],
    texts: Sequence[Text],
    positions: Sequence[Position],
    partings: Sequence[TextParting],
    judged: tuple[Verdict | None, str],
    **more: Any,
) -> Parity:
    """What is found about a pair. `judged`: verdict and reason of its positions; `more`: further fields of `Parity`."""
    verdict, reason = worst_of(*judged, partings, texts)
    read, parted, figures = tuple(positions), tuple(partings), summary(positions)
    return Parity(*names, tuple(texts), read, parted, figures, verdict=verdict, reason=reason, **more)


def judge_margin(margin: float, moved: float, noise: Noise, reach: float) -> tuple[Verdict, str]:
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
