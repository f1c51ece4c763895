"""Filters of samplers, after which what is kept is renormalised: how many tokens, and what they weigh.

Filters follow one another as in transformers and llama.cpp. A temperature comes before them (transformers, vLLM) or
behind them (llama.cpp). M positions, V vocabulary in the order of its logits, P values of a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from genctl.parity.entries import Entries

FILTERS = ("top-k", "top-p", "min-p")  # in the order in which they are applied
HEAD = 2048  # best tokens that are sorted; all others only where a filter keeps more


class InOrder:
    """Logits f64 [M, V] in order, which they keep at every temperature."""

    def __init__(self, logits: Tensor, places: Entries, most: int = 0) -> None:
        """`most`: tokens that are sorted, 0 for all."""
        self.logits, self.places = logits, places
        self.best, order = logits.topk(most) if most else logits.sort(-1, descending=True)
        self.copies = 1.0 if places.copies is None else places.copies.gather(1, order).exp()

    def at(self, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities in order [M, V], the sums of their probabilities, and those of entries [E]."""
        whole, places = log_total(self.logits / temperature, self.places), self.places
        ordered = self.best / temperature - whole
        entries = self.logits[places.position, places.entry] / temperature - whole[places.position, 0]
        return ordered, (ordered.exp() * self.copies).cumsum(-1), entries


class Kept:
    """What filters keep of logits, with a temperature before or behind them."""

    def __init__(self, logits: InOrder, temperature: float, *, first: bool) -> None:
        """`first`: before the temperature."""
        self.places = logits.places
        drawn = logits.at(temperature)
        self.ordered, self.masses, self.filtered = logits.at(1.0) if first else drawn
        self.drawn, self.predicted = drawn[1].log(), drawn[2]

    def counts(self, filters: Mapping[str, Tensor | float]) -> Tensor:
        """How many tokens are kept, for one value of each filter or for P of one: int64 [M, P]."""
        size = self.ordered.shape[-1]
        count = torch.full((len(self.ordered), 1), size)
        for name in FILTERS:
            if name in filters:
                value = torch.as_tensor(filters[name], dtype=torch.float64).reshape(1, -1).expand(len(count), -1)
                if name == "top-k":
                    kept = value.clamp(max=size).long()
                elif name == "top-p":  # of what is kept before
                    whole = torch.where(count < size, self.masses.gather(1, count - 1), 1.0)
                    kept = torch.searchsorted(self.masses, value * whole - 1e-12) + 1
                else:
                    gaps = self.ordered[:, :1] - self.ordered
                    kept = torch.searchsorted(gaps, -value.clamp(min=1e-300).log(), right=True)
                count = torch.minimum(count, kept)
        return count

    def remains(self, filters: Mapping[str, Tensor | float]) -> Tensor:
        """Log-probabilities of entries among what is kept [P, E]; -inf of those that are not."""
        count = self.counts(filters)
        least, mass = ((part.gather(1, count - 1)).T[:, self.places.position] for part in (self.ordered, self.drawn))
        return torch.where(self.filtered < least - 1e-9, -torch.inf, self.predicted - mass)


def log_total(logits: Tensor, places: Entries) -> Tensor:
    """The logarithm of the sum of all exp(logits) [M, V] -> [M, 1]."""
    return (logits if places.copies is None else logits + places.copies).logsumexp(-1, keepdim=True)
