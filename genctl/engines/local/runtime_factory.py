"""The runtime of a loaded model: native where the model is, transformers' classes otherwise."""

from __future__ import annotations

from typing import Any

from genctl.decode.runtime import ModelRuntime
from genctl.native.model import NativeModel
from genctl.native.runtime import NativeRuntime


def runtime_of(model: Any, *, compile: bool = False) -> ModelRuntime:
    """A loaded model as the loop sees it. `compile` concerns transformers' models alone."""
    if isinstance(model, NativeModel):
        return NativeRuntime(model)
    from genctl.transformers.runtime import TransformersRuntime

    return TransformersRuntime(model, compile=compile)
