"""Replace linear layers of transformers' models by ones with genctl's own products (`native.linear`).

Weights stay as stored in the file, and results agree to 1e-4; int8 weights are rounded. An unsuitable layer is not
changed.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from genctl import compat
from genctl.errors import ModelError
from genctl.native import pages
from genctl.native.linear import Linear, maker

# Layers with fewer numbers in the weight are not changed: a call takes some µs more than a plain product. 8-bit weights
# also save memory, so fewer layers stay unchanged.
SMALLEST, SMALLEST_INT8 = 1 << 18, 1 << 14
_READ = re.compile(r"\bself(?:\.\w+)*\.(\w+)\.weight\b")

Check = Callable[[str, Tensor], None]


class WeightPacked(ModelError, AttributeError):
    """A model's code reads the weight of a packed layer; `_reads` missed it."""


class PackedLinear(nn.Module):
    """x W' + b with a packed weight, in place of a linear layer. It has no `weight` and takes no gradient."""

    def __init__(self, product: Linear, shape: Sequence[int], bias: nn.Parameter | None) -> None:
        super().__init__()
        self.product = product
        self.out_features, self.in_features = shape
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self.product(x)

    def __getattr__(self, name: str) -> Any:
        """Raise WeightPacked for `weight`: `hasattr` is then False, and the message says what helps."""
        if name == "weight":
            hint = "add --no-pack; with --quantize int8 leave that out"
            raise WeightPacked("the model's code reads the weight of a linear layer that was packed", hint=hint)
        return super().__getattr__(name)


@dataclass
class PackingReport:
    """The result of `pack`."""

    packed: int = 0
    left: Counter[str] = field(default_factory=Counter)  # why -> how many layers were not changed


def pack(
    model: nn.Module, *, quantize: str | None = None, check_tensor: Check | None = None, smallest: int | None = None
) -> PackingReport:
    """Replace every suitable linear layer of `model`, one by one; each original is freed before the next.

    `check_tensor` receives each parameter once, by name, before its layer is packed, and may raise. `quantize` is None
    to keep the numbers, or "int8". Only for inference.
    """
    report = PackingReport()
    if smallest is None:
        smallest = SMALLEST if quantize is None else SMALLEST_INT8
    places: dict[int, list[str]] = defaultdict(list)  # the names of each module: a shared one has several
    for name, module in model.named_modules(remove_duplicate=False):
        places[id(module)].append(name)
    seen: set[int] = set()
    parameters = (weight for module in model.modules() for weight in module.parameters(recurse=False))
    users = Counter(weight.data_ptr() for weight in parameters if weight.device.type == "cpu")  # tied ones: several
    mapped = pages.mapped_files()
    for name in [name for name, _ in model.named_modules()]:  # names: a list of modules would keep them alive
        module = model.get_submodule(name)
        for key, parameter in module.named_parameters(recurse=False):
            if check_tensor is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                check_tensor(f"{name}.{key}" if name else key, parameter)
        if not isinstance(module, (nn.Linear, Conv1D)):
            continue
        names = places[id(module)]
        if why := _unfit(model, module, names, quantize, smallest):
            report.left[why] += 1
            continue
        original = module.weight
        assert isinstance(original, Tensor)
        make = maker(original.dtype, quantize, original.shape[0 if type(module) is Conv1D else 1])
        assert make is not None
        new = _packed(module, make).train(module.training)
        for each in names:
            model.set_submodule(each, new)
        if quantize is not None and users[original.data_ptr()] == 1:
            pages.release(original.detach(), mapped)
        users[original.data_ptr()] -= 1
        report.packed += 1
    return report


def weights(model: nn.Module) -> Iterator[Tensor]:
    """A model's parameters and packed weights."""
    yield from model.parameters()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            yield from module.product.tensors()


def weights_bytes(model: nn.Module) -> int:
    """Bytes that a model's parameters, buffers and packed weights take, tied ones counted once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in (*weights(model), *model.buffers())}.values())


def _unfit(model: nn.Module, module: nn.Module, names: Sequence[str], quantize: str | None, smallest: int) -> str:
    """Why a linear layer with these names is not changed; "" if it can be packed."""
    kind = type(module)
    # Falcon's class computes the same product
    is_falcon = kind.__name__ == "FalconLinear" and kind.__module__.startswith("transformers.")
    if module is model or not (kind in (nn.Linear, Conv1D) or is_falcon):
        return "of another class"
    if compat.has_hooks(module):
        return "with hooks"
    weight, bias = module.weight, module.bias
    if type(weight) is not nn.Parameter or weight.ndim != 2:
        return "not plain tensors on the CPU"
    if weight.numel() < smallest:
        return "small"
    if isinstance(bias, Tensor) and bias.dtype != weight.dtype:
        return "of mixed types"
    if any(_reads(model, name) for name in names):
        return "whose weights the model reads by itself"
    dtype = str(weight.dtype).removeprefix("torch.")
    if quantize is not None and weight.dtype not in (torch.float32, torch.bfloat16):
        return dtype
    if weight.device.type != "cpu":
        return "not plain tensors on the CPU"
    return "" if maker(weight.dtype, quantize, weight.shape[-1]) else f"{dtype} without a compiled product"


def _reads(model: nn.Module, name: str) -> bool:
    """Whether the module around a layer reads its weight directly, as Mamba does: `self.dt_proj.weight @ x`.

    Judged by the source of their files; a weight that is only read for its dtype counts, too.
    """
    around, _, key = name.rpartition(".")
    return any(key in _weights_read(base.__module__) for base in type(model.get_submodule(around)).__mro__)


@cache
def _weights_read(name: str) -> frozenset[str]:
    if name in (nn.Module.__module__, object.__module__):
        return frozenset()
    try:
        return frozenset(_READ.findall(inspect.getsource(sys.modules[name])))
    except (OSError, TypeError):  # not in a file, or not in Python
        return frozenset()


def plain_int8(module: nn.Module, dtype: torch.dtype) -> PackedLinear:
    """A linear layer with the 8-bit weights that `pack` makes of it in `dtype`, multiplied by torch."""
    from genctl.native.quantized import Int8Product

    return _packed(module, lambda weight, bias: Int8Product(weight.to(dtype), bias))


def _packed(module: nn.Module, make: Callable[[Tensor, Tensor | None], Linear]) -> PackedLinear:
    """A linear layer with the product that `make` makes of its weight [O, I] and its bias."""
    assert isinstance(module.weight, Tensor)
    weight, bias = module.weight.detach(), module.bias
    if type(module) is Conv1D:  # [in, out] there
        weight = weight.t()
    assert bias is None or isinstance(bias, nn.Parameter)
    return PackedLinear(make(weight, None if bias is None else bias.detach()), weight.shape, bias)
