"""The runtime that tests drive: the native one for every model that it knows, transformers' classes for the others.

GENCTL_TEST_RUNTIME=transformers runs the same tests on transformers' classes alone.
"""

from __future__ import annotations

import os
from typing import Any

from transformers.core_model_loading import revert_weight_conversion

from genctl.decode.runtime import ModelRuntime
from genctl.engines.local.runtime import runtime_of
from genctl.models.architectures import read_native
from genctl.native.config import NotNative
from genctl.native.load import build
from genctl.native.model import SpecialTokens
from genctl.native.plan import WeightPlan
from genctl.native.runtime import NativeRuntime
from genctl.transformers.runtime import TransformersRuntime


def forward(model: Any) -> ModelRuntime:
    """`model`, which is one of transformers', as the loop sees it. It shares the weights."""
    if os.environ.get("GENCTL_TEST_RUNTIME") == "transformers":
        return TransformersRuntime(model)
    try:
        return native(model)
    except NotNative:
        return TransformersRuntime(model)


def native(model: Any, config: dict[str, Any] | None = None) -> NativeRuntime:
    """`model` on the native runtime, with another config.json. Raises NotNative for what it does not know."""
    tensors = revert_weight_conversion(model, model.state_dict())  # as `save_pretrained` writes them
    config = model.config.to_dict() if config is None else config
    plan = WeightPlan(*read_native(config), {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    special = SpecialTokens(model.generation_config.to_dict())
    made = runtime_of(build(plan, tensors.__getitem__, config, special, name=type(model).__name__))
    assert isinstance(made, NativeRuntime)
    return made
