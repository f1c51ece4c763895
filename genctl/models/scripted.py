"""Packed layers in TorchScript, for steps that run from a record (see `decode.recorded`).

All layers of one class are one module, which is compiled once: it is called with the input and with the layer's place.
TorchScript reads annotations as they are, so they are not put off here.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, List, Optional  # noqa: UP035 (its own names for these types)

import torch
from torch import Tensor, nn

from genctl.models.halving import HalfLayer
from genctl.models.packed import PackedLayer
from genctl.models.packing import OneDnnLayer
from genctl.models.quantizing import AT_ONCE, FEW, Int8Layer, product

if TYPE_CHECKING:
    number = float  # any number


def scripted(layers: Sequence[PackedLayer]) -> Any:
    """What `layers`, all of one class, compute. Raises KeyError for a class that is not known."""
    return torch.jit.script(_FORMS[type(layers[0])](layers))


class _OneDnn(nn.Module):
    packed: List[Tensor]  # noqa: UP006
    shifts: List[Optional[Tensor]]  # noqa: UP006, UP045

    def __init__(self, layers: Sequence[OneDnnLayer]) -> None:
        super().__init__()
        self.packed, self.shifts = [layer.packed for layer in layers], [layer.shift for layer in layers]

    def forward(self, given: Tensor, place: int) -> Tensor:
        weight, shift = self.packed[place], self.shifts[place]
        none: List[Optional[number]] = []  # noqa: UP006, UP045
        made: Tensor = torch.ops.mkldnn._linear_pointwise(given, weight, shift, "none", none, "")
        return made


class _Half(nn.Module):
    panels: List[torch.classes.quantized.LinearPackedParamsBase]  # type: ignore[name-defined]  # noqa: UP006

    def __init__(self, layers: Sequence[HalfLayer]) -> None:
        super().__init__()
        self.panels = [layer.panels for layer in layers]

    def forward(self, given: Tensor, place: int) -> Tensor:
        rows = given.reshape(-1, given.shape[-1]).float()
        made = torch.ops.quantized.linear_dynamic_fp16(rows, self.panels[place]).to(given.dtype)
        back: Tensor = torch.unflatten(made, 0, given.shape[:-1])
        return back


class _Int8(nn.Module):
    numbers: List[Tensor]  # noqa: UP006
    scales: List[Tensor]  # noqa: UP006
    shifts: List[Optional[Tensor]]  # noqa: UP006, UP045

    def __init__(self, layers: Sequence[Int8Layer]) -> None:
        super().__init__()
        self.numbers, self.scales = [layer.numbers for layer in layers], [layer.scales for layer in layers]
        self.shifts = [layer.shift for layer in layers]
        self.few, self.at_once = FEW, AT_ONCE

    def forward(self, given: Tensor, place: int) -> Tensor:
        rows = given.reshape(-1, given.shape[-1]).to(torch.bfloat16).contiguous()
        made = product(rows, self.numbers[place], self.scales[place], self.few, self.at_once).to(given.dtype)
        shift = self.shifts[place]
        if shift is not None:
            made += shift
        back: Tensor = torch.unflatten(made, 0, given.shape[:-1])
        return back


_FORMS: dict[type[PackedLayer], Any] = {OneDnnLayer: _OneDnn, HalfLayer: _Half, Int8Layer: _Int8}
