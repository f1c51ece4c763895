"""A plan of quantised weights is what the loaded model holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from genctl.inspecting.plan import plan
from genctl.models.hub import load
from genctl.native.model import NativeModel
from genctl.params import Generation, Runtime
from tests.tiny import checkpoint


@pytest.mark.parametrize("arch", ["llama", "gpt2", "t5", "builtin:stories", "builtin:numbers"])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_planned_weights_are_those_that_are_held(arch: str, quantize: str, tmp_path: Path) -> None:
    name = arch if arch.startswith("builtin:") else str(checkpoint(arch, tmp_path))
    runtime = Runtime(model=name, device="cpu", quantize=quantize)  # type: ignore[arg-type]
    model = load(runtime).model
    assert isinstance(model, NativeModel)
    planned = plan(runtime, Generation(), batch=1, length=8, source_length=None)["weights_bytes"]
    assert model.bytes() <= planned
    if not model.config.is_encoder_decoder:  # of those a plan is an upper bound
        assert planned <= 1.02 * model.bytes()
