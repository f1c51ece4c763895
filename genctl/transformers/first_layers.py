"""A transformers model with its first layers only, sharing all weights (see `strategies.early_exit`)."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from genctl import compat
from genctl.errors import ModelError


def first_layers(model: Any, layer: int) -> Any:
    """The model with `layer` layers. The original is unchanged. Raises ModelError if its layers are not a list."""
    name, depth = type(model).__name__, _depth(model)
    path = _layers(model, depth)
    exit_model = here = _twin(model)
    if path is None or here is None:
        raise ModelError(f"assistant_early_exit: {name} has no single list of layers that could be left early")
    *parents, last = path.split(".")
    for step in parents:
        twin = _twin(getattr(here, step))
        if twin is None:
            raise ModelError(
                f"assistant_early_exit: the layers of {name} are spread over devices and cannot be left early"
            )
        setattr(here, step, twin)
        here = twin
    setattr(here, last, nn.ModuleList(list(getattr(here, last))[:layer]))
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    try:
        text.num_hidden_layers = layer
    except NotImplementedError:
        raise ModelError(f"assistant_early_exit: {name} has no single number of layers that could be smaller") from None
    if isinstance(vars(text).get("layer_types"), list):
        text.layer_types = text.layer_types[:layer]
    for module in (exit_model, *(exit_model.get_submodule(".".join(parents[: i + 1])) for i in range(len(parents)))):
        if hasattr(module, "config"):
            module.config = config if module.config is model.config else text
    return exit_model


def _depth(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def _layers(model: Any, depth: int) -> str | None:
    """The path of the only list of `depth` layers that is not inside another such list."""
    paths: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in paths)
        if isinstance(module, nn.ModuleList) and len(module) == depth and not inside:
            paths.append(name)
    return paths[0] if len(paths) == 1 else None


def _twin(module: Any) -> Any:
    """A copy of a module with its own list of the same children; None if its forward is bound to the original."""
    if "forward" in vars(module):
        return None
    twin = copy.copy(module)
    compat.give_own_children(twin)
    return twin
