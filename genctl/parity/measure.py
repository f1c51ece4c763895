"""Compare two sides: both read the reference's texts, both write their own, and the noise between them is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl.config.layers import Resolved
from genctl.engines.protocol import Request, never
from genctl.errors import GenctlError, ModelError
from genctl.models.weights import read_json
from genctl.parity.fault import FoundFault, find_fault
from genctl.parity.noise import MeasuredNoise, beyond_weights, measure_noise
from genctl.parity.oracle import Reading
from genctl.parity.partings import first_difference, parting, readings_of, worst_of
from genctl.parity.reading import ReadBoth
from genctl.parity.sides import LocalSide
from genctl.parity.statistics import summary
from genctl.parity.values import Noise, Parity, Position, Text, TextParting, Verdict
from genctl.parity.weights import equal_weights, other_weights

if TYPE_CHECKING:
    from torch import Tensor


# -- what two checkpoints say otherwise of what is computed, beside their weights --------------------------------------


# fields of config.json that do not say what is computed
OTHER = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
    "pad_token_id", "quantization_config", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
SHOWN = 4  # fields in a sentence


def different_settings(reference: Path, other: Path) -> str:
    """The fields of both folders' config.json that differ, with their values; "" for none, or without such a file."""
    mine, theirs = ({name: value for name, value in _fields(_read(folder))} for folder in (reference, other))
    if not mine or not theirs:
        return ""
    names = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    shown = [f"{name} ({_value(mine.get(name))} and {_value(theirs.get(name))})" for name in names[:SHOWN]]
    left = len(names) - SHOWN
    return ", ".join([*shown, *([f"{left} more"] if left > 0 else [])])


def _as_loaded(side: LocalSide) -> tuple[object, object]:
    """What a side does to weights."""
    return side.session.forward.dtype, side.session.loaded.quantize


def _read(folder: Path) -> Mapping[str, Any]:
    try:
        return read_json(folder / "config.json", "config.json")
    except ModelError:
        return {}


