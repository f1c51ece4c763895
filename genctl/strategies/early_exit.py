"""Self-speculative drafts by the first layers of the model (LayerSkip, arXiv:2404.16710)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from genctl.decode.cache.growing import STEP
from genctl.decode.read_along import ReadAlong
from genctl.decode.runtime import ModelRuntime, Pass, depth_of
from genctl.decode.types import Context
from genctl.errors import ModelError
from genctl.strategies.draft_models import DraftWriter, Draw, ModelDraftWriter


@dataclass(frozen=True)
class EarlyExitDrafter:
    """The model's first layers followed by its head. Create it with `EarlyExitDrafter.after`.

    It shares the model's weights, and starts with the first layers of the prompt's cache.
    """

    forward: ModelRuntime

    kind: ClassVar[str] = "early-exit"

    @classmethod
    def after(cls, forward: ModelRuntime, layer: int, *, use_cache: bool = True) -> EarlyExitDrafter:
        """Exit after `layer` of the model's layers. Raises ModelError if the architecture does not allow it.

        Tries one token, because some models need all layers: their inputs have a part for each layer (Gemma 3n), or
        their cache needs a layer with attention (LFM2).
        """
        if forward.is_encoder_decoder:
            raise ModelError(
                f"assistant_early_exit needs a decoder-only model, and {forward.name} is an encoder-decoder"
            )
        depth = depth_of(forward)
        if not 1 <= layer < depth:
            raise ModelError(
                f"assistant_early_exit = {layer}: {forward.name} has {depth} layers, "
                f"so it can leave after 1 to {depth - 1}"
            )
        part = forward.first_layers(layer)
        cache = forward.new_cache() if use_cache and forward.abilities.supports_cache else None
        if cache is None or cache.is_croppable:  # drafting needs a croppable cache
            cut = None if cache is None else cache.with_layers(cache.layers[:layer])
            try:
                part(Pass(torch.zeros(1, 1, dtype=torch.long, device=part.device), cut, first=True))
            except ValueError:
                pass  # no layer with attention: `choose` refuses caches with states for drafts
            except ModelError as error:
                problem = f"{forward.name} cannot run with its first layers alone"
                raise ModelError(f"assistant_early_exit = {layer}: {problem}") from error
        return cls(part)

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        prefix = context.prefix
        if prefix.cache is None:
            uncached = ReadAlong(self.forward, use_cache=False, cuts=True)
            return ModelDraftWriter(uncached, context, draw, confidence)
        part = prefix.cache.with_layers(prefix.cache.layers[: depth_of(self.forward)])
        row = torch.zeros(1, dtype=torch.long, device=self.forward.device)
        cache = part.select(row, room=STEP)
        cache.activate_past_recording()
        follower = ReadAlong(self.forward, cuts=True, cache=cache, read=prefix.tokens[0].tolist())
        return ModelDraftWriter(follower, context, draw, confidence)
