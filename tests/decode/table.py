"""A model that can be worked out on paper: the logits after each text are in a table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from genctl.decode.runtime import Abilities, Output, Pass
from genctl.decode.types import Prefix

PROMPT = (0,)


class Table:
    """Stands in for a runtime. Every text of new tokens has its own row of random logits."""

    is_encoder_decoder = False
    abilities = Abilities(supports_cache=False, reads_padded=False)
    bound = math.inf
    device = torch.device("cpu")

    def __init__(self, vocabulary: int, length: int, eos: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocabulary, self.length, self.eos = vocabulary, length, eos
        self.levels = [1.5 * torch.randn(*[vocabulary] * (depth + 1), generator=generator) for depth in range(length)]
        self.forwards = 0
        self.model = self

    def prefill(self, ids: Sequence[int], source: Any, *, use_cache: bool = True, hidden: bool = False) -> Prefix:
        self.forwards += 1
        return Prefix(torch.tensor([list(ids)]), None, self.levels[0][None])

    def __call__(self, given: Pass) -> Output:
        assert given.keep == 1
        self.forwards += 1
        return Output(torch.stack([self.after(row[len(PROMPT) :]) for row in given.feed.tolist()])[:, None], None)

    def after(self, text: Sequence[int]) -> Tensor:
        """The logits f32 [V] after the new tokens `text`."""
        return self.levels[len(text)][tuple(text)]

    def texts(self) -> Iterator[tuple[tuple[int, ...], float]]:
        """Every text that ends with EOS or at the length limit, with its log-probability."""
        others = [token for token in range(self.vocabulary) if token != self.eos]
        for length in range(1, self.length + 1):
            last = range(self.vocabulary) if length == self.length else [self.eos]
            for text in itertools.product(*[others] * (length - 1), last):
                yield text, sum(float(self.after(text[:at]).log_softmax(0)[token]) for at, token in enumerate(text))
