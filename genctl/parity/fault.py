"""Where a difference comes from: the files of two checkpoints, and the first layer that differs by more than rounding.

Layers are judged as in the verdict (`noise`), by their outputs instead of logits. A text is read in one pass first.
If both sides agree there, it is read step by step; if they still agree, only the batch is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from genctl.errors import ModelError, percent
from genctl.models.hub import LoadedModel
from genctl.models.weights import read_json
from genctl.parity.noise import ALLOWANCE, TINY, MeasuredNoise
from genctl.parity.oracle import places_read
from genctl.parity.sides import LocalSide, Outputs, tapped
from genctl.parity.values import ENCODER, Fault, LayerDifference, Text

# -- files of two checkpoints ------------------------------------------------------------------------------------------

MOST = 2**22  # elements of a tensor that are compared: rows spread over it
SHOWN, SHOWN_FIELDS = 3, 4  # tensors, and fields of config.json, that a sentence names
# fields of config.json that do not affect what is computed
OTHER = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
    "pad_token_id", "quantization_config", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


def different_settings(reference: Path, other: Path) -> str:
    """The fields of both folders' config.json that differ, with their values; "" if none does or a file is missing."""
    try:
        mine, theirs = (dict(_fields(read_json(path / "config.json", "config.json"))) for path in (reference, other))
    except ModelError:
        return ""
    if not mine or not theirs:
        return ""
    found = []
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            values = (f"{own.get(name, 'not set')}"[:40] for own in (mine, theirs))
            found.append(f"{name} ({' and '.join(values)})")
    return _some(found, SHOWN_FIELDS)


def _some(found: Sequence[str], most: int) -> str:
    """The first `most` names, and how many more there are."""
    return ", ".join([*found[:most], *([f"{len(found) - most} more"] if len(found) > most else [])])


