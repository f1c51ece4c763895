"""A model's forward pass in another arithmetic: in float64 with its weights as they are, or with random rounding.

Both are a `torch.overrides.TorchFunctionMode`, which intercepts every call of a torch function. The model is neither
changed nor copied: weights are widened as they are used, large ones in slices.

`Exact` computes in float64. Where the model casts to float32 for precision (norms, softmax, rotary angles), it stays
in float64. `Shaken` computes in the dtype of a side and moves each result by up to half a unit in the last place, at
random: Monte Carlo arithmetic (Parker 1997, UCLA CSD-970002). The spread is the effect of rounding on this model and
this text, whatever the order in which an implementation sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from genctl.native import pages

SLICE = 2**21  # elements of a weight that are widened at a time: 16 MiB in float64
# operations with rounded results; all others only move or select elements
ROUNDING = frozenset(
    """
    linear matmul bmm addmm baddbmm einsum conv1d layer_norm group_norm rms_norm softmax log_softmax add sub mul div pow
    rsqrt sqrt square exp log tanh sigmoid silu gelu erf cos sin mean sum var norm addcmul vector_norm
    linalg_vector_norm reciprocal softplus cumsum mish elu rsub true_divide rmatmul radd rmul truediv rtruediv iadd isub
    imul itruediv rpow
    """.split()  # noqa: SIM905 — one name to a line would fill a page
)
CODING = frozenset({"round", "round_"})  # these turn activations into 8-bit codes


class Weights:
    """The weights of a model as a side uses them: rounded to `dtype` if that is narrower than their own."""

    def __init__(self, tensors: Iterable[Tensor], dtype: torch.dtype, *, from_one: Iterable[Tensor] = ()) -> None:
        """`from_one`: norm weights that are stored as their distance from 1 (Gemma)."""
        self._places = {tensor.data_ptr() for tensor in tensors if tensor.is_floating_point()}
        self._from_one = {tensor.data_ptr() for tensor in from_one}
        self.dtype = dtype
        self.mapped = pages.mapped_files()  # their pages are released after use

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.data_ptr() in self._places

    def value(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A weight with the side's rounding, as `dtype`."""
        if tensor.data_ptr() in self._from_one:
            return ((tensor - 1).to(self.dtype).to(tensor.dtype) + 1).to(torch.promote_types(dtype, tensor.dtype))
        return tensor.to(self.dtype).to(dtype)


