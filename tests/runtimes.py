"""The runtime that tests drive: the native one for every model that it knows, transformers' classes for the others.

GENCTL_TEST_RUNTIME=transformers runs the same tests on transformers' classes alone. GENCTL_TEST_DEVICE=cuda computes on
a GPU, GENCTL_TEST_DEVICE=fake on a fake one (`fake_cuda`).
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from genctl.decode.runtime import ModelRuntime
from genctl.engines.strategy_choice import runtime_of
from genctl.models.architectures import read_native
from genctl.native.config import NotNative
from genctl.native.load import build
from genctl.native.plan import WeightPlan
from genctl.native.runtime import NativeRuntime, SpecialTokens
from genctl.transformers.runtime import TransformersRuntime
from tests.fake_cuda import moved

DEVICE = os.environ.get("GENCTL_TEST_DEVICE", "")


def forward(model: Any) -> ModelRuntime:
    """A runtime of `model`, a transformers model, as the loop sees it. It shares the weights."""
    if os.environ.get("GENCTL_TEST_RUNTIME") == "transformers":
        return TransformersRuntime(placed(model))
    try:
        return native(model)
    except NotNative:
        return TransformersRuntime(placed(model))


def placed(model: Any) -> Any:
    """`model` on the device of the tests: a copy, unless that is the CPU."""
    if DEVICE == "fake":
        return moved(model)
    return copy.deepcopy(model).to(DEVICE) if DEVICE else model


def native(
    model: Any, config: dict[str, Any] | None = None, *, device: Any = None, dtype: Any = None, products: Any = None
) -> NativeRuntime:
    """`model` on the native runtime, with another config.json if given. Raises NotNative if it is unsupported."""
    tensors = revert_weight_conversion(model, model.state_dict())  # as `save_pretrained` writes them
    config = model.config.to_dict() if config is None else config
    plan = WeightPlan(*read_native(config), {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    at = torch.device("cuda") if DEVICE else None
    special = SpecialTokens(model.generation_config.to_dict())
    how = {"device": device or at, "dtype": dtype, "products": products, "name": type(model).__name__}
    made = runtime_of(build(plan, tensors.__getitem__, config, special, **how))
    assert isinstance(made, NativeRuntime)
    return made
