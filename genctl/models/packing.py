"""Linear layers whose weights are laid out once, as they are read, for products with few rows (CPU).

oneDNN keeps a weight in blocks that stream at nearly memory bandwidth; the numbers are the same to 1e-4. A layer stays
the module that it was: only its class and its weight change, so hooks, names and ties hold. Where the layout cannot be
had, the layer is left as it is. `quantizing` does the same with 8-bit weights.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.pytorch_utils import Conv1D

from genctl.models import pages

# Numbers in a weight below which a layer stays as it is. A call of oneDNN takes about 20 µs more than a plain product;
# 8-bit weights are asked for by name, so that only what is not worth it in memory either is left.
SMALLEST, SMALLEST_INT8 = 1 << 18, 1 << 14
Look = Callable[[str, Tensor], None]


@dataclass
class Report:
    """What became of a model's linear layers."""

    packed: int = 0
    left: Counter[str] = field(default_factory=Counter)  # why -> how many layers stayed as they were


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

    def held(self) -> tuple[Tensor, ...]:
        """The tensors that stand for the weight."""
        raise NotImplementedError

    def unpack(self) -> None:
        """Become the plain layer again."""
        weight = self.dense()
        if issubclass(self.plain_class, Conv1D):
            weight = weight.t().contiguous()
        del self.__dict__["weight"]
        self.__class__ = self.plain_class  # type: ignore[assignment]
        self.weight = nn.Parameter(weight, requires_grad=False)


class OneDnnLayer(PackedLayer):
    """float32 or bfloat16 numbers in oneDNN's blocks."""

    packed: Tensor

    def forward(self, given: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if not given.numel():
            return given.new_empty(*given.shape[:-1], self.out_features)
        return _product(given, self.packed, self.shift, "none", [], "")

    def dense(self) -> Tensor:
        return self.packed.to_dense()

    def held(self) -> tuple[Tensor, ...]:
        return (self.packed,)


def _product(given: Tensor, packed: Tensor, shift: Tensor | None, *how: Any) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise.default(given, packed, shift, *how)
    return made


def pack(
    model: nn.Module, *, quantize: str | None = None, look: Look | None = None, smallest: int | None = None
) -> Report:
    """Repack every linear layer of `model` that is fit for it, one by one; each original is freed before the next.

    `look` is given each parameter once, by name, before its layer is packed, and may raise. `quantize` is None for the
    same numbers in another order, or "int8". Only for inference: packed layers carry no gradient.
    """
    if smallest is None:
        smallest = SMALLEST if quantize is None else SMALLEST_INT8
    report = Report()
    seen: set[int] = set()
    users = Counter(weight.data_ptr() for _, weight in _slots(model) if weight.device.type == "cpu")
    mapped = pages.mapped_files()
    for name, module in list(model.named_modules()):
        for key, weight in list(module._parameters.items()):
            if weight is not None and look is not None and id(weight) not in seen:
                seen.add(id(weight))
                look(f"{name}.{key}" if name else key, weight)
        if isinstance(module, PackedLayer) or not hasattr(module, "weight"):
            continue
        why = _unfit(module, quantize, smallest)
        if why is None:
            original = module.weight.detach()
            _replace(module, quantize)
            report.packed += 1
            if users[original.data_ptr()] == 1:
                pages.release(original, mapped)
            users[original.data_ptr()] -= 1
        elif why:
            report.left[why] += 1
    return report


def weights_bytes(model: nn.Module) -> int:
    """Bytes that a model's parameters, buffers and packed weights take, tied ones counted once."""
    held: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        held[tensor.data_ptr()] = tensor.nbytes
    total = sum(held.values())
    for module in model.modules():
        if isinstance(module, PackedLayer):
            total += sum(tensor.numel() * tensor.element_size() for tensor in module.held())
    return total


def type_name(tensor: Tensor) -> str:
    """`float32` of torch.float32."""
    return str(tensor.dtype).removeprefix("torch.")


def _slots(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every place that holds a parameter: tied ones as often as they are held."""
    for module in model.modules():
        for key, weight in module._parameters.items():
            if weight is not None:
                yield key, weight


def _is_linear(module: nn.Module) -> bool:
    """Whether a layer computes x W' + b and nothing else. Subclasses (adapters, routers) may do more."""
    kind = type(module)
    # Falcon writes the product out; it is the same one
    falcon = kind.__name__ == "FalconLinear" and kind.__module__.startswith("transformers.")
    return kind in (nn.Linear, Conv1D) or falcon


def _unfit(module: nn.Module, quantize: str | None, smallest: int) -> str | None:
    """Why a layer stays as it is; "" for what is no linear layer at all; None if it is fit."""
    if not _is_linear(module):
        return "of another class" if isinstance(module, nn.Linear) else ""
    weight = module.weight
    assert isinstance(weight, Tensor)
    replaced = "forward" in module.__dict__ or hasattr(module, "_hf_hook")
    if replaced or module._forward_hooks or module._forward_pre_hooks:
        return "with hooks"
    if type(weight) is not nn.Parameter or weight.device.type != "cpu" or weight.ndim != 2:
        return "not plain tensors on the CPU"
    if weight.numel() < smallest:
        return "small"
    bias = getattr(module, "bias", None)
    if bias is not None and bias.dtype != weight.dtype:
        return "of mixed types"
    if quantize is not None:
        from genctl.models.quantizing import unfit

        return unfit(module)
    return None if _supported(weight.dtype) else f"{type_name(weight)} without support in this CPU"


@cache
def _supported(dtype: torch.dtype) -> bool:
    """Whether oneDNN is here and multiplies this type on this CPU, by trying."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight, given = torch.ones(32, 32, dtype=dtype), torch.ones(2, 32, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return bool((_product(given, packed, None, "none", [], "") == 32).all())
    except (RuntimeError, AttributeError):
        return False


def _replace(module: Any, quantize: str | None) -> None:
    weight, bias = module.weight.detach(), module.bias
    shape, kind = weight.shape, type(module)
    if kind is Conv1D:  # [in, out]
        weight = weight.t()
    held: dict[str, Any] = {"plain_class": kind, "out_features": weight.shape[0], "in_features": weight.shape[1]}
    if quantize is None:
        # batch size None: the layout serves any number of rows (measured; a layout for 1 row is slower at 2 to 16)
        held["packed"] = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        made: type[PackedLayer] = OneDnnLayer
    else:
        from genctl.models.quantizing import Int8Layer, quantized

        held.update(quantized(weight))
        made = Int8Layer
    del module._parameters["weight"]
    module.__class__ = made
    module.__dict__.update(held, shift=None if bias is None else bias.detach())
    module.__dict__["weight"] = Weight.of(module, shape, weight.dtype)
