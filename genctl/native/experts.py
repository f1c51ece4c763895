"""A mixture of experts in place of an MLP: a router chooses some of many MLPs for each token.

N rows, F tokens fed to each, E features of the residual stream, X experts, C of them chosen for a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from genctl.native.linear import Joined, Linear
from genctl.native.mlp import MLP
from genctl.native.products import ops
from genctl.native.spec import Experts


class Mixture:
    """The sum of the chosen experts' outputs, weighted by the router (Mixtral, arXiv:2401.04088)."""

    def __init__(self, spec: Experts, router: Linear, experts: Sequence[MLP]) -> None:
        self.spec, self.router, self.experts = spec, router, list(experts)

    def __call__(self, h: Tensor) -> Tensor:
        """h [N, F, E] -> [N, F, E]. Experts are added in their order, so that a token does not depend on others."""
        tokens = h.reshape(-1, h.shape[-1])  # [T, E]
        weights, chosen = self.choose(self.router(tokens[None])[0].float())
        y = torch.zeros_like(tokens)
        for number in sorted(set(chosen.flatten().tolist())):
            place, which = (chosen == number).nonzero(as_tuple=True)
            output = self.experts[number](tokens[place][None])[0].float() * weights[place, which, None]
            y.index_add_(0, place, output.to(y.dtype))
        return y.view(h.shape)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores f32 [T, X] -> weights f32 and numbers int64 of the chosen experts, each [T, C]."""
        found = ops.compiled(scores)
        shares = scores.softmax(-1) if found is None else ops.softmax(found, scores, plain=True)
        weights, chosen = shares.topk(self.spec.chosen, -1)
        return weights / ops.total(weights)[:, None] if self.spec.normed else weights, chosen

    def products(self) -> Iterator[Linear | Joined]:
        """Its matrix products."""
        yield self.router
        for expert in self.experts:
            yield from expert.products()
