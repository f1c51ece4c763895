"""Linear layers whose weights are laid out once, as they are read, for products with few rows (CPU).

oneDNN keeps a weight in blocks that stream at nearly memory bandwidth; the numbers are the same to 1e-4. Where the
layout cannot be had, the layer is left as it is. `halving` does the same for 16-bit weights where oneDNN cannot,
`quantizing` with 8-bit weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from genctl.models import halving, pages, quantizing
from genctl.models.packed import PackedLayer, Weight, type_name

# Numbers in a weight below which a layer stays as it is. A call of oneDNN takes about 20 µs more than a plain product;
# 8-bit weights are asked for by name, so that only what is not worth it in memory either is left.
SMALLEST, SMALLEST_INT8 = 1 << 18, 1 << 14
Look = Callable[[str, Tensor], None]


@dataclass
class Report:
    """What became of a model's linear layers."""

    packed: int = 0
    left: Counter[str] = field(default_factory=Counter)  # why -> how many layers stayed as they were


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

    def held_bytes(self) -> int:
        return self.packed.numel() * self.packed.element_size()


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
            total += module.held_bytes()
    return total


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
        return quantizing.unfit(module)
    if _supported(weight.dtype):
        return None
    if weight.dtype in (torch.bfloat16, torch.float16) and halving.supported():
        return halving.unfit(weight)
    return f"{type_name(weight)} without support in this CPU"


@cache
def _supported(dtype: torch.dtype) -> bool:
    """Whether oneDNN is here and multiplies this type on this CPU, by trying."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight, given = torch.ones(32, 32, dtype=dtype), torch.ones(2, 32, dtype=dtype)
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False  # it would compute by its reference code, hundreds of times slower
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
    shift = None if bias is None else bias.detach()
    made: type[PackedLayer]
    if quantize is not None:
        made, parts = quantizing.Int8Layer, quantizing.quantized(weight)
    elif _supported(weight.dtype):
        # batch size None: the layout serves any number of rows (measured; a layout for 1 row is slower at 2 to 16)
        made, parts = OneDnnLayer, {"packed": torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)}
    else:
        made, parts = halving.HalfLayer, halving.halved(weight, shift)
    held.update(parts, shift=shift)
    del module._parameters["weight"]
    module.__class__ = made
    module.__dict__.update(held)
    module.__dict__["weight"] = Weight.of(module, shape, weight.dtype)
