"""The first sublayer that parts, within a runtime and between both, and the curve by layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from genctl.parity import taps
from genctl.parity.sides import LocalSide
from genctl.parity.taps import tapped
from tests.parity import faults
from tests.parity.checkpoints import PROMPTS, compared, other
from tests.parity.faults import FAULTS

# fault -> layer, sublayer
EXPECTED = {
    "off_by_one_position": (0, "attention"),
    "wide_mask": (None, "batch"),
    "stale_column": (0, "attention"),
    "lost_bias": (0, "attention"),
    "other_epsilon": (0, "attention"),
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
    assert len(found.curve) == 8


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
    assert [point.sublayer for point in found.curve[:3]] == ["embedding", "attention", "mlp"]
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


# -- between the runtimes ----------------------------------------------------------------------------------------------

Plant = Callable[[LocalSide], None]
BIAS: tuple[Plant, Any] = partial(faults.lost_mlp_bias, layer=1), (1, "mlp")
ROPE: tuple[Plant, Any] = partial(faults.turned_rope, layer=1), (1, "attention")
# architecture, what is planted, layer and sublayer
PLANTED = {
    "gpt2-bias": ("gpt2", *BIAS),
    "llama-rope": ("llama", *ROPE),
    "qwen2-rope": ("qwen2", *ROPE),
    "qwen2-epsilon": ("qwen2", faults.other_epsilon, (0, "attention")),
    "gpt_neox-bias": ("gpt_neox", *BIAS),
    "gpt_neox-rope": ("gpt_neox", *ROPE),
    "phi-bias": ("phi", *BIAS),
    "opt-bias": ("opt", *BIAS),
    "bloom-bias": ("bloom", *BIAS),
    "bart-bias": ("bart", *BIAS),
    "t5-mlp": ("t5", partial(faults.scaled, layer=1, part="mlp"), (1, "mlp")),
    "t5-cross": ("t5", partial(faults.scaled, layer=0, part="cross"), (0, "cross-attention")),
    "t5-encoder": ("t5", partial(faults.scaled, layer=1, part="encoder"), (1, "encoder attention")),
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
    assert (found.fault.layer, found.fault.sublayer) == expected
    assert found.notes == ()


@pytest.mark.parametrize("arch", ["gpt2", "llama", "qwen2", "gpt_neox", "phi", "gemma2", "falcon", "bloom", "opt"])
@pytest.mark.parametrize(("mine", "theirs"), RUNTIMES)
def test_no_layer_is_named_where_only_sums_differ(mine: str, theirs: str, arch: str, folders: Path) -> None:
    found = compared(arch, folders, other(arch, folders, runtime=theirs), mine, layers=True)
    assert found.fault is None
    assert {(point.layer, point.sublayer) for point in found.curve} >= {
        (None, "embedding"),
        (None, "head"),
        *((layer, kind) for layer in (0, 1) for kind in ("attention", "mlp", "layer")),
    }
    assert max(point.size / point.noise for point in found.curve if point.noise) < 4
    assert found.notes == ()


@pytest.mark.parametrize("arch", ["t5", "bart"])
def test_encoders_have_a_curve_too(arch: str, folders: Path) -> None:
    found = compared(arch, folders, other(arch, folders, runtime="transformers"), "native", layers=True)
    kinds = [point.sublayer for point in found.curve]
    assert kinds[:3] == ["encoder embedding", "encoder attention", "encoder mlp"]
    assert kinds.count("cross-attention") == 2
    assert max(point.size / point.noise for point in found.curve if point.noise) < 4


def test_what_one_side_alone_has_is_left_out_and_said(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = taps._sublayer
    monkeypatch.setattr(taps, "_sublayer", lambda name: "" if name == "mlp" else known(name))
    found = compared("gpt2", folders, other("gpt2", folders, runtime="transformers"), "native", layers=True)
    assert found.notes == ("layers: only reference has mlp (layers.0.mlp, …); this is left out",)
    assert {point.sublayer for point in found.curve} == {"embedding", "attention", "layer", "head"}