def _fields(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """All fields with their paths, except `OTHER`; null counts as absent."""
    for name, value in config.items():
        if isinstance(value, Mapping) and name not in OTHER:
            yield from _fields(value, f"{before}{name}.")
        elif name not in OTHER and value is not None:
            yield before + name, value


def other_weights(reference: LoadedModel, other: LoadedModel) -> str:
    """Which tensors of `other` are neither rounded nor quantised copies, and by how much they differ; "" for none.

    Files that cannot be compared tensor by tensor (GGUF, pickles, other names) are skipped.
    """
    found: list[tuple[float, str]] = []
    count = 0
    for name, mine, theirs in _pairs(reference, other):
        count += 1
        if mine.shape != theirs.shape:
            return f"{name} has another shape"
        if not _is_copy(mine, theirs):
            found.append((float((mine - theirs).norm() / mine.norm()), name))
    if not found:
        return ""
    found.sort(reverse=True)
    shown = _some([f"{name} by {percent(share)}" for share, name in found], SHOWN)
    return f"{len(found)} of {count} tensors are neither rounded nor quantised copies: {shown}"


def equal_weights(reference: LoadedModel, other: LoadedModel) -> bool:
    """Whether all tensors of both are equal, as far as files can be compared."""
    found = [mine.shape == theirs.shape and torch.equal(mine, theirs) for _, mine, theirs in _pairs(reference, other)]
    return bool(found) and all(found)


def _pairs(reference: LoadedModel, other: LoadedModel) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The float tensors that both have, with their names: f32, and of large ones rows spread over each."""
    from safetensors import safe_open

    places: list[dict[str, Path]] = []
    for loaded in (reference, other):
        checkpoint, own = loaded.checkpoint, dict[str, Path]()
        if checkpoint is None or checkpoint.gguf or checkpoint.weights.pickled or loaded.adapter is not None:
            return
        for path in checkpoint.weights.files:
            with safe_open(path, framework="pt") as file:
                own |= dict.fromkeys(file.keys(), path)
        places.append(own)
    for name in sorted(places[0].keys() & places[1].keys()):
        rows = []
        for own in places:
            with safe_open(own[name], framework="pt") as file:
                part = file.get_slice(name)
                step = max(-(-torch.Size(part.get_shape()).numel() // MOST), 1)
                rows.append(part[::step] if step > 1 else file.get_tensor(name))
        if all(tensor.is_floating_point() for tensor in rows):
            yield name, rows[0].float(), rows[1].float()


def _is_copy(mine: Tensor, theirs: Tensor) -> bool:
    """Whether one is a copy of the other, rounded to a dtype or to codes."""
    for one, copy in ((mine, theirs), (theirs, mine)):
        if any(torch.equal(one.to(dtype).float(), copy) for dtype in (torch.float32, torch.bfloat16, torch.float16)):
            return True
        if one.dim() > 1 and any(_is_coded(one, copy, size) for size in (one.shape[-1], 128, 64, 32)):
            return True
    return False


def _is_coded(numbers: Tensor, codes: Tensor, size: int) -> bool:
    """Whether `codes` are `numbers` on a blockwise grid of 8 bits or 16 values: none is off by more than a step."""
    if codes.shape[-1] % size:
        return False
    blocks = codes.reshape(-1, size)
    most = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    off = (blocks - numbers.reshape(-1, size)).abs()
    scaled = blocks / most * 127
    on_grid = float(((scaled - scaled.round()).abs() < 0.16).float().mean()) > 0.99
    values = (blocks.sort(-1).values.diff(dim=-1) > 1e-3 * most).sum(-1) + 1
    has_few = size > 16 and bool((values <= 16).all())
    return (on_grid and bool((off <= 1.01 * most / 127).all())) or (has_few and bool((off <= most / 3).all()))


# -- layers ------------------------------------------------------------------------------------------------------------

SEEDS = 2
POSITIONS = 32  # the last ones of a text, which ends soon after the first that differs; and the last ones of a source
IN_STEPS = "only in steps: read in one pass both sides agree, so it is the cache, a position or a mask"


class FoundFault(NamedTuple):
    """The fault, the curve of the text with the largest ratio, and a sentence on parts that only one side has."""

    fault: Fault | None = None
    curve: tuple[LayerDifference, ...] = ()
    notes: tuple[str, ...] = ()


class LayerCurve(NamedTuple):
    """A curve, and its first point beyond rounding."""

    curve: tuple[LayerDifference, ...]
    first: LayerDifference | None


def find_fault(reference: LocalSide, other: LocalSide, measured: MeasuredNoise) -> FoundFault:
    """Find the first layer that differs, read in one pass or in steps. Raises ModelError.

    Sides of different architectures have no layers in common, so there is no curve.
    """
    text, begin = _text(measured)
    reads = [partial(_outputs, oracle.side, text, whole=True) for oracle in measured.oracles]
    sides = [*zip(measured.oracles, measured.dtypes, reads, strict=True)]
    exact = [oracle.exactly(dtype, read) for oracle, dtype, read in sides]
    rounding: list[Outputs] = []  # of the difference between both sides
    for seed in range(SEEDS):
        one, another = (
            oracle.shakily(dtype, seed + place * SEEDS, read) for place, (oracle, dtype, read) in enumerate(sides)
        )
        both = [part for part in one if all(part in outputs for outputs in (another, *exact))]
        rounding.append(
            {part: ((another[part] - exact[1][part]) - (one[part] - exact[0][part])).float() for part in both}
        )
    eps = max(torch.finfo(dtype).eps for dtype in measured.dtypes)
    found = FoundFault()
    for whole, how in ((True, "read in one pass"), (False, IN_STEPS)):
        outputs = [_outputs(side, text, whole=whole) for side in (reference, other)]
        notes = _left_out(reference, *outputs) + _left_out(other, *reversed(outputs))
        curve, point = _compare(text, outputs, exact, rounding, eps)
        found = FoundFault(None, curve, notes)
        if not curve:
            return found
        if point is not None:
            reason = f"{point.name} is the first part whose output differs, {how}"
            place = point.position + len(text.prompt_ids) * (not point.sublayer.startswith(ENCODER))
            fault = Fault(text.id, point.layer, point.sublayer, point.name, place, point.size, reason)
            return found._replace(fault=fault)
    reason = "read alone both sides agree, in one pass and in steps: it is the batch, or what a prompt cache holds"
    place = len(text.prompt_ids) + begin
    return found._replace(fault=Fault(text.id, None, "batch", "", place, float(measured.ratios.max()), reason))


def _left_out(side: LocalSide, own: Outputs, others: Outputs) -> tuple[str, ...]:
    """A sentence on the parts that the other side lacks."""
    names = [part.name for part in own if part not in others]
    return (f"layers: only {side.name} has {_some(names, SHOWN)}; this is left out",) if names else ()


def _text(measured: MeasuredNoise) -> tuple[Text, int]:
    """The text with the largest ratio, cut a little after the first position that differs; and that position."""
    worst = int(measured.ratios.argmax())
    text, index = [(reading.text, index) for reading in measured.readings for index in reading.indices][worst]
    bound = min(measured.noise.allowed, max(measured.noise.typical_allowed, ALLOWANCE))
    ratios = zip(places_read(measured.readings), measured.ratios.tolist(), strict=True)
    first = min([index, *(at for (id, at), ratio in ratios if id == text.id and ratio > bound)])
    return replace(text, token_ids=text.token_ids[: max(first + 4, min(POSITIONS, len(text.token_ids)))]), first


def _outputs(side: LocalSide, text: Text, *, whole: bool) -> Outputs:
    """The outputs of a side's layers at the last `POSITIONS` of a text, read on its own. Raises ModelError."""
    length = len(text.token_ids)
    count = min(POSITIONS, length)
    with tapped(side.session, count) as (session, taps):
        alone = LocalSide(side.name, session, side.resolved)
        if whole:
            for _, logits in alone.whole_text(text, range(length - count, length)):
                taps.receive_logits(logits)
        elif failed := alone.read([text], lambda place, index, logits: taps.receive_logits(logits)):
            raise ModelError(failed[text.id])
        return taps.outputs()


def _compare(
    text: Text, outputs: Sequence[Outputs], exact: Sequence[Outputs], rounding: Sequence[Outputs], eps: float
) -> LayerCurve:
    """The curve over all layers that every reading has, in the reference's order."""
    curve: list[LayerDifference] = []
    first: LayerDifference | None = None
    for part in outputs[0]:
        if not all(part in each for each in (outputs[1], *exact, *rounding)):
            continue
        a, b = (each[part].double() for each in outputs)
        if a.shape != b.shape:
            continue
        size = a.norm(dim=-1).clamp(min=TINY)
        difference, by_weights = b - a, exact[1][part] - exact[0][part]
        shaken = torch.stack([each[part].double().norm(dim=-1) for each in rounding])  # [SEEDS, positions]
        # a result is rounded at least once, even if no torch operation is visible
        scale = torch.maximum(shaken.square().mean(0).sqrt(), eps * size)
        spread = float((shaken.amax(0) / shaken.amin(0).clamp(min=TINY)).median())
        beyond = (difference - by_weights).norm(dim=-1) > ALLOWANCE * max(spread, 2.0) * scale
        relative = difference.norm(dim=-1) / size
        explained = (by_weights.norm(dim=-1).square() + scale.square()).sqrt() / size
        # indices in the text, or in the source for a layer of an encoder
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
