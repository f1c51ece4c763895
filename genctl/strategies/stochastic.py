"""Stochastic beam search: hypotheses drawn without replacement (Kool et al. 2019, arXiv:1903.06059)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from genctl.decode.types import Choice, Context, FinishedRow, Pruning, Rows, Scores, Search, Traits
from genctl.errors import ModelError
from genctl.kernels.ops import log_softmax


@dataclass(frozen=True)
class StochasticBeam:
    """Sample `beams` different sequences from the model's distribution over complete sequences, in one beam search.

    Each sequence's log-probability is perturbed with Gumbel noise, sampled top-down: a hypothesis has the maximum over
    all its continuations. The best perturbed values are an ordered sample without replacement. They are also the totals
    and the scores, so the first result is an exact sample.
    """

    beams: int
    n: int = 1

    kind: ClassVar[str] = "stochastic-beam"
    length_penalty: ClassVar[float] = 0.0
    traits: ClassVar[Traits] = Traits("logprobs", reads_scores=True)

    @property
    def max_rows(self) -> int:
        return self.beams

    def search(self, scores: Scores, context: Context) -> Search:
        summed = scores.logits.new_zeros(1)  # log-probabilities of the live rows, after the processors
        perturbed = scores.logits.new_zeros(1)  # and with noise; the start value shifts all of them equally
        while True:
            vocabulary = scores.logits.shape[-1]
            following = summed[:, None] + _normalised(scores.logits[:, 0])
            noisy = conditioned(following, perturbed, context.rng).flatten()
            values, places = noisy.topk(min(self.beams, len(noisy)))
            # a result that beats a candidate takes its place in the beam
            better = [row.total for row in scores.ended]
            count = sum(
                value > -torch.inf and place + sum(total > value for total in better) < self.beams
                for place, value in enumerate(values.tolist())
            )
            if not count:
                if not scores.ended:
                    raise ModelError(f"every continuation is forbidden at step {scores.rows.written}")
                return
            values, places = values[:count], places[:count]
            rows = torch.div(places, vocabulary, rounding_mode="floor")
            scores = yield Choice(
                rows, places % vocabulary, totals=values, pruning=Pruning(self.beams), is_done=self._is_done
            )
            summed, perturbed = following.flatten()[places][scores.survivors], values[scores.survivors]

    def _is_done(self, ended: Sequence[FinishedRow], rows: Rows, totals: Sequence[float]) -> bool:
        """Whether the beam is full of results that all beat the best live row."""
        return len(ended) >= self.beams and min(row.total for row in ended) > rows.totals[0]


def conditioned(logprobs: Tensor, maxima: Tensor, rng: torch.Generator) -> Tensor:
    """Gumbel(logprobs) noise whose maximum in each row is `maxima`: f32 [R, V], [R] -> [R, V].

    The paper's appendix B.3: with Z the maximum drawn freely, v = T - G + log(1 - exp(G - Z)) and the conditioned value
    is T - max(0, v) - log(1 + exp(-|v|)), which neither overflows nor cancels. In float64, rounded once: the
    last bits of torch's functions depend on the instruction set and on where a number lies in its row.
    """
    noise = torch.empty_like(logprobs).exponential_(1, generator=rng)
    free = logprobs.double() - noise.double().log()
    highest = free.amax(1, keepdim=True)
    target = maxima.double()[:, None]
    v = target - free + torch.log1p(-torch.exp(free - highest))
    bounded = target - v.clamp(min=0) - torch.log1p(torch.exp(-v.abs()))
    return torch.where(logprobs == -torch.inf, -torch.inf, bounded).to(logprobs.dtype)


def _normalised(scores: Tensor) -> Tensor:
    """Log-probabilities of scores f32 [R, V]; a row without any possible token stays at -inf."""
    return log_softmax(scores).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
