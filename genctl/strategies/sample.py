"""Greedy decoding and multinomial sampling: independent rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from genctl.decode import transfer
from genctl.decode.types import Choice, Context, RowsOfLane, Scores, Search, Traits

if TYPE_CHECKING:
    from genctl.decode.processors.rows import RowCandidates
    from genctl.strategies.sampling import Sampler


@dataclass(frozen=True)
class Sample:
    """Take the most probable token of each row, or sample one.

    All `n` rows of a prompt use one private generator, as in transformers: with the same seed the tokens are those of
    `torch.manual_seed(seed)` followed by sampling the prompt alone. The sampler "inverse-cdf" samples from the same
    distribution with one random number for each row instead of one for each token of the vocabulary, and "counter" with
    noise that depends on the seed, the sequence, the position and the token alone: the same on every device.
    """

    do_sample: bool = False
    n: int = 1
    length_penalty: float = 1.0  # only for the reported score
    sampler: Sampler = "multinomial"

    traits: ClassVar[Traits] = Traits(independent=True)

    @property
    def kind(self) -> str:
        return "sample" if self.do_sample else "greedy"

    @property
    def max_rows(self) -> int:
        return self.n

    def search(self, scores: Scores, context: Context) -> Search:
        indices = list(range(self.n))
        rows = torch.zeros(self.n, dtype=torch.long, device=scores.logits.device)
        while True:
            logits = scores.logits[rows, 0]
            left = scores.left and [scores.left[0]] * self.n if len(scores.logits) < len(indices) else scores.left
            tokens = self.tokens(logits, [RowsOfLane(context.rng, indices, self.n, scores.rows.written)], left)
            scores = yield Choice(rows, tokens)
            indices = [indices[survivor] for survivor in scores.survivors]
            rows = torch.arange(len(indices), device=logits.device)

    def tokens(self, logits: Tensor, lanes: Iterable[RowsOfLane], left: Sequence[RowCandidates] | None) -> Tensor:
        """One token for each row: logits f32 [R, V] of all lanes, one after another -> int64 [R]."""
        if not self.do_sample:
            return best(logits)
        lanes = [*lanes]
        if self.sampler == "counter":
            from genctl.strategies.counter import counter

            return counter(logits, lanes, left)
        from genctl.strategies.sampling import draw_on_device, inverse_cdf, multinomial

        draw = multinomial if self.sampler == "multinomial" else inverse_cdf
        drawn, at = [], 0
        before = [lane.rng.get_state() for lane in lanes]
        try:
            if not transfer.on_host(logits):
                return draw_on_device(self.sampler, logits, lanes)
            for lane in lanes:
                part = slice(at, at := at + len(lane.indices))
                drawn.append(draw(logits[part], lane.indices, lane.sequences, lane.rng, left and left[part]))
        except Exception:  # a later retry must sample the same tokens
            for lane, state in zip(lanes, before, strict=True):
                lane.rng.set_state(state)
            raise
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def best(logits: Tensor) -> Tensor:
    """The most probable token, the first of equals; f32 [..., V] -> int64 [...]."""
    if not transfer.on_host(logits):
        return logits.argmax(-1)
    return torch.from_numpy(logits.numpy().argmax(-1))  # ten times as fast as torch