def _fields(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """All fields with their paths; null is as no field."""
    for name, value in config.items():
        if name in OTHER or value is None:
            continue
        if isinstance(value, Mapping):
            yield from _fields(value, f"{before}{name}.")
        else:
            yield before + name, value


def _value(value: Any) -> str:
    return "not set" if value is None else f"{value}"[:40]


CHECKED_LOGITS = 2**21  # logits of a side at the positions on which noise is measured: 16 MiB in float64
LEAST_CHECKED = 16
WEIGHTS = "weights and dtype"
NOTHING_COMPARED = "no position was compared"
UNMEASURED = Noise(
    0, (), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "every logit is equal, so that there is nothing to explain"
)


@dataclass(frozen=True)
class ParityOptions:
    """What is compared."""

    free: bool = True  # both sides also write their own texts, unless texts are given
    layers: bool = False  # the curve by layer is wanted whatever the verdict is
    checked: int = 128  # positions on which noise is measured at most


def measure(
    reference: LocalSide,
    other: LocalSide,
    requests: Sequence[Request] = (),
    texts: Sequence[Text] = (),
    options: ParityOptions | None = None,
    *,
    on_position: Callable[[Position], object] = lambda position: None,
    on_stage: Callable[[str], object] = lambda stage: None,
    interrupted: Callable[[], str] = never,
) -> Parity:
    """Compare a side with the reference on given `texts`, and on those that the reference writes for `requests`.

    `on_position` receives each position as it is compared, `on_stage` a word on what begins: "writing", "reading",
    "noise", "layers". Raises ModelError, UsageError and InputError.
    """
    options = options or ParityOptions()
    failed: dict[str, str] = {}
    parted: list[tuple[Text, Text, int]] = []
    if requests:
        on_stage("writing")
        written, failed = reference.write(requests, interrupted=interrupted)
        texts = [*texts, *written]
        if options.free:
            others, missing = other.write(_same_prompts(requests, written, other), interrupted=interrupted)
            failed |= missing
            mine = {text.id: text for text in written}
            pairs = [(mine[text.id], text, first_difference(mine[text.id], text)) for text in others]
            parted = [(one, another, index) for one, another, index in pairs if index is not None]
    on_stage("reading")
    positions: list[Position] = []

    def receive(position: Position) -> None:
        positions.append(position)
        on_position(position)

    with ReadBoth(reference, other, texts, interrupted=interrupted) as both:
        both.read(receive)
        failed |= both.failed
        parted = [each for each in parted if each[0].id not in failed]
        figures = summary(positions)
        equal = not any(position.shift for position in positions)
        measured: MeasuredNoise | None = None
        notes: list[str] = []
        if positions and not (equal and not parted) and not interrupted():
            on_stage("noise")
            readings = pick(positions, texts, parted, min(options.checked, _most(reference.vocabulary)))
            try:
                measured = measure_noise(reference, other, readings, both.rows(readings))
            except GenctlError as error:
                notes.append(f"rounding could not be measured: {error.message}")
        noise = UNMEASURED if measured is None else measured.noise
        found = _partings(both, parted, noise, measured)
    folders = [side.session.loaded.path for side in (reference, other)]
    differ = "" if equal or folders[0] == folders[1] else different_settings(*folders)
    if differ:
        notes.append(f"config.json differs in {differ}: what that changes counts as explained, as weights do")
    judged = judge(positions, equal, measured, "weights, dtype and config.json" if differ else WEIGHTS)
    verdict, reason = worst_of(*judged, found, texts)
    loaded = [side.session.loaded for side in (reference, other)]
    if verdict == "drift" and folders[0] != folders[1] and (why := other_weights(*loaded)):
        verdict, reason = "other weights", f"{why}{f'; config.json differs in {differ}' if differ else ''}"
    elif verdict == "drift" and differ and _as_loaded(reference) == _as_loaded(other) and equal_weights(*loaded):
        verdict, reason = "other weights", f"config.json differs in {differ}, and the weights are equal"
    found_fault = FoundFault()
    if measured is not None and (verdict == "defect" or options.layers) and not interrupted():
        on_stage("layers")
        try:
            found_fault = find_fault(reference, other, measured)
            notes += found_fault.notes
        except GenctlError as error:
            notes.append(f"layers could not be compared: {error.message}")
    return Parity(
        reference.name,
        other.name,
        tuple(texts),
        tuple(positions),
        tuple(found),
        figures,
        noise,
        verdict,
        reason,
        fault=found_fault.fault if verdict == "defect" else None,
        curve=found_fault.curve,
        notes=tuple(notes),
        failed=failed,
    )


def pick(
    positions: Sequence[Position], texts: Sequence[Text], parted: Sequence[tuple[Text, Text, int]], most: int
) -> list[Reading]:
    """The positions on which noise is measured: at most `most`, of the text with the largest shift and of some others.

    The position with the largest shift is among them: what explains it explains the others, too. So are the first
    partings. The other positions are spread evenly.
    """
    by_id = {text.id: text for text in texts}
    largest = max(positions, key=lambda position: position.shift)
    partings = {mine.id: index for mine, _, index in parted if index < len(mine.token_ids)}
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


def judge(
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

    remains = beyond_weights(noise.typical_ratio)
    unexplained = f"{explained_by} do not explain this"
    if noise.typical_ratio > noise.typical_allowed:
        return "defect", f"{unexplained}: {remains}, and rounding reaches {noise.typical_allowed:.2g}"
    if noise.largest_ratio > noise.allowed:
        where = measured.token(int(measured.ratios.argmax()))
        most = beyond_weights(noise.largest_ratio)
        return "defect", f"{where}: {unexplained}: {most}, and rounding reaches {noise.allowed:.2g}"
    if measured.equal:
        return "tie", f"rounding explains this: the difference is {noise.typical_ratio:.2g} × rounding error"
    return "drift", f"{explained_by} explain this; {remains}"


def _partings(
    both: ReadBoth, parted: Sequence[tuple[Text, Text, int]], noise: Noise, measured: MeasuredNoise | None
) -> list[TextParting]:
    readings = readings_of(parted)
    rows: dict[str, tuple[Tensor, Tensor]] = {}
    if readings:
        mine, theirs = both.rows(readings)
        pairs = zip(mine, theirs, strict=True)
        rows = {reading.text.id: pair for reading, pair in zip(readings, pairs, strict=True)}
    return [parting(one, another, index, rows.get(one.id), noise, measured) for one, another, index in parted]


def _same_prompts(requests: Sequence[Request], written: Sequence[Text], other: LocalSide) -> list[Request]:
    """The prompts of texts, in the tokens that the reference read, with the settings of the other side."""
    prompts = {text.id: text.prompt_ids for text in written}
    return [
        replace(request, resolved=_as_long(request, other), prompt=None, messages=None, prompt_ids=prompts[request.id])
        for request in requests
        if request.id in prompts
    ]


def _as_long(request: Request, other: LocalSide) -> Resolved:
    """The settings of the other side, for a text as long as the reference's may be."""
    most = request.resolved.generation.max_new_tokens
    return replace(other.resolved, generation=replace(other.resolved.generation, max_new_tokens=most))


def _most(vocabulary: int) -> int:
    """Positions whose logits fit `CHECKED_LOGITS`."""
    return max(CHECKED_LOGITS // vocabulary, LEAST_CHECKED)
