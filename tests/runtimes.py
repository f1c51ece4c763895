"""The runtime that tests drive: the native one for every model that it knows, transformers' classes for the others.

GENCTL_TEST_RUNTIME=transformers runs the same tests on transformers' classes alone.
"""

from __future__ import annotations

import os
from typing import Any

from genctl.decode.forward import Forward
from genctl.decode.runtime import ModelRuntime
from genctl.native.config import NotNative
from genctl.native.load import Plan, build
from genctl.native.model import NativeConfig, NativeModel, SpecialTokens
from genctl.native.runtime import NativeRuntime


def forward(model: Any) -> ModelRuntime:
    """`model`, which is one of transformers', as the loop sees it. It shares the weights."""
    if os.environ.get("GENCTL_TEST_RUNTIME") == "transformers":
        return Forward(model)
    try:
        return native(model)
    except NotNative:
        return Forward(model)


def native(model: Any) -> NativeRuntime:
    """`model` on the native runtime. Raises NotNative for what it does not know."""
    tensors = model.state_dict()
    config = model.config.to_dict()
    plan = Plan(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    special = SpecialTokens(config, model.generation_config.to_dict())
    decoder = build(plan, tensors.__getitem__)
    return NativeRuntime(NativeModel(decoder, NativeConfig(config, plan.spec), special, type(model).__name__))