class _Mode(TorchFunctionMode):
    """Intercepts operations on a model's weights and on activations of `dtype`."""

    dtype: torch.dtype

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = weights
        self.coded = 0  # how many activations were rounded to codes
        self._spaces: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" or name in ("data_ptr", "size", "dim", "stride", "is_floating_point", "numel", "storage"):
            return func(*args, **kwargs)
        if func is F.embedding:
            return self._embedding(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.linear:
            return self.result(name, self._linear(*args, **kwargs))
        if args and isinstance(args[0], Tensor) and name in ("float", "to", "type", "type_as"):
            tensor = args[0]
            if tensor in self.weights:
                args = (self.weights.value(tensor, torch.float32), *args[1:])
            return self.cast(func, args, kwargs)
        if name in CODING and isinstance(args[0], Tensor):
            self.coded += args[0].numel()
            return func(self.before_coding(args[0], in_place=name == "round_"), *args[1:], **kwargs)
        args, kwargs = self.operands(func, args, kwargs)
        return self.result(name, func(*args, **kwargs))

    # -- where the arithmetics differ ----------------------------------------------------------------------------------

    def cast(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A conversion to another dtype."""
        return func(*args, **kwargs)

    def operands(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of an operation, with weights as the side uses them."""
        if not any(tensor in self.weights for tensor in _tensors(args)) or not self._computes(args):
            return args, kwargs
        return _mapped(args, lambda tensor: self._wide(tensor) if tensor in self.weights else tensor), kwargs

    def result(self, name: str, value: Any) -> Any:
        """The result of an operation."""
        return value

    def before_coding(self, numbers: Tensor, *, in_place: bool) -> Tensor:
        """Activations in units of their codes, just before they are rounded."""
        return numbers

    def coded_weight(self, rows: Tensor) -> Tensor:
        """Rows [R, N] of a matrix, as the side uses them."""
        return rows

    # -- operations ----------------------------------------------------------------------------------------------------

    def _computes(self, args: Any) -> bool:
        """Whether activations are among the operands; without any, a weight is only reshaped."""
        floats = [tensor for tensor in _tensors(args) if tensor.is_floating_point()]
        return len(floats) > 1

    def _wide(self, tensor: Tensor) -> Tensor:
        return self.weights.value(tensor, self.dtype)

    def _embedding(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows = F.embedding(input, weight, *args, **kwargs)
        return self.coded_weight(rows.to(self.weights.dtype).to(self.dtype))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ + b, a slice of the outputs at a time."""
        if weight not in self.weights:
            return F.linear(*self._same(x, weight, bias))
        # CPUs without native products of a narrow dtype are slow at them; all accumulate in float32
        dtype = torch.float32 if self.dtype.itemsize < 4 and x.device.type == "cpu" else self.dtype
        if bias is not None:
            bias = (self._wide(bias) if bias in self.weights else bias).to(dtype)
        x = x.to(self.dtype).to(dtype)
        step = max(SLICE // weight.shape[1], 1)
        rounded, wide = (self._space(weight, min(step, len(weight)), held) for held in (self.weights.dtype, dtype))
        parts = []
        for at in range(0, weight.shape[0], step):
            part = weight[at : at + step]
            if part.dtype != self.weights.dtype:
                part = rounded[: len(part)].copy_(part)
            used = self.coded_weight(wide[: len(part)].copy_(part))
            parts.append(F.linear(x, used, None if bias is None else bias[at : at + step]))
            pages.release(weight[at : at + step], self.weights.mapped)
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).to(self.dtype)

    def _space(self, weight: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        """A reused buffer for some rows of a weight: the C library's heap grows with each freed slice."""
        key = weight.device, dtype
        size = rows * weight.shape[1]
        if key not in self._spaces or len(self._spaces[key]) < size:
            self._spaces[key] = torch.empty(max(size, SLICE), dtype=dtype, device=weight.device)
        return self._spaces[key][:size].view(rows, -1)

    def _same(self, *tensors: Tensor | None) -> list[Any]:
        """Tensors cast to the widest of their dtypes."""
        widest = torch.float16
        for tensor in tensors:
            if tensor is not None:
                widest = tensor.dtype if widest == torch.float16 else torch.promote_types(widest, tensor.dtype)
        return [None if tensor is None else tensor.to(widest) for tensor in tensors]

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """softmax(q kᵀ · scale + mask) v, as separate products: fused kernels lack float64 and hide their rounding."""
        query, key, value = self._same(query, key, value)
        if enable_gqa:
            key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
        scores = self.result("matmul", query @ key.transpose(-1, -2)) * (
            query.shape[-1] ** -0.5 if scale is None else scale
        )
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self.mixed(scores, value)

    def mixed(self, scores: Tensor, value: Tensor) -> Tensor:
        """Values [..., T, D] weighted by the softmax of scores [..., F, T]."""
        wide = scores if scores.dtype == torch.float64 else scores.float()
        shares = self.result("softmax", wide.softmax(-1).nan_to_num(0.0).to(value.dtype))  # padding sees nothing
        return torch.as_tensor(self.result("matmul", shares @ value))


class Exact(_Mode):
    """float64 throughout, or another wide dtype."""

    def __init__(self, weights: Weights, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(weights)
        self.dtype = dtype

    def cast(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        value = func(*args, **kwargs)
        source = args[0]
        if isinstance(value, Tensor) and value.is_floating_point() and source.is_floating_point():
            return source.to(value.device, self.dtype)
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def operands(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        floats = [tensor for tensor in (*_tensors(args), *_tensors(kwargs)) if tensor.is_floating_point()]
        if kwargs.get("dtype") in (torch.float32, torch.bfloat16, torch.float16) and floats:
            kwargs = {**kwargs, "dtype": self.dtype}
        if len(floats) < 2 or not any(tensor.dtype == self.dtype for tensor in floats):
            return args, kwargs
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.startswith("__")):
            return args, kwargs  # written in place
        return _mapped(args, self._widened), _mapped(kwargs, self._widened)

    def _widened(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return self._wide(tensor) if tensor in self.weights else tensor.to(self.dtype)


class Shaken(_Mode):
    """The side's own dtype; each rounded result moves by up to half a unit in the last place, at random.

    Activations that become codes also move by up to `border` codes first, to push some across the border of two codes:
    rounding alone rarely does, a few readings may miss it, and a single crossing makes all later values jump.
    """

    def __init__(self, weights: Weights, seed: int, border: float = 0.0) -> None:
        super().__init__(weights)
        self.dtype = weights.dtype
        self._seed, self._border = seed, border
        self._random: dict[torch.device, torch.Generator] = {}

    def result(self, name: str, value: Any) -> Any:
        plain = name.strip("_")
        if plain not in ROUNDING or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        moved = value.double() * (1 + torch.finfo(value.dtype).eps / 2 * self._noise(value))
        if name.endswith("_") and not name.startswith("__"):
            return value.copy_(moved)
        return moved.to(value.dtype)

    def before_coding(self, numbers: Tensor, *, in_place: bool) -> Tensor:
        if not self._border:
            return numbers
        moved = numbers + (self._border * self._noise(numbers)).to(numbers.dtype)
        return numbers.copy_(moved) if in_place else moved

    def _noise(self, value: Tensor) -> Tensor:
        """Uniform noise from -1 to 1, f64 in the shape of `value`."""
        if value.device not in self._random:
            self._random[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        drawn = torch.rand(value.shape, generator=self._random[value.device], dtype=torch.float64, device=value.device)
        return drawn.mul_(2).sub_(1)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors among arguments, nested ones too."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Arguments with `change` applied to every tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_mapped(item, change) for item in value)
    return value
