"""The verdict of a side: planted faults are defects, harmless changes are none, and rounded weights are drift."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.checkpoints import checkpoint, compared, other
from tests.parity.faults import FAULTS
from tests.parity.sides import side

ABSOLUTE = {"swapped_rope_halves"}  # of models with learned positions there is nothing to swap
# all but those that rounding to 16 bits hides: they are a thousand times smaller than it
SEEN_IN_HALF = ("off_by_one_position", "wide_mask", "stale_column", "lost_bias", "swapped_rope_halves")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("arch", "runtime"),
    [("qwen2", "native"), ("qwen2", "transformers"), ("gpt2", "native"), ("gpt2", "transformers")],
)
def test_a_planted_fault_is_a_defect(arch: str, runtime: str, fault: str, folders: Path) -> None:
    if arch == "gpt2" and fault in ABSOLUTE:
        pytest.skip("learned positions")
    faulty = other(arch, folders, runtime=runtime)
    FAULTS[fault](faulty)
    found = compared(arch, folders, faulty)
    assert found.verdict == "defect", (found.reason, found.noise)
    assert "rounding" in found.reason or "distribution" in found.reason


@pytest.mark.parametrize(
    ("arch", "fault"),
    [
        *(("gemma3", fault) for fault in ("off_by_one_position", "wide_mask", "stale_column")),
        *(("mixtral", fault) for fault in ("off_by_one_position", "other_epsilon")),
    ],
)
def test_a_planted_fault_is_a_defect_in_other_families(arch: str, fault: str, folders: Path) -> None:
    faulty = other(arch, folders)
    FAULTS[fault](faulty)
    assert compared(arch, folders, faulty).verdict == "defect"


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
@pytest.mark.parametrize("rounding", ["bfloat16", "int8"])
def test_a_fault_in_a_rounded_side_is_a_defect(rounding: str, fault: str, folders: Path) -> None:
    faulty = other("qwen2", folders, **ROUNDED[rounding])
    FAULTS[fault](faulty)
    found = compared("qwen2", folders, faulty)
    assert found.verdict == "defect", (found.reason, found.noise)


def test_a_quantised_cache_is_drift(folders: Path) -> None:
    settings = {"max_new_tokens": 16, "cache_implementation": "quantized"}
    found = compared("llama", folders, side(checkpoint("llama", folders), generation=settings))
    assert found.verdict == "drift", (found.reason, found.noise)
    assert found.summary.kl.max > 0
