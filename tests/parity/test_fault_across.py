"""The first sublayer that parts, between a side of the native runtime and one of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from genctl.parity.sides import LocalSide
from tests.parity import faults
from tests.parity.checkpoints import compared, other

Plant = Callable[[LocalSide], None]
BIAS: tuple[Plant, Any] = partial(faults.lost_mlp_bias, layer=1), (1, "mlp")
ROPE: tuple[Plant, Any] = partial(faults.turned_rope, layer=1), (1, "attention")
# architecture, what is planted, layer and sublayer
PLANTED = {
    "gpt2-bias": ("gpt2", *BIAS),
    "llama-rope": ("llama", *ROPE),
    "qwen2-rope": ("qwen2", *ROPE),
    "qwen2-epsilon": ("qwen2", faults.other_epsilon, (0, "norm")),
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


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
        (None, "norm"),
        (None, "head"),
        *((layer, kind) for layer in (0, 1) for kind in ("norm", "attention", "mlp", "layer")),
    }
    assert max(point.size / point.noise for point in found.curve if point.noise) < 4
    assert found.notes == ()


@pytest.mark.parametrize("arch", ["t5", "bart"])
def test_encoders_have_a_curve_too(arch: str, folders: Path) -> None:
    found = compared(arch, folders, other(arch, folders, runtime="transformers"), "native", layers=True)
    kinds = [point.sublayer for point in found.curve]
    assert kinds[:3] == ["encoder embedding", "encoder norm", "encoder attention"]
    assert kinds.count("cross-attention") == 2
    assert max(point.size / point.noise for point in found.curve if point.noise) < 4


def test_what_one_side_alone_has_is_left_out_and_said(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from genctl.parity import taps

    known = taps._sublayer
    monkeypatch.setattr(taps, "_sublayer", lambda name: "" if name == "mlp" else known(name))
    found = compared("gpt2", folders, other("gpt2", folders, runtime="transformers"), "native", layers=True)
    assert found.notes == (
        "layers: only reference has norm (layers.0.mlp_norm, …), mlp (layers.0.mlp, …); this is left out",
    )
    assert {point.sublayer for point in found.curve} == {"embedding", "norm", "attention", "layer", "head"}
