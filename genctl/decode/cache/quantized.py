"""A layer in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from genctl.decode.cache.growing import GrowingLayer


class QuantizedLayer(GrowingLayer):
    """A full-attention layer in 8 bits: the key and value of each token and head are scaled by their own largest
    number.

    Symmetric absmax quantisation, one float32 scale per token and head (as in LLM.int8(), Dettmers et al. 2022, for
    vectors): a token's codes never change, so rows can be appended, reordered, padded and cropped without a second
    rounding. Lossy. The prompt itself is read with exact numbers; later steps read the rounded ones.
    """

    kind = "quantised"
    is_plain = is_convertible = False
    is_chosen = True
    extends = False

    def _encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return (*_quantize(keys), *_quantize(values))

    def _states(self, number: int) -> Tensor:
        return self.content()[number]

    def _decode(self, columns: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        keys, key_scales, values, value_scales = columns
        return (keys * key_scales).to(self.dtype), (values * value_scales).to(self.dtype)


def _quantize(states: Tensor) -> tuple[Tensor, Tensor]:
    """states [rows, heads, length, head_dim] -> int8 of that shape, float32 scales [rows, heads, length, 1]."""
    scales = states.float().abs().amax(-1, keepdim=True) / 127
    codes = (states.float() / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    return codes, scales
