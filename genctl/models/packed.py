"""What a linear layer becomes when its numbers are held in another form than `weight`.

The layer stays the module that it was: only its class and its weight change, so hooks, names and ties hold.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.pytorch_utils import Conv1D


class Weight(torch.Tensor):
    """What model code finds as `layer.weight` of a packed layer: its shape, dtype and device, without the numbers.

    An operation on it unpacks the layer for good, so that code which uses a weight functionally (Mamba's
    `dt_proj.weight @ x`) gets its numbers, and gets them once.
    """

    owner: weakref.ref[PackedLayer]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(layer: PackedLayer, shape: torch.Size, dtype: torch.dtype) -> Weight:
        made = torch.Tensor._make_wrapper_subclass(Weight, shape, dtype=dtype, device=torch.device("cpu"))
        assert isinstance(made, Weight)
        made.owner = weakref.ref(layer)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        arguments, keywords = tree_map_only(Weight, Weight.plain, (arguments, keywords or {}))
        return function(*arguments, **keywords)

    def plain(self) -> Tensor:
        """The numbers, as an ordinary tensor."""
        layer = self.owner()
        if layer is None:
            raise RuntimeError("the layer that this weight belonged to is gone")
        if isinstance(layer, PackedLayer):
            layer.unpack()
        return layer.weight

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Weight({list(self.shape)}, dtype={self.dtype}, packed)"


class PackedLayer(nn.Module):
    """A linear layer [in] -> [out] whose numbers are held in another form than `weight`."""

    plain_class: type[nn.Module]  # what it was
    in_features: int
    out_features: int
    shift: Tensor | None  # the bias [out]; an alias outside `_parameters`, which are slow to look up
    weight: Tensor

    def dense(self) -> Tensor:
        """The weight anew, [out, in]."""
        raise NotImplementedError

    def held_bytes(self) -> int:
        """What stands for the weight takes."""
        raise NotImplementedError

    def unpack(self) -> None:
        """Become the plain layer again."""
        weight = self.dense()
        if issubclass(self.plain_class, Conv1D):
            weight = weight.t().contiguous()
        del self.__dict__["weight"]
        self.__class__ = self.plain_class  # type: ignore[assignment]
        self.weight = nn.Parameter(weight, requires_grad=False)


def type_name(tensor: Tensor) -> str:
    """`float32` of torch.float32."""
    return str(tensor.dtype).removeprefix("torch.")
