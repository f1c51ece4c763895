"""Compare two sides: both read the reference's texts, both write their own, and the noise between them is measured."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from genctl.engines.protocol import Request, never
from genctl.errors import GenctlError, ModelError
from genctl.events import shared_length
from genctl.parity.fault import FoundFault, different_settings, equal_weights, find_fault, other_weights
from genctl.parity.noise import MeasuredNoise, measure_noise
from genctl.parity.oracle import Reading, places_read
from genctl.parity.sides import LocalSide, ReceiveLogits
from genctl.parity.statistics import Pairs, summary
from genctl.parity.values import Noise, Parity, Place, Position, Text, TextParting, Verdict, worst

CHECKED, LEAST_CHECKED = 128, 16  # most and fewest positions on which noise is measured
CHECKED_LOGITS = 2**21  # logits of a side at these positions: 16 MiB in float64
WEIGHTS = "weights and dtype"
UNMEASURED = Noise(
    0, (), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "every logit is equal, so that there is nothing to explain"
)
UNKNOWN = (math.nan, math.nan)  # log-probabilities


class Parted(NamedTuple):
    """Two texts that continue one prompt."""

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

    With `layers` the result has a curve by layer, whatever the verdict. `on_position` receives each position when it is
    compared, `on_stage` the name of each stage. Raises ModelError, UsageError and InputError.
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
        theirs = stack.enter_context(ReadOnce(other))
        failed |= read_both(mine, theirs, texts, receive, interrupted)
        parted = [] if interrupted() else [each for each in parted if each.mine.id not in failed]
        equal = not any(position.shift for position in positions)
        if positions and not (equal and not parted) and not interrupted():
            on_stage("measuring noise")
            most = min(CHECKED, max(CHECKED_LOGITS // reference.vocabulary, LEAST_CHECKED))
            readings = pick(positions, texts, parted, most)
            try:
                measured = measure_noise(reference, other, readings, (mine.rows(readings), theirs.rows(readings)))
            except GenctlError as error:
                notes.append(f"rounding could not be measured: {error.message}")
        noise = UNMEASURED if measured is None else measured.noise
        partings = _partings(mine, theirs, parted, noise, measured)
    loaded = [side.session.loaded for side in (reference, other)]
    are_apart = loaded[0].path != loaded[1].path
    differ = different_settings(*(one.path for one in loaded)) if are_apart and not equal else ""
    if differ:
        notes.append(f"config.json differs in {differ}: what that changes counts as explained, as weights do")
    verdict = verdict_of(positions, measured, "weights, dtype and config.json" if differ else WEIGHTS)
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
    """Requests for the other side, with its settings: the prompts in the tokens that the reference read.

    Its texts may be as long as the reference's.
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
    """Choose at most `most` positions to measure noise on, in the text with the largest shift and some others.

    The position with the largest shift is among them: an explanation of it also explains the others. So are the first
    divergences. The other positions are spread evenly.
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
    positions: Sequence[Position], measured: MeasuredNoise | None, explained_by: str = WEIGHTS, what: str = "logit"
) -> tuple[Verdict | None, str]:
    """The verdict of positions, with its reason; None without positions.

    `explained_by` names what may explain a difference, `what` the compared quantity.
    """
    if not positions:
        return None, "no position was compared"
    if not any(position.shift for position in positions):
        return "tie", f"every {what} is equal"
    if measured is None:
        return "drift", f"the {what}s differ, and rounding could not be measured"
    noise = measured.noise
    remains = f"the rest is {noise.typical_ratio:.2g} × rounding error"
    unexplained = f"{explained_by} do not explain this"
    if not noise.typical_ratio <= noise.typical_allowed:
        return "defect", f"{unexplained}: {remains}, and rounding reaches {noise.typical_allowed:.2g}"
    if not noise.largest_ratio <= noise.allowed:  # also true for NaN
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
    """The findings about a pair: the worst verdict of its positions (`shown`, with a reason) and its partings."""
    verdict, reason = shown
    by_id = {text.id: text for text in texts}
    for each in partings:
        if each.verdict == "defect" and verdict != "defect":
            reason = f"{by_id[each.text].token(each.index)}: {each.reason}"
        verdict = worst(verdict, each.verdict)
    read, parted, figures = tuple(positions), tuple(partings), summary(positions)
    return Parity(*names, tuple(texts), read, parted, figures, noise, verdict, reason)


# -- where the sides' own texts diverge --------------------------------------------------------------------------------


def _partings(
    reference: ReadOnce, other: ReadOnce, parted: Sequence[Parted], noise: Noise, measured: MeasuredNoise | None
) -> list[TextParting]:
    found = []
    for text, others, index in parted:
        place = (text.id, index)
        mine, theirs = (one.token_ids[index] if index < len(one.token_ids) else None for one in (text, others))
        if mine is None or theirs is None:
            reason = "one text ends where the other continues: its length limit or a stop ended it"
            found.append(TextParting(*place, mine, theirs, UNKNOWN, UNKNOWN, math.nan, "drift", reason))
            continue
        rows = (side.row(place).double().log_softmax(-1) for side in (reference, other))
        own, their = ((float(row[mine]), float(row[theirs])) for row in rows)
        margin = own[0] - own[1]
        reach = noise.margin if measured is None else measured.reach(*place, (mine, theirs))
        parting = _verdict_of_margin(margin, margin - (their[0] - their[1]), noise, reach)
        found.append(TextParting(*place, mine, theirs, own, their, margin, *parting))
    return found


def _verdict_of_margin(margin: float, moved: float, noise: Noise, reach: float) -> tuple[Verdict, str]:
    """The verdict of a parting. The other side moves its `margin` by `moved`; `reach` of that is explained."""
    if abs(margin) <= noise.margin:
        return "tie", f"the margin of {margin:.2g} nats is below the noise of {noise.margin:.2g}"
    change = f"the other side moves the margin of {margin:.2g} nats by {abs(moved):.2g}"
    if abs(moved) < abs(margin) - noise.margin:
        # after the same text, the other side chooses as the reference does
        return "defect", f"{change} only, so that its own distribution does not choose the token that it wrote"
    if abs(moved) <= max(reach, noise.margin):
        return "drift", f"{change}; weights and rounding explain up to {reach:.2g}"
    return "defect", f"{change}; weights and rounding explain only {reach:.2g}"


# -- reading: both sides read the same texts, and their logits wait in a file ------------------------------------------


class ReadOnce(LocalSide, AbstractContextManager["ReadOnce"]):
    """A side that writes and reads each text once: its logits stay in a temporary file until the context exits."""

    def __init__(self, side: LocalSide) -> None:
        super().__init__(side.name, side.session, side.resolved, width=side.width, whole=side.whole)
        self._side = side
        self._file = tempfile.TemporaryFile(prefix="genctl-parity-")  # noqa: SIM115 — `__exit__` closes it
        self._offsets: dict[Place, int] = {}  # of rows f32 [V]
        self._written: dict[tuple[str, ...], tuple[list[Text], dict[str, str]]] = {}
        self._failed: dict[str, str] = {}

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(
        self, requests: Sequence[Request], *, interrupted: Callable[[], str] = never
    ) -> tuple[list[Text], dict[str, str]]:
        """Like `LocalSide.write`, but the same requests are written only once."""
        key = tuple(request.id for request in requests)
        if key not in self._written:
            self._written[key] = self._side.write(requests, interrupted=interrupted)
        return self._written[key]

    def read(
        self, texts: Sequence[Text], receive: ReceiveLogits, *, interrupted: Callable[[], str] = never
    ) -> dict[str, str]:
        """Like `LocalSide.read`, but texts in the file are not read again."""
        failed = self.fill(texts, interrupted=interrupted)
        for place, text in enumerate(texts):
            for index in range(len(text.token_ids)):
                if self.has((text.id, index)):
                    receive(place, index, self.row((text.id, index)))
        return failed

    def fill(self, texts: Sequence[Text], *, interrupted: Callable[[], str] = never) -> dict[str, str]:
        """Read those of `texts` that the file lacks. Returns those that cannot be read.

        Raises ModelError if the disk is full.
        """
        missing = [text for text in texts if text.id not in self._failed and not self.has((text.id, 0))]

        def keep(place: int, index: int, logits: Tensor) -> None:
            offset = len(self._offsets) * 4 * self.vocabulary
            self._file.seek(offset)
            try:
                self._file.write(logits.detach().float().cpu().contiguous().numpy().data)
            except OSError as error:
                where = tempfile.gettempdir()
                raise ModelError(f"no room for logits in {where} (TMPDIR): {error.strerror}") from None
            self._offsets[missing[place].id, index] = offset

        if missing:
            self._failed |= self._side.read(missing, keep, interrupted=interrupted)
        return {text.id: self._failed[text.id] for text in texts if text.id in self._failed}

    def has(self, place: Place) -> bool:
        """Whether the logits before a token are in the file."""
        return place in self._offsets and place[0] not in self._failed

    def row(self, place: Place) -> Tensor:
        """The logits f32 [V] before a token."""
        self._file.seek(self._offsets[place])
        return torch.frombuffer(bytearray(self._file.read(4 * self.vocabulary)), dtype=torch.float32)

    def rows(self, readings: Sequence[Reading]) -> Tensor:
        """The logits f32 [M, V] at some positions."""
        return torch.stack([*map(self.row, places_read(readings))])


def read_both(
    mine: ReadOnce, theirs: ReadOnce, texts: Sequence[Text], receive: Callable[[Position], object],
    interrupted: Callable[[], str],
) -> dict[str, str]:  # fmt: skip
    """Hand out the figures of each position that both sides read. Returns the texts that either cannot read.

    Raises ModelError if the distributions of the sides differ in size.
    """
    if theirs.vocabulary != mine.vocabulary:
        sizes = f"{mine.name} has {mine.vocabulary} entries in a distribution, {theirs.name} has"
        raise ModelError(f"{sizes} {theirs.vocabulary}")
    failed = mine.fill(texts, interrupted=interrupted) | theirs.fill(texts, interrupted=interrupted)
    pairs = Pairs(receive)
    for text in texts:
        for index, token in enumerate(text.token_ids):
            place = (text.id, index)
            if mine.has(place) and theirs.has(place):
                pairs.add((*place, token), mine.row(place), theirs.row(place))
    pairs.flush()
    return failed
