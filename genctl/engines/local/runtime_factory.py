"""The runtime of a loaded model: native for native models, else transformers' classes."""

from __future__ import annotations

from typing import Any

from genctl.decode.runtime import ModelRuntime
from genctl.native.model import NativeModel
from genctl.native.runtime import NativeRuntime


def runtime_of(model: Any, *, compile: bool = False) -> ModelRuntime:
    """The `ModelRuntime` of a loaded model. `compile` affects only transformers' models."""
    if isinstance(model, NativeModel):
        return NativeRuntime(model)
    from genctl.transformers.runtime import TransformersRuntime

    return TransformersRuntime(model, compile=compile)
