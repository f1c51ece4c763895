"""A strategy in one file: the second best token at every step. See `docs/strategies.md`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from genctl.decode.types import Choice, Context, Scores, Search, Traits


@dataclass(frozen=True)
class SecondBest:
    """Write what greedy search would have written if its favourite were not there."""

    kind: ClassVar[str] = "second-best"  # what records call it
    max_rows: ClassVar[int] = 1  # of one prompt
    length_penalty: ClassVar[float] = 1.0  # of the score that is reported
    traits: ClassVar[Traits] = Traits(independent=True)  # each row is one returned sequence

    def search(self, scores: Scores, context: Context) -> Search:
        """Yield what to write, receive what the model says after it."""
        row = torch.zeros(1, dtype=torch.long, device=scores.logits.device)
        while True:
            second = scores.logits[:, 0].topk(2).indices[:, 1]  # int64 [1]
            scores = yield Choice(row, second)
