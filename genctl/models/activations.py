"""Activations that are written out step by step, replaced by what computes the same in one pass, or in cheaper ones.

GPT-2's GELU (the tanh form of Hendrycks & Gimpel, 2016) takes eight passes over what it is given when written out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# classes of transformers that compute x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))) and nothing else
_TANH_GELU = {"NewGELUActivation", "FastGELUActivation", "BloomGelu"}
_TWICE = 2.0 * math.sqrt(2.0 / math.pi)


class TanhGelu(nn.Module):
    """x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))), for one new token a row by torch's kernel.

    Where many tokens are read that kernel is bound by its tanh; x σ(2√(2/π) (x + 0.044715 x³)), which is the same,
    takes half the time in float32 although it passes over its numbers four times.
    """

    def forward(self, given: Tensor) -> Tensor:
        """[..., T, H] -> [..., T, H]."""
        if given.dtype != torch.float32 or given.ndim < 2 or given.shape[-2] == 1 or given.device.type != "cpu":
            return nn.functional.gelu(given, approximate="tanh")
        inner = torch.addcmul(given.new_tensor(_TWICE), given, given, value=0.044715 * _TWICE)
        return inner.mul_(given).sigmoid_().mul_(given)


def fuse(model: nn.Module) -> int:
    """Replace them, hooked ones left out; returns how many. Results differ in the last digit of a float32."""
    found = 0
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and _written_out(child):
                module._modules[name] = TanhGelu().train(child.training)
                found += 1
    return found


def _written_out(module: nn.Module) -> bool:
    kind = type(module)
    ours = kind.__name__ in _TANH_GELU and kind.__module__.startswith("transformers.")
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return ours and not hooked and not hasattr(module, "_hf_hook")
