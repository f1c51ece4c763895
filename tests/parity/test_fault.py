"""The first sublayer that parts, and the curve by layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from genctl.parity.taps import tapped
from tests.parity.checkpoints import PROMPTS, compared, other
from tests.parity.faults import FAULTS, Altered

# fault -> layer, sublayer
EXPECTED = {
    "off_by_one_position": (0, "attention"),
    "wide_mask": (None, "batch"),
    "stale_column": (0, "attention"),
    "lost_bias": (0, "attention"),
    "other_epsilon": (0, "norm"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("fault", EXPECTED)
@pytest.mark.parametrize("runtime", ["native", "transformers"])
def test_the_first_sublayer_that_parts_is_found(runtime: str, fault: str, folders: Path) -> None:
    faulty = other("qwen2", folders, runtime=runtime)
    FAULTS[fault](faulty)
    found = compared("qwen2", folders, faulty, runtime).fault
    assert found is not None
    assert (found.layer, found.sublayer) == EXPECTED[fault]
    assert found.position < 30
    assert len(found.curve) > 8


def test_a_fault_of_the_second_layer_begins_there(folders: Path) -> None:
    faulty = other("qwen2", folders)
    layer = faulty.session.loaded.model.decoder.weights.layers[1]
    layer.mlp.down = Altered(layer.mlp.down, lambda result: result * 1.001)
    found = compared("qwen2", folders, faulty).fault
    assert found is not None
    assert (found.layer, found.sublayer) == (1, "mlp")


def test_a_stale_column_is_found_at_the_token_that_follows(folders: Path) -> None:
    """The column is that of token 9, and the pass that reads token 10 sees it."""
    faulty = other("qwen2", folders)
    FAULTS["stale_column"](faulty)
    found = compared("qwen2", folders, faulty).fault
    assert found is not None
    assert found.position == 11 if len(PROMPTS[int(found.text)]) > 1 else 10
    assert "steps" in found.reason


def test_the_curve_of_a_side_without_a_fault_stays_below_rounding(folders: Path) -> None:
    found = compared("qwen2", folders, other("qwen2", folders, dtype="bfloat16"), layers=True)
    assert found.fault is None
    assert [point.sublayer for point in found.curve[:3]] == ["embedding", "norm", "attention"]
    assert max(point.size / point.noise for point in found.curve if point.noise) < 4
    assert found.curve[-1].size > found.curve[1].size


def test_models_are_as_they_were_after_a_curve(folders: Path) -> None:
    """Hooks are removed, and the parts of a native model are its own."""
    side = other("qwen2", folders, runtime="transformers")
    before = [len(module._forward_hooks) for module in side.session.loaded.model.modules()]
    compared("qwen2", folders, side, "transformers", layers=True)
    assert [len(module._forward_hooks) for module in side.session.loaded.model.modules()] == before


def test_a_tapped_model_computes_in_the_dtype_of_its_model(folders: Path) -> None:
    """Its activations may have another dtype than its weights: a second reading of a bfloat16 file is in float32."""
    side = other("qwen2", folders)
    side.session.loaded.model.decoder.dtype = torch.float64
    with tapped(side.session, 4) as (session, _):
        assert session.forward.decoder.dtype is torch.float64  # type: ignore[union-attr]
