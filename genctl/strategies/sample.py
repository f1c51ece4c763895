"""Greedy decoding and multinomial sampling: every row goes its own way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from genctl.decode import host
from genctl.decode.types import Choice, Context, Scores, Search, Space
from genctl.strategies.drawing import Sampler, inverse_cdf, multinomial


@dataclass(frozen=True)
class Sample:
    """Take the most probable token of each row, or draw one.

    All `n` rows of a prompt draw from one private generator, in transformers' manner: with the same seed the tokens are
    those of `torch.manual_seed(seed)` followed by sampling the prompt alone. The sampler "inverse-cdf" draws from the
    same distribution with one random number for each row instead of one for each token of the vocabulary.
    """

    do_sample: bool = False
    n: int = 1
    length_penalty: float = 1.0  # only for the score that is reported
    sampler: Sampler = "multinomial"

    needs_hidden: ClassVar[bool] = False
    space: ClassVar[Space] = "logits"
    drafts: ClassVar[bool] = False
    waits: ClassVar[bool] = False  # nothing here has to be known on the host

    @property
    def kind(self) -> str:
        return "sample" if self.do_sample else "greedy"

    @property
    def rows(self) -> int:
        return self.n

    def search(self, scores: Scores, context: Context) -> Search:
        draw = multinomial if self.sampler == "multinomial" else inverse_cdf
        slots = list(range(self.n))
        rows = torch.zeros(self.n, dtype=torch.long, device=scores.logits.device)
        while True:
            logits, left = scores.logits, scores.left
            if len(slots) != logits.shape[0]:  # the prompt's one row, for all
                logits, left = logits[rows], left and [left[0]] * len(slots)
            tokens = draw(logits[:, 0], slots, self.n, context.rng, left) if self.do_sample else best(logits)[:, 0]
            scores = yield Choice(rows, tokens, slots=slots)
            slots = [slots[survivor] for survivor in scores.survivors]
            if self.n > 1:
                rows = torch.arange(len(slots), device=logits.device)


def best(logits: Tensor) -> Tensor:
    """The most probable token, the first of equals; f32 [..., V] -> int64 [...]."""
    if not host.near(logits):
        return logits.argmax(-1)
    return torch.from_numpy(logits.numpy().argmax(-1))  # a tenth of torch's own time
