"""The first layer that differs, within a runtime and between both, and the curve by layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from genctl.parity.sides import LocalSide, tapped
from tests.parity import faults
from tests.parity.checkpoints import PROMPTS, compared, other
from tests.parity.faults import FAULTS

# the layer where a fault begins; None: only a batch has it
EXPECTED = {"off_by_one_position": 0, "wide_mask": None, "stale_column": 0, "lost_bias": 0, "other_epsilon": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("fault", EXPECTED)
@pytest.mark.parametrize("runtime", ["native", "transformers"])
def test_the_first_layer_that_differs_is_found(runtime: str, fault: str, folders: Path) -> None:
    faulty = other("qwen2", folders, runtime=runtime)
    FAULTS[fault](faulty)
    found = compared("qwen2", folders, faulty, runtime)
    assert found.fault is not None
    layer = EXPECTED[fault]
    assert (found.fault.layer, found.fault.sublayer) == (layer, "batch" if layer is None else "layer")
    assert found.fault.position < 30
    assert [point.name for point in found.curve] == ["embeddings", "layers.0", "layers.1", "logits"]


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
    assert [point.sublayer for point in found.curve] == ["embedding", "layer", "layer", "head"]
    assert max(point.size / point.noise for point in found.curve if point.noise) < 4
    assert found.curve[-1].size > found.curve[1].size


def test_a_tapped_model_computes_in_the_dtype_of_its_model(folders: Path) -> None:
    """Its activations may have another dtype than its weights: a second reading of a bfloat16 file is in float32."""
    side = other("qwen2", folders)
    side.session.loaded.model.decoder.dtype = torch.float64
    with tapped(side.session, 4) as (session, _):
        assert session.forward.decoder.dtype is torch.float64  # type: ignore[attr-defined]


# -- between the runtimes ----------------------------------------------------------------------------------------------

Plant = Callable[[LocalSide], None]
BIAS: tuple[Plant, int] = partial(faults.lost_mlp_bias, layer=1), 1
# architecture, what is planted, and its layer; None: the encoder
PLANTED: dict[str, tuple[str, Plant, int | None]] = {
    **{f"{arch}-bias": (arch, *BIAS) for arch in ("gpt2", "gpt_neox", "phi", "opt", "bloom", "bart")},
    **{f"{arch}-epsilon": (arch, faults.other_epsilon, 0) for arch in ("llama", "qwen2")},
    "t5-cross": ("t5", partial(faults.scaled, layer=0, part="cross"), 0),
    "t5-encoder": ("t5", partial(faults.scaled, layer=1, part="encoder"), None),
}
RUNTIMES = [("native", "transformers"), ("transformers", "native")]


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize(("mine", "theirs"), RUNTIMES)
def test_a_fault_is_found_in_its_layer_across_runtimes(mine: str, theirs: str, planted: str, folders: Path) -> None:
    arch, plant, expected = PLANTED[planted]
    faulty = other(arch, folders, runtime=theirs)
    plant(faulty)
    found = compared(arch, folders, faulty, mine)
    assert found.verdict == "defect"
    assert found.fault is not None
    assert (found.fault.layer, found.fault.sublayer) == (expected, "encoder states" if expected is None else "layer")
    assert found.notes == ()


PARTS = ["embeddings", "layers.0", "layers.1", "logits"]
ALIKE = ("gpt2", "llama", "qwen2", "gpt_neox", "phi", "gemma2", "falcon", "bloom", "opt", "t5", "bart")


@pytest.mark.parametrize("arch", ALIKE)
@pytest.mark.parametrize(("mine", "theirs"), RUNTIMES)
def test_no_layer_is_named_where_only_sums_differ(mine: str, theirs: str, arch: str, folders: Path) -> None:
    found = compared(arch, folders, other(arch, folders, runtime=theirs), mine, layers=True)
    assert found.fault is None
    assert [point.name for point in found.curve] == ["encoder"] * (arch in ("t5", "bart")) + PARTS
    assert max(point.size / point.noise for point in found.curve if point.noise) < 4
    assert found.notes == ()
