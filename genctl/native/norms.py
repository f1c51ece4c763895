"""Norms of the residual stream, of queries and of keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from genctl.kernels import ops

Norm = Callable[[Tensor], Tensor]  # [..., E] -> [..., E]


def same(x: Tensor) -> Tensor:
    """No norm: x itself."""
    return x


class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, weight: Tensor, eps: float, *, from_one: bool = False, late: bool = False) -> None:
        self.weight = weight.float() + 1 if from_one else weight  # Gemma stores the distance from 1
        self.eps = torch.tensor(eps, device=weight.device)
        self.number = eps
        self.late = late or from_one  # rounded to the weights' type after the product, and not before

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., features]."""
        library = ops.compiled(x)
        if library is not None:
            return ops.rms_norm(library, x, self.weight, self.number, late=self.late)
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, 2, -1, keepdim=True)
        y = wide * torch.addcmul(self.eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()  # F.rms_norm takes twice as long
        return (y * self.weight).to(x.dtype) if self.late else y.to(x.dtype) * self.weight


class LayerNorm:
    """(x - mean(x)) / sqrt(var(x) + eps) · weight + bias (Ba et al. 2016, arXiv:1607.06450).

    The weight may have dimensions before the last, one norm for each head: [H, D].
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps
        self.several = weight is not None and weight.ndim > 1

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., features], or [..., H, D] with a norm for each head."""
        library = ops.compiled(x)
        if library is not None:
            return ops.layer_norm(library, x, self.weight, self.bias, self.eps)
        if self.several:
            assert self.weight is not None
            return F.layer_norm(x, (x.shape[-1],), None, None, self.eps) * self.weight
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
