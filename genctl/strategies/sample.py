"""Greedy decoding and multinomial sampling: every row goes its own way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from genctl.decode.types import Choice, Context, Scores, Search, Space


@dataclass(frozen=True)
class Sample:
    """Take the most probable token of each row, or draw one.

    All `n` rows of a prompt draw from one private generator, in transformers' manner: with the same seed the tokens are
    those of `torch.manual_seed(seed)` followed by sampling the prompt alone.
    """

    do_sample: bool = False
    n: int = 1
    length_penalty: float = 1.0  # only for the score that is reported

    needs_hidden: ClassVar[bool] = False
    space: ClassVar[Space] = "logits"
    drafts: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        return "sample" if self.do_sample else "greedy"

    @property
    def rows(self) -> int:
        return self.n

    def search(self, scores: Scores, context: Context) -> Search:
        slots = list(range(self.n))
        rows = torch.zeros(self.n, dtype=torch.long, device=scores.logits.device)
        while True:
            logits = scores.logits[:, 0]
            if len(rows) != len(logits):
                logits = logits[rows]
            tokens = self._draw(logits, slots, context.rng) if self.do_sample else logits.argmax(-1)
            scores = yield Choice(rows, tokens, slots=slots)
            slots = [slots[survivor] for survivor in scores.survivors]
            rows = rows[: len(slots)] if self.n == 1 else torch.arange(len(slots), device=logits.device)

    def _draw(self, logits: Tensor, slots: list[int], rng: torch.Generator) -> Tensor:
        """One token for each row: argmax of p / q with q ~ Exp(1), which is what torch.multinomial computes.

        Noise is drawn for all n rows at every step, ended ones too, so that a row's luck does not depend on the others.
        """
        probabilities = logits.softmax(-1)
        noise = torch.empty(self.n, logits.shape[1], device=logits.device).exponential_(1, generator=rng)
        if len(slots) < self.n:
            noise = noise[slots]
        return (probabilities / noise).argmax(-1)
