"""Run a strategy on changed scores, for contrasts of models or layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from genctl.decode.read_along import ReadAlong
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Context, Scores, Search, Strategy, Traits
from genctl.errors import ModelError
from genctl.strategies.sample import Sample

# -- contrastive decoding: an expert model's log-probabilities minus an amateur's (Li et al. 2023, arXiv:2210.15097) ---


@dataclass(frozen=True)
class Amateur:
    """Tokens by log p_expert - log p_amateur, among those with p_expert >= alpha * max p_expert (equations 2 and 3).

    `temperature` is the amateur's: below 1 it sharpens the amateur's distribution and so the contrast. With `beta` the
    score is (1 + beta) log p_expert - beta log p_amateur (O'Brien and Lewis 2023, arXiv:2309.09117), a weaker contrast
    that suits sampling. The processors run after the contrast.
    """

    amateur: ModelRuntime
    alpha: float = 0.1
    beta: float | None = None
    temperature: float = 1.0
    do_sample: bool = False
    n: int = 1

    kind: ClassVar[str] = "contrastive-decoding"
    length_penalty: ClassVar[float] = 1.0
    traits: ClassVar[Traits] = Traits("raw", independent=True, reads_scores=True)

    @property
    def max_rows(self) -> int:
        return self.n

    def search(self, scores: Scores, context: Context) -> Search:
        if context.model.is_encoder_decoder or self.amateur.is_encoder_decoder:
            raise ModelError("contrastive decoding needs two decoder-only models")
        cached = context.prefix.cache is not None and self.amateur.abilities.together
        reader = ReadAlong(self.amateur, use_cache=cached)
        inner = Sample(self.do_sample, self.n)
        return rescored(inner, lambda raw: self._contrast(raw, reader), scores, context)

    def _contrast(self, scores: Scores, reader: ReadAlong) -> Tensor:
        """f32 [N, V]; `OUT` below the expert's score for implausible tokens, -inf for tokens that the amateur lacks."""
        expert = scores.logprobs[:, 0]
        size = expert.shape[1]
        logits = reader(scores.rows.tokens.tolist())[:, :size]
        amateur = (logits / self.temperature).log_softmax(-1).to(expert.device)
        if amateur.shape[1] < size:  # usually padding of the expert's vocabulary
            lacking = torch.arange(amateur.shape[1], size, device=expert.device)
            amateur = torch.nn.functional.pad(amateur, (0, len(lacking)))
            expert = expert.index_fill(1, lacking, -torch.inf)
        beta = self.beta
        contrast = expert - amateur if beta is None else (1 + beta) * expert - beta * amateur
        floor = expert.amax(-1, keepdim=True) + (math.log(self.alpha) if self.alpha else -torch.inf)
        return torch.where(expert < floor, expert + OUT, contrast)


# Added to the log-probability of tokens that a contrast excludes: their probability is 0 in float32, but their order is
# the model's, so that a token remains if processors ban all the others.
OUT = -10000.0


def rescored(inner: Strategy, contrast: Callable[[Scores], Tensor], scores: Scores, context: Context) -> Search:
    """Let `inner` choose by `contrast(scores)`, f32 [N, V], after the lane's processors. For the space "raw"."""

    def contrasted(scores: Scores) -> Scores:
        return replace(scores, logits=context.process(contrast(scores))[:, None])

    with closing(inner.search(contrasted(scores), context)) as search:
        try:
            choice = next(search)
            while True:
                scores = yield choice
                choice = search.send(contrasted(scores))
        except StopIteration:
            return
