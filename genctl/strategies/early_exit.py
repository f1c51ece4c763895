"""Drafts by the first layers of the model itself (LayerSkip, arXiv:2404.16710): no second checkpoint is needed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch

from genctl.decode import cache as caches
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Context
from genctl.errors import ModelError
from genctl.strategies.draft_models import Drafting, Follower, WritingAhead


@dataclass(frozen=True)
class EarlyExitDrafter:
    """A model that leaves after some layers and reads its head there; made by `EarlyExitDrafter.after`.

    It shares the weights of the whole model, and begins with what the whole model's first layers made of the prompt.
    """

    forward: ModelRuntime

    kind: ClassVar[str] = "early-exit"

    @classmethod
    def after(cls, forward: ModelRuntime, layer: int) -> EarlyExitDrafter:
        """Leave after `layer` of the model's layers. Raises ModelError where the architecture does not allow it."""
        if forward.is_encoder_decoder:
            raise ModelError(
                f"assistant_early_exit needs a decoder-only model, and {forward.name} is an encoder-decoder"
            )
        depth = _depth(forward)
        if not 1 <= layer < depth:
            raise ModelError(
                f"assistant_early_exit = {layer}: {forward.name} has {depth} layers, "
                f"so it can leave after 1 to {depth - 1}"
            )
        return cls(forward.first_layers(layer))

    def begin(self, context: Context, do_sample: bool, confidence: float) -> Drafting:
        prefix = context.prefix
        if prefix.cache is None:
            return WritingAhead(Follower(self.forward, use_cache=False), context, do_sample, confidence)
        part = copy.copy(prefix.cache)
        part.layers = prefix.cache.layers[: _depth(self.forward)]
        row = torch.zeros(1, dtype=torch.long, device=self.forward.device)
        cache = caches.rewindable(caches.select(part, row, room=caches.STEP))
        follower = Follower(self.forward, cache=cache, ids=prefix.tokens[0].tolist())
        return WritingAhead(follower, context, do_sample, confidence)


def _depth(forward: ModelRuntime) -> int:
    return int(forward.config.get_text_config(decoder=True).num_hidden_layers)
