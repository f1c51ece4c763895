"""A text that is read in as few passes as memory allows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from genctl.parity import sides
from genctl.parity.values import Text
from tests.parity.checkpoints import other


@pytest.mark.parametrize(
    ("arch", "runtime"),
    [
        ("mamba", "transformers"),
        *((arch, runtime) for arch in ("gpt2", "mistral", "t5") for runtime in ("native", "transformers")),
    ],
)
def test_logits_do_not_depend_on_the_passes(
    arch: str, runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = other(arch, tmp_path, runtime=runtime)
    text = Text("0", tuple(range(5, 25)), tuple(range(30, 60)), "", "0")
    whole = dict(side.whole_text(text, range(30)))
    monkeypatch.setattr(sides, "LARGEST", 3 * side.vocabulary)
    monkeypatch.setattr(sides, "LEAST", 1)
    monkeypatch.setattr(sides, "LONGEST", 7)
    wanted = (0, 1, 9, 27)
    parts = dict(side.whole_text(text, wanted))
    assert tuple(parts) == wanted
    for index in wanted:
        torch.testing.assert_close(parts[index], whole[index], atol=1e-4, rtol=1e-4)
