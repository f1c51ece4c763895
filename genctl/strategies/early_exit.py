"""Drafts by the first layers of the model itself (LayerSkip, arXiv:2404.16710): no second checkpoint is needed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from genctl.decode import cache as caches
from genctl.decode.forward import Forward
from genctl.decode.types import Context
from genctl.errors import ModelError
from genctl.strategies.drafting import Drafting, Follower, WritingAhead


@dataclass(frozen=True)
class EarlyExitDrafter:
    """A model that leaves after some layers and reads its head there; made by `EarlyExitDrafter.after`.

    It shares the weights of the whole model, and begins with what the whole model's first layers made of the prompt.
    """

    forward: Forward

    kind: ClassVar[str] = "early-exit"

    @classmethod
    def after(cls, forward: Forward, layer: int) -> EarlyExitDrafter:
        """Leave after `layer` of the model's layers. Raises ModelError where the architecture does not allow it."""
        return cls(Forward(_first_layers(forward.model, layer)))

    def begin(self, context: Context, do_sample: bool, confidence: float) -> Drafting:
        prefix = context.prefix
        if prefix.cache is None:
            return WritingAhead(Follower(self.forward, use_cache=False), context, do_sample, confidence)
        part = copy.copy(prefix.cache)
        part.layers = prefix.cache.layers[: _depth(self.forward.model)]
        row = torch.zeros(1, dtype=torch.long, device=self.forward.device)
        cache = caches.rewindable(caches.select(part, row, room=caches.STEP))
        follower = Follower(self.forward, cache=cache, ids=prefix.tokens[0].tolist())
        return WritingAhead(follower, context, do_sample, confidence)


def _first_layers(model: Any, layer: int) -> Any:
    """A model with the first layers only, which shares everything else. The given one is left as it is."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"assistant_early_exit needs a decoder-only model, and {name} is an encoder-decoder")
    depth = _depth(model)
    if not 1 <= layer < depth:
        raise ModelError(
            f"assistant_early_exit = {layer}: {name} has {depth} layers, so it can leave after 1 to {depth - 1}"
        )
    path = _layers(model, depth)
    exit_model = here = _twin(model)
    if path is None or here is None:
        raise ModelError(f"assistant_early_exit: {name} has no single list of layers that could be left early")
    *parents, last = path.split(".")
    for step in parents:
        twin = _twin(here._modules[step])
        if twin is None:
            raise ModelError(
                f"assistant_early_exit: the layers of {name} are spread over devices and cannot be left early"
            )
        here._modules[step] = twin
        here = twin
    here._modules[last] = nn.ModuleList(list(getattr(here, last))[:layer])
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = layer
    if isinstance(vars(text).get("layer_types"), list):
        text.layer_types = text.layer_types[:layer]
    for module in (exit_model, *(exit_model.get_submodule(".".join(parents[: i + 1])) for i in range(len(parents)))):
        if hasattr(module, "config"):
            module.config = config if module.config is model.config else text
    return exit_model


def _depth(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def _layers(model: Any, depth: int) -> str | None:
    """Where the only list of `depth` layers is that lies in no other such list."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if isinstance(module, nn.ModuleList) and len(module) == depth and not inside:
            found.append(name)
    return found[0] if len(found) == 1 else None


def _twin(module: Any) -> Any:
    """A module with children of its own list, the same ones; None where its forward is tied to the original object."""
    if "forward" in vars(module):
        return None
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
