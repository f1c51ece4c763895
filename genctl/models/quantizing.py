"""8-bit weights: each output channel of a linear layer has its own scale, symmetric, no zero point (weight-only).

Activations pass through the product as bfloat16, which is what torch's own kernel reads at speed. The head is quantised
too; embeddings, norms and biases stay as they are. Perplexity of builtin:stories on tests/data/stories_heldout.txt:
1.3355, in int8 1.3357. How many rows there are changes a row's numbers only by the order of a float32 sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from genctl.models.packed import PackedLayer, type_name

FEW = 12  # rows up to which the 8-bit kernel is faster than the product with numbers turned back
AT_ONCE = 1 << 20  # weights turned back at a time: they stay in the processor's cache
_STEP = 32  # the kernel reads this many numbers of a row at once, without looking where it ends


class Int8Layer(PackedLayer):
    """int8 numbers [out, in] and a scale for each output."""

    numbers: Tensor  # int8 [out, in]
    scales: Tensor  # bf16 [out]
    as_read: torch.dtype  # of the weight before

    def forward(self, given: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the type of what is given."""
        rows = given.reshape(-1, self.in_features).to(torch.bfloat16).contiguous()
        made = product(rows, self.numbers, self.scales, FEW, AT_ONCE).to(given.dtype)
        if self.shift is not None:
            made += self.shift
        return made.view(*given.shape[:-1], self.out_features)

    def dense(self) -> Tensor:
        return (self.numbers.float() * self.scales.float()[:, None]).to(self.as_read)

    def held_bytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes


def product(rows: Tensor, numbers: Tensor, scales: Tensor, few: int, at_once: int) -> Tensor:
    """rows bf16 [N, in] -> bf16 [N, out]."""
    if 0 < rows.shape[0] <= few:
        return torch._weight_int8pack_mm(rows, numbers, scales)
    # for many rows: the numbers are turned back to float32, a slice at a time
    wide, factors = rows.float(), scales.float()
    made = rows.new_empty([rows.shape[0], numbers.shape[0]])
    step = max(1, at_once // numbers.shape[1])
    for begin in range(0, numbers.shape[0], step):
        part = torch.nn.functional.linear(wide, numbers[begin : begin + step].float())
        made[:, begin : begin + step] = part.mul_(factors[begin : begin + step])
    return made


def quantized(weight: Tensor) -> dict[str, Any]:
    """The parts of an `Int8Layer` for a weight [out, in]."""
    scales = torch.empty(weight.shape[0], dtype=torch.bfloat16)
    numbers = torch.empty(weight.shape, dtype=torch.int8)
    step = max(1, AT_ONCE // weight.shape[1])
    for begin in range(0, weight.shape[0], step):  # in slices, so that no float32 copy of the whole is made
        part = slice(begin, begin + step)
        wide = weight[part].float()
        largest = wide.abs().amax(dim=1)
        # the scale that the kernel multiplies with is bfloat16: the numbers are rounded for exactly that one
        scale = (largest / 127).to(torch.bfloat16)
        short = scale.float() * 127 < largest * (1 - 1 / 512)
        scale = torch.where(short, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
        scales[part] = scale
        divisor = torch.where(scale == 0, torch.ones_like(scale), scale).float()
        numbers[part] = (wide / divisor[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return {"numbers": numbers, "scales": scales, "as_read": weight.dtype}


def unfit(layer: nn.Module) -> str | None:
    """Why a linear layer keeps its weights, or None."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return type_name(weight)
    width = getattr(layer, "in_features", weight.shape[0])
    return None if width % _STEP == 0 else f"with rows not a multiple of {_STEP}"
