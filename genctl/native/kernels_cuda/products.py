"""Products with weights on a GPU whose steps are computed by the kernels of `kernels`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class KernelProduct:
    """y = x Wᵀ + b: in a step by a kernel (see `step`), and by torch for a prompt."""

    is_compiled = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [O, I]."""
        self.weight, self.bias = weight.contiguous(), bias
        self.wide_bias = None if bias is None else bias.float().contiguous()
        self.size, self.width = weight.shape
        self.form = f"{str(weight.dtype).removeprefix('torch.')} by kernels"

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        return F.linear(x, self.weight, self.bias)

    def tensors(self) -> tuple[Tensor, ...]:
        """Weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)
