"""Matrix products with weights as they lie in the file: float32, bfloat16 or float16, memory-mapped, never copied.

With one row a product is as fast as its weights can be read, and a plain one reads them once.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class Linear:
    """y = x Wᵀ + b."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out, in]; a transposed view where the file has [in, out] (GPT-2)
        self.bias = bias  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return F.linear(x, self.weight, self.bias)
