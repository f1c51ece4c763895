"""16-bit weights on CPUs whose oneDNN has no 16-bit product: FBGEMM's panels of float16, sums in float32.

A float16 weight is kept as it is. A bfloat16 weight has fewer digits than a float16 has, so it is exact too, from 2^-14
up to 65504; a smaller one is off by at most 2^-25, a larger one keeps its layer out. What comes in and goes out has the
model's own type.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from genctl.models.packed import PackedLayer

_LARGEST = torch.finfo(torch.float16).max
_AT_ONCE = 1 << 22  # weights looked at together


class HalfLayer(PackedLayer):
    """float16 numbers in FBGEMM's panels. The bias is in there too, in float32."""

    panels: Any  # a script object, which is no tensor
    as_read: torch.dtype  # of the weight before

    def forward(self, given: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the type of what is given."""
        if not given.numel():
            return given.new_empty(*given.shape[:-1], self.out_features)
        rows = given.reshape(-1, self.in_features).float()
        return _product(rows, self.panels).to(given.dtype).view(*given.shape[:-1], self.out_features)

    def dense(self) -> Tensor:
        found: Tensor = torch.ops.quantized.linear_unpack_fp16(self.panels)[0]
        return found.to(self.as_read).contiguous()

    def held_bytes(self) -> int:
        return 2 * self.in_features * self.out_features


def halved(weight: Tensor, bias: Tensor | None) -> dict[str, Any]:
    """The parts of a `HalfLayer` for a weight [out, in]."""
    panels = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())
    return {"panels": panels, "as_read": weight.dtype}


def unfit(weight: Tensor) -> str | None:
    """Why a weight keeps its form, or None."""
    if weight.dtype == torch.bfloat16:
        for part in torch.split(weight.detach().flatten(), _AT_ONCE):
            if not float(part.abs().max()) <= _LARGEST:
                return "beyond what float16 holds"
    return None


@cache
def supported() -> bool:
    """Whether FBGEMM is here and works on this CPU, by trying."""
    try:
        weight = torch.full((32, 32), 0.5, dtype=torch.float16)
        return bool((_product(torch.ones(2, 32), halved(weight, None)["panels"]) == 16).all())
    except (RuntimeError, AttributeError):
        return False


def _product(given: Tensor, panels: Any) -> Tensor:
    made: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(given, panels)
    return made
