"""Drafters, and those that are models: a smaller one with the same tokens, or the model's first layers.

A drafter is shared by lanes; `begin` returns a `DraftWriter` for one lane. `Assisted` verifies every proposal, so a bad
drafter only costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from genctl.decode.read_along import ReadAlong
from genctl.decode.runtime import ModelRuntime, Pass, depth_of
from genctl.decode.types import Context, Draft
from genctl.errors import ModelError
from genctl.events import shared_length

# (scores f32 [1, V] after the processors, new tokens before) -> the token that is drawn
Draw: TypeAlias = Callable[[Tensor, int], int]


class DraftWriter(Protocol):
    """Drafts for one lane."""

    def __call__(self, text: Sequence[int], count: int) -> Draft:
        """At most `count` (at least 1) tokens that may follow `text`, which only grows between two calls."""
        ...


class Drafter(Protocol):
    """A way to draft; one by a model has it as `forward`. `begin` raises ModelError if it cannot draft for a lane.

    One that learns from the texts of a run has `keep(tokens)`. Drafts without a model come with `rates`.
    """

    @property
    def kind(self) -> str: ...

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        """The writer for one lane, which takes the most probable tokens without `draw`.

        It stops early after a token with a probability below `confidence`.
        """
        ...


@dataclass(frozen=True)
class ModelDrafter:
    """Another model with the same tokens drafts (arXiv:2211.17192, arXiv:2302.01318).

    Its scores pass through the lane's processors too, so that it predicts the choice. An encoder-decoder
    drafts for an encoder-decoder, with its own encoder.
    """

    forward: ModelRuntime

    kind: ClassVar[str] = "assisted"

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        if self.forward.is_encoder_decoder != context.model.is_encoder_decoder:
            kinds = "a decoder-only model", "an encoder-decoder"
            model, assistant = (kinds[one.is_encoder_decoder] for one in (context.model, self.forward))
            raise ModelError(f"{model} needs an assistant of the same kind, and the assistant is {assistant}")
        source = context.prefix.source
        if source is not None:
            source = self.forward.encode(source.ids[0].tolist())
        cached = context.prefix.cache is not None
        follower = ReadAlong(self.forward, use_cache=cached, cuts=True, source=source)
        if follower.cached:  # a cache that forgets nothing is refused before the first step
            follower([context.prefix.tokens[0].tolist()])
        return ModelDraftWriter(follower, context, draw, confidence)


class ModelDraftWriter:
    """Drafts by a model that reads the row."""

    def __init__(self, follower: ReadAlong, context: Context, draw: Draw | None, confidence: float) -> None:
        self.follower = follower
        self.context = context
        self.draw = draw
        self.confidence = confidence
        self.length = follower.length  # of the row at the last call
        self.drafted: list[int] = []  # tokens of the last draft

    def __call__(self, text: Sequence[int], count: int) -> Draft:
        follower, eos = self.follower, self.context.eos
        agreed = shared_length(text[self.length :], self.drafted)
        follower.cut(min(self.length + agreed, follower.length, len(text) - 1))
        logits = follower([text])[0]
        tokens: list[int] = []
        distributions: list[Tensor] = []
        before = len(text) - self.context.prefix.tokens.shape[1]
        while True:
            scores = self._scores(text, tokens, logits)
            distribution = scores[0].softmax(-1)
            if self.draw is not None:
                token = self.draw(scores, before + len(tokens))
                distributions.append(distribution)
            else:
                token = int(distribution.argmax())
            tokens.append(token)
            # the unsure token stays: dropping it depending on its value would bias the distribution
            if len(tokens) == count or token in eos or float(distribution[token]) < self.confidence:
                break
            logits = follower([[*text, *tokens]])[0]
        self.length, self.drafted = len(text), tokens
        return Draft(tokens, torch.stack(distributions) if distributions else None)

    def _scores(self, text: Sequence[int], tokens: list[int], logits: Tensor) -> Tensor:
        """f32 [1, V] over the target's vocabulary, after the processors; -inf for tokens that the assistant lacks."""
        wanted = self.context.prefix.logits
        size = wanted.shape[-1]
        logits = logits[:size].to(wanted.device)
        if len(logits) < size:
            logits = torch.nn.functional.pad(logits, (0, size - len(logits)), value=-torch.inf)
        scores = logits[None]
        if self.context.processors:
            history = torch.tensor([[*text, *tokens]], device=wanted.device)
            for process in self.context.processors:
                scores = process(history, scores)
        return scores


@dataclass(frozen=True)
class EarlyExitDrafter:
    """The model's first layers, followed by its head, draft (LayerSkip, arXiv:2404.16710). Create it with `after`.

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
        follower = ReadAlong(self.forward, cuts=True, cache=part, read=prefix.tokens[0].tolist())
        return ModelDraftWriter(follower, context, draw, confidence)
