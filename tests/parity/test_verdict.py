"""The verdict of a side: planted faults are defects, harmless changes are not, and rounded weights are drift."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from genctl.engines.protocol import Request
from genctl.models import packed_layers
from genctl.parity.measure import measure
from genctl.parity.sides import LocalSide
from tests.parity.checkpoints import checkpoint, compared, other
from tests.parity.faults import FAULTS
from tests.parity.sides import requests, side

ABSOLUTE = {"swapped_rope_halves"}  # models with learned positions, such as gpt2, have nothing to swap
# all but those hidden by rounding to 16 bits, which is a thousand times larger
SEEN_IN_HALF = ("off_by_one_position", "wide_mask", "stale_column", "lost_bias", "swapped_rope_halves")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


PLANTED = [
    *(
        (arch, runtime, fault)
        for arch in ("qwen2", "gpt2")
        for runtime in ("native", "transformers")
        for fault in FAULTS
        if arch != "gpt2" or fault not in ABSOLUTE
    ),
    *(("gemma3", "auto", fault) for fault in ("off_by_one_position", "wide_mask", "stale_column")),
    *(("mixtral", "auto", fault) for fault in ("off_by_one_position", "other_epsilon")),
]


@pytest.mark.parametrize(("arch", "runtime", "fault"), PLANTED)
def test_a_planted_fault_is_a_defect(arch: str, runtime: str, fault: str, folders: Path) -> None:
    faulty = other(arch, folders, runtime=runtime)
    FAULTS[fault](faulty)
    found = compared(arch, folders, faulty)
    assert found.verdict == "defect", (found.reason, found.noise)
    assert "rounding" in found.reason or "distribution" in found.reason


HARMLESS: dict[str, dict[str, Any]] = {
    "another order of sums": {"pack": False},
    "another runtime": {"runtime": "transformers"},
    "a batch": {},
}


@pytest.mark.parametrize("change", HARMLESS)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2", "gemma3", "mixtral", "t5", "bart"])
def test_a_harmless_change_is_a_tie(arch: str, change: str, folders: Path) -> None:
    found = compared(arch, folders, other(arch, folders, **HARMLESS[change]))
    assert found.verdict == "tie", (found.reason, found.noise)
    assert all(parting.verdict == "tie" for parting in found.partings)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "mamba"])
def test_another_attention_and_a_batch_of_transformers_are_ties(arch: str, folders: Path) -> None:
    changed = other(arch, folders, runtime="transformers")
    if arch != "mamba":
        changed.session.loaded.model.set_attn_implementation("eager")
    found = compared(arch, folders, changed, "transformers")
    assert found.verdict == "tie", (found.reason, found.noise)


ROUNDED: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16 by transformers": {"dtype": "float16", "runtime": "transformers"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
}


@pytest.mark.parametrize("rounding", ROUNDED)
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_rounded_weights_are_drift(arch: str, rounding: str, folders: Path) -> None:
    found = compared(arch, folders, other(arch, folders, **ROUNDED[rounding]))
    assert found.verdict == "drift", (found.reason, found.noise)
    assert found.noise.explained > 100 * found.noise.reference
    assert all(parting.verdict != "defect" for parting in found.partings)


@pytest.mark.parametrize("fault", SEEN_IN_HALF)
@pytest.mark.parametrize("rounding", ["bfloat16", "int8", "int4"])
def test_a_fault_in_a_rounded_side_is_a_defect(rounding: str, fault: str, folders: Path) -> None:
    faulty = other("qwen2", folders, **ROUNDED[rounding])
    FAULTS[fault](faulty)
    found = compared("qwen2", folders, faulty)
    assert found.verdict == "defect", (found.reason, found.noise)


QUANTISED_CLASSES: dict[str, Any] = {"quantize": "int8", "runtime": "transformers"}
# texts so short that a code may cross its rounding border in the side's own reading, but in no shaken one
SHORT = [("The sea", 5), ("The sea", 12), ("Once upon a time", 5), ("She was sad", 8)]


@pytest.fixture(scope="module")
def stories() -> LocalSide:
    return side(name="reference")


@pytest.mark.parametrize("quantize", ["int4", "int8"])
@pytest.mark.parametrize(
    ("prompt", "length", "runtime"), [*((*text, "auto") for text in SHORT), ("The sea", 12, "transformers")]
)
def test_quantised_weights_are_drift_on_short_texts(
    prompt: str, length: int, runtime: str, quantize: str, stories: LocalSide
) -> None:
    reference = stories if runtime == "auto" else side(runtime=runtime, name="reference")
    found = measure(*_short(prompt, length, reference, side(quantize=quantize)))
    assert found.verdict == "drift", (found.reason, found.noise)


# each runtime rounds other layers to codes
@pytest.mark.parametrize("text", [("The sea", 12), ("Once upon a time", 24)])
@pytest.mark.parametrize("beside", [{}, {"quantize": "int8"}, {"quantize": "int4"}, {"runtime": "transformers"}])
def test_int8_weights_of_transformers_classes_are_drift_on_either_side(
    beside: dict[str, Any], text: tuple[str, int]
) -> None:
    sides = side(name="quantised", **QUANTISED_CLASSES), side(name="beside", **beside)
    for pair in (sides, sides[::-1]):
        found = measure(*_short(*text, *pair))
        assert found.verdict == "drift", (found.reason, found.noise)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["llama", "gpt2", "t5"])
def test_int8_weights_of_transformers_classes_are_drift_beside_native_weights(
    arch: str, dtype: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_layers, "SMALLEST_INT8", 1)  # the layers of a tiny checkpoint are small
    quantised = other(arch, folders, dtype=dtype, **QUANTISED_CLASSES)
    found = compared(arch, folders, quantised)
    assert found.verdict == "drift", (found.reason, found.noise)


@pytest.mark.parametrize("fault", ["off_by_one_position", "stale_column", "swapped_rope_halves"])
@pytest.mark.parametrize("side_of", [{"quantize": "int4"}, {"quantize": "int8"}, QUANTISED_CLASSES])
def test_a_fault_in_a_quantised_side_is_a_defect_on_a_short_text(
    side_of: dict[str, Any], fault: str, stories: LocalSide
) -> None:
    faulty = side(**side_of)
    FAULTS[fault](faulty)
    found = measure(*_short("The sea", 12, stories, faulty))
    assert found.verdict == "defect", (found.reason, found.noise)


def _short(prompt: str, length: int, *sides: LocalSide) -> tuple[LocalSide, LocalSide, list[Request]]:
    """Both sides with so many new tokens, and the prompt."""
    mine, theirs = (
        LocalSide(
            each.name,
            each.session,
            replace(each.resolved, generation=replace(each.resolved.generation, max_new_tokens=length)),
        )
        for each in sides
    )
    return mine, theirs, requests(mine, [prompt])


def test_a_quantised_cache_is_drift(folders: Path) -> None:
    settings = {"max_new_tokens": 16, "cache_implementation": "quantized"}
    found = compared("llama", folders, side(checkpoint("llama", folders), generation=settings))
    assert found.verdict == "drift", (found.reason, found.noise)
    assert found.summary.kl.max > 0
