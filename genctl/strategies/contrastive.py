"""Contrastive search: probable tokens that differ from the earlier ones (Su et al. 2022, arXiv:2202.06417)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from genctl.decode.types import Choice, Context, Scores, Search, Traits


@dataclass(frozen=True)
class Contrastive:
    """Of the `top_k` most probable tokens write the one with the best

        (1 - penalty_alpha) * probability - penalty_alpha * (largest cosine similarity to an earlier token)

    where tokens are compared by the last hidden states (equation 5). All `top_k` go through the model in one pass as
    branches of the row; the losers are dropped, and the winner's output gives the next probabilities.
    """

    top_k: int
    penalty_alpha: float

    n: ClassVar[int] = 1
    kind: ClassVar[str] = "contrastive"
    length_penalty: ClassVar[float] = 1.0
    # no drafts: losing branches are dropped, so tokens are never removed from a row
    traits: ClassVar[Traits] = Traits(needs_hidden=True, reads_scores=True)

    @property
    def max_rows(self) -> int:
        return self.top_k

    def search(self, scores: Scores, context: Context) -> Search:
        assert context.prefix.hidden is not None
        directions = _Directions(context.prefix.hidden[0], context.max_new_tokens)
        row = torch.zeros(1, dtype=torch.long, device=scores.logits.device)
        logits, accepted = scores.logits[0, -1], 0
        while True:
            top = logits.softmax(-1).topk(min(self.top_k, len(logits)))
            scores = yield Choice(row, None, accepted=accepted, draft=top.indices[None, :, None])
            assert scores.hidden is not None
            hidden = scores.hidden[:, 1]  # [k, H], each candidate read after the row
            values = (1 - self.penalty_alpha) * top.values - self.penalty_alpha * directions.nearest(hidden)
            row = values.masked_fill(logits[top.indices] == -torch.inf, -torch.inf).argmax(0, keepdim=True)
            directions.add(hidden[row])
            logits, accepted = scores.logits[row[0], 1], 1


class _Directions:
    """The hidden states of one text, scaled to length 1, with room for new tokens."""

    def __init__(self, hidden: Tensor, room: int) -> None:
        self.count = hidden.shape[0]
        self.buffer = torch.cat([_unit(hidden), hidden.new_empty(min(room, 1024), hidden.shape[1]).float()])

    def nearest(self, hidden: Tensor) -> Tensor:
        """The largest cosine similarity of each of hidden [k, H] to the states of the text; f32 [k]."""
        return (_unit(hidden) @ self.buffer[: self.count].T).amax(1)

    def add(self, hidden: Tensor) -> None:
        """Append the hidden state [1, H] of a new token."""
        if self.count == len(self.buffer):
            self.buffer = torch.cat([self.buffer, torch.empty_like(self.buffer)])
        self.buffer[self.count] = _unit(hidden)[0]
        self.count += 1


def _unit(hidden: Tensor) -> Tensor:
    return torch.nn.functional.normalize(hidden.float(), dim=-1)
