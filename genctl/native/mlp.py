"""The MLP of a layer, the activation functions, and the norms.

N rows, F tokens fed to each, E features of the residual stream, I features of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from genctl.kernels import ops
from genctl.native.linear import Joined, Linear
from genctl.native.spec import Experts

# -- a mixture of experts in place of an MLP: a router chooses some of many MLPs for each token ------------------------
# N rows, F tokens fed to each, E features of the residual stream, X experts, C of them chosen for a token.


class Mixture:
    """The sum of the chosen experts' outputs, weighted by the router (Mixtral, arXiv:2401.04088)."""

    def __init__(self, spec: Experts, router: Linear, experts: Sequence[MLP]) -> None:
        self.spec, self.router, self.experts = spec, router, list(experts)

    def __call__(self, h: Tensor) -> Tensor:
        """h [N, F, E] -> [N, F, E]. Experts are summed in order of number, so no token depends on the other tokens."""
        tokens = h.reshape(-1, h.shape[-1])  # [T, E]
        weights, chosen = self.choose(self.router(tokens[None])[0].float())
        y = torch.zeros_like(tokens)
        for number in sorted(set(chosen.flatten().tolist())):
            place, which = (chosen == number).nonzero(as_tuple=True)
            output = self.experts[number](tokens[place][None])[0].float() * weights[place, which, None]
            y.index_add_(0, place, output.to(y.dtype))
        return y.view(h.shape)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores f32 [T, X] -> weights f32 and numbers int64 of the chosen experts, each [T, C]."""
        found = ops.compiled(scores)
        shares = scores.softmax(-1) if found is None else ops.softmax(found, scores, plain=True)
        weights, chosen = shares.topk(self.spec.chosen, -1)
        return weights / ops.total(weights)[:, None] if self.spec.normed else weights, chosen

    def products(self) -> Iterator[Linear | Joined]:
        """Its matrix products."""
        yield self.router
        for expert in self.experts:
            yield from expert.products()


QUICK = 1.702  # of the approximation of GELU by a sigmoid (Hendrycks and Gimpel 2016, arXiv:1606.08415)


class MLP:
    """down(act(up(x))), or down(act(gate(x)) · up(x)) with a gate (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, up: Joined, down: Linear, activation: Callable[..., Tensor]) -> None:
        self.up, self.down, self.activation = up, down, activation

    def __call__(self, h: Tensor) -> Tensor:
        """h [N, F, E] -> [N, F, E]."""
        gate, *up = self.up(h)  # one [N, F, I], or two
        return self.down(self.activation(gate, *up))

    def products(self) -> Iterator[Linear | Joined]:
        """Its matrix products."""
        yield from (self.up, self.down)


class ClampedGate:
    """(up + 1) · gate · sigmoid(alpha · gate), both clamped to a limit; gate and up interleaved (gpt-oss)."""

    def __init__(self, limit: float, alpha: float) -> None:
        self.limit, self.alpha = limit, alpha

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., 2 · I] -> [..., I]."""
        gate, up = x[..., ::2].clamp(max=self.limit), x[..., 1::2].clamp(-self.limit, self.limit) + 1
        library = ops.compiled(gate)
        if library is None:
            return up * (gate * torch.sigmoid(gate * self.alpha))
        if self.alpha == QUICK:
            return ops.activate(library, "quick_gelu", gate, up)
        wide = gate.float()  # the sigmoid of z is (1 + tanh(z / 2)) / 2
        return (up.float() * wide * (0.5 + 0.5 * ops.activate(library, "tanh", wide * (self.alpha / 2)))).to(x.dtype)


class Activation:
    """An elementwise function, by the compiled library or by torch."""

    def __init__(self, name: str, plain: Norm) -> None:
        self.name, self.plain = name, plain

    def __call__(self, x: Tensor, times: Tensor | None = None) -> Tensor:
        """act(x), or act(x) · times, each [..., features]."""
        library = ops.compiled(x)
        if library is not None:
            return ops.activate(library, self.name, x, times)
        return self.plain(x) if times is None else self.plain(x) * times


TANH = Activation("tanh", torch.tanh)
_SILU, _GELU = Activation("silu", F.silu), Activation("gelu", F.gelu)
# Hendrycks and Gimpel 2016 (arXiv:1606.08415), its approximation
_GELU_TANH = Activation("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))
ACTIVATIONS = {
    "silu": _SILU,
    "swish": _SILU,
    "relu": Activation("relu", F.relu),
    "gelu": _GELU,
    "gelu_python": _GELU,
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "quick_gelu": Activation("quick_gelu", lambda x: x * torch.sigmoid(QUICK * x)),
}


Norm = Callable[[Tensor], Tensor]  # [..., E] -> [..., E]


def same(x: Tensor) -> Tensor:
    """No norm: x itself."""
    return x


class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, weight: Tensor, eps: float, *, from_one: bool = False, late: bool = False) -> None:
        self.weight = weight.float() + 1 if from_one else weight  # Gemma stores the gain minus 1
        self.eps = torch.tensor(eps, device=weight.device)
        self.number = eps
        self.late = late or from_one  # round to the type of x after multiplying by the weight, not before

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., features]."""
        library = ops.compiled(x)
        if library is not None:
            return ops.rms_norm(library, x, self.weight, self.number, late=self.late)
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, 2, -1, keepdim=True)
        y = wide * torch.addcmul(self.eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()  # F.rms_norm takes twice as long
        return (y * self.weight).to(x.dtype) if self.late else y.to(x.dtype) * self.weight


class LayerNorm:
    """(x - mean(x)) / sqrt(var(x) + eps) · weight + bias (Ba et al. 2016, arXiv:1607.06450).

    The weight may have dimensions before the last, one norm for each head: [H, D].
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps
        self.several = weight is not None and weight.ndim > 1

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., features], or [..., H, D] with a norm for each head."""
        library = ops.compiled(x)
        if library is not None:
            return ops.layer_norm(library, x, self.weight, self.bias, self.eps)
        if self.several:
            assert self.weight is not None
            return F.layer_norm(x, (x.shape[-1],), None, None, self.eps) * self.weight
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
