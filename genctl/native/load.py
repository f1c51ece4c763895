"""A checkpoint's files -> a `NativeModel`. Tensors of safetensors files stay mapped unless they are converted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from genctl.native import pages
from genctl.native.decoder import CrossWeights, Decoder, Encoder, LayerWeights, StackWeights
from genctl.native.linear import Joined, Linear, Products, Weight
from genctl.native.mlp import ACTIVATIONS, MLP, ClampedGate, LayerNorm, Mixture, Norm, RMSNorm, same
from genctl.native.pages import mapped
from genctl.native.plan import StackPlan, WeightPlan, matrix_shape
from genctl.native.positions import fairseq_sinusoids, sinusoids
from genctl.native.runtime import NativeConfig, NativeModel, SpecialTokens

if TYPE_CHECKING:
    from genctl.native.blocks import Embeddings


def read(
    plan: WeightPlan,
    files: tuple[Path, ...],
    config: dict[str, Any],
    special: SpecialTokens,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    check_tensor: Callable[[str, Tensor], object] | None = None,
    products: Products | None = None,
    name: str = "",
) -> NativeModel:
    """Map the files and build the model. `dtype` is the compute type; None means the type of the embeddings.

    Tensors are moved to `device` as they are read; None leaves them mapped. `check_tensor` is called with each tensor
    and its name in the files, and may raise. `products` makes the matrix products.
    """
    lies: Callable[[str], Weight | None] | None = None
    if plan.gguf is None:
        get = mapped(files, check_tensor)
    else:
        from genctl.native.blocks import GgufFile

        held = GgufFile(files, plan.gguf, check_tensor)
        get, lies = held.tensor, held.matrix if products is not None and products.quantize == "gguf" else None
    model = build(plan, get, config, special, lies=lies, dtype=dtype, device=device, products=products, name=name)
    pages.trim_rest()
    return model


def build(
    plan: WeightPlan,
    get: Callable[[str], Tensor],
    config: dict[str, Any],
    special: SpecialTokens,
    *,
    lies: Callable[[str], Weight | None] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    products: Products | None = None,
    name: str = "",
) -> NativeModel:
    """Build the model of a plan. `get` returns a tensor by its name in the files.

    A matrix that `lies` returns is multiplied in the file's form: in blocks, or in 16 bits with 32-bit activations. All
    other tensors are moved to `device` one by one as they are read (None: not moved), so no second full copy exists.
    """
    products = products or Products()
    tables = {table for part, table in plan.embeddings.items() if part != "head"}
    embeddings: dict[str, Tensor] = {}  # converted once: one may have several uses
    kind = get(plan.embeddings["decoder"]).dtype if dtype is None else dtype

    def each(name: str) -> list[Tensor]:
        """The slices, one for each expert, of a stacked tensor."""
        return [pages.converted(part, kind, device) for part in get(name)]

    def converted(name: str) -> Tensor:
        if name not in tables:
            return pages.converted(get(name), kind, device)
        if name not in embeddings:
            table = embeddings[name] = pages.converted(get(name), kind, device)
            # `check_tensor` has read all pages, but a step reads one row per token; only an unquantised head reads all
            if name != plan.embeddings["head"] or products.quantize is not None:
                pages.release(table, pages.mapped_files())
        return embeddings[name]

    def matrix(name: str) -> Weight:
        held = None if lies is None else lies(name)
        if isinstance(held, Tensor) and not (kind == torch.float32 and products.is_compiled):
            held = None
        return converted(name) if held is None else held

    def table(name: str) -> Tensor | Embeddings:
        held = matrix(name)
        if isinstance(held, Tensor) and held.dtype == kind:
            return held
        from genctl.native.blocks import Embeddings

        return Embeddings(held, kind)

    encoder = None
    if plan.encoder is not None:
        stack = _Stack(plan.encoder, converted, matrix, each, products).weights(table(plan.embeddings["encoder"]))
        encoder = Encoder(plan.encoder.spec, stack)
    stack = _Stack(plan.decoder, converted, matrix, each, products).weights(table(plan.embeddings["decoder"]))
    bias = converted(plan.head_bias) if plan.head_bias else None
    if plan.logits_bias and bias is None:
        bias = converted(plan.logits_bias)[0]
    head = products.head(matrix(plan.embeddings["head"]), bias)
    return NativeModel(Decoder(plan.spec, stack, head), NativeConfig(config, plan.spec), special, name, encoder)


class _Stack:
    """Makes the weights of one stack."""

    def __init__(
        self,
        plan: StackPlan,
        get: Callable[[str], Tensor],
        weight: Callable[[str], Weight],
        each: Callable[[str], list[Tensor]],
        products: Products,
    ) -> None:
        self.plan, self.get, self.weight, self.each, self.products = plan, get, weight, each, products
        self.spec, self.names = plan.spec, plan.names

    def weights(self, embed: Tensor | Embeddings) -> StackWeights:
        spec, names, prefix, get = self.spec, self.names, self.plan.prefix, self.get
        positions = get(self.plan.positions) if self.plan.positions else None
        if spec.sinusoidal and positions is None:
            assert spec.context is not None
            if spec.padding is None:
                positions = sinusoids(spec.context, spec.hidden)
            else:
                positions = fairseq_sinusoids(spec.context + spec.padding + 1, spec.hidden, spec.padding)
            positions = positions.to(embed.device, embed.dtype)
        return StackWeights(
            embed,
            [self.layer(self.plan.layer(number)) for number in range(spec.layers)],
            self.norm(prefix + names.final) if spec.final_norm else same,
            positions,
            [get(table) for table in self.plan.relative],
            self.norm(prefix + names.embed_norm) if spec.embed_norm else same,
            self.products.linear(get(f"{prefix}{names.project_in}.weight")) if spec.embed_size else same,
            self.products.linear(get(f"{prefix}{names.project_out}.weight")) if spec.embed_size else same,
        )

    def layer(self, names: dict[str, str]) -> LayerWeights:
        """One layer. `names`: our names for its parts -> their names in the files."""
        norms = {part: self.part_norm(part, name) for part, name in names.items() if part.endswith("norm")}
        cross = None
        if "cross_q" in names:
            cross_norms = {part.removeprefix("cross_"): norms.pop(part) for part in list(norms) if "cross_" in part}
            kv = self.products.joined(*(self.matrix(part, names) for part in ("cross_k", "cross_v")))
            cross = CrossWeights(self.linear("cross_q", names), kv, self.linear("cross_o", names), **cross_norms)
        mlp = self.experts(names) if "router" in names else self.mlp(names)
        sinks = self.get(names["sinks"]) if "sinks" in names else None
        return LayerWeights(self.qkv(names), self.linear("o", names), mlp, cross=cross, sinks=sinks, **norms)

    def qkv(self, names: dict[str, str]) -> Joined:
        if "qkv" not in names:
            return self.products.joined(*(self.matrix(part, names) for part in ("q", "k", "v")))
        spec = self.spec
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        sizes = [queries, keys, keys] if spec.qkv == "joined" else [queries + 2 * keys]
        return self.products.split(*self.matrix("qkv", names), sizes)

    def mlp(self, names: dict[str, str]) -> MLP:
        spec = self.spec
        if "gate_up" in names:
            up = self.products.split(*self.matrix("gate_up", names), [spec.inner, spec.inner])
        else:
            up = self.products.joined(*(self.matrix(part, names) for part in ("gate", "up") if part in names))
        return MLP(up, self.linear("down", names), ACTIVATIONS[spec.activation])

    def experts(self, names: dict[str, str]) -> Mixture:
        spec = self.spec.experts
        assert spec is not None
        # not quantised: a rounded router would choose other experts
        exact, name = Products(pack=self.products.pack, compiled=self.products.compiled), names["router"]
        if spec.limit is None:
            router = exact.linear(self.get(f"{name}.weight"))
            return Mixture(spec, router, [self.expert(names, number) for number in range(spec.count)])
        router = exact.linear(self.get(f"{name}.weight"), self.get(f"{name}.bias"))
        up, down = names["experts_up"], names["experts_down"]
        parts = zip(*(self.each(name) for name in (up, f"{up}_bias", down, f"{down}_bias")), strict=True)
        activation, sizes = ClampedGate(spec.limit, spec.alpha), [2 * spec.inner]
        experts = [
            MLP(self.products.split(up.t(), up_bias, sizes), self.products.linear(down.t(), down_bias), activation)
            for up, up_bias, down, down_bias in parts
        ]
        return Mixture(spec, router, experts)

    def expert(self, names: dict[str, str], number: int) -> MLP:
        parts = ("expert_gate", "expert_up", "expert_down")
        gate, up, down = (self.weight(f"{names[part].format(number)}.weight") for part in parts)
        joined = self.products.joined((gate, None), (up, None))
        return MLP(joined, self.products.linear(down), ACTIVATIONS[self.spec.activation])

    def linear(self, part: str, names: dict[str, str]) -> Linear:
        return self.products.linear(*self.matrix(part, names))

    def matrix(self, part: str, names: dict[str, str]) -> tuple[Weight, Tensor | None]:
        """Weight [out, in] and bias of a part of a layer."""
        shape = matrix_shape(part, self.spec)
        assert shape is not None
        weight = self.weight(f"{names[part]}.weight")
        bias = self.get(f"{names[part]}.bias") if shape[1] else None
        return weight.t() if self.names.transposed and isinstance(weight, Tensor) else weight, bias

    def part_norm(self, part: str, name: str) -> Norm:
        """A norm of a layer; queries and keys may have one for each head."""
        if part not in ("q_norm", "k_norm") or self.spec.qk_norm != "each":
            return self.norm(name)
        heads = self.spec.heads if part == "q_norm" else self.spec.kv_heads
        weight = torch.stack([self.get(f"{name}.{head}.weight") for head in range(heads)])
        return LayerNorm(weight, None, self.spec.eps)

    def norm(self, name: str) -> Norm:
        spec = self.spec
        weight = self.get(f"{name}.weight") if spec.norm_weight else None
        if spec.norm == "rms":
            assert weight is not None
            return RMSNorm(weight, spec.eps, from_one=spec.weight_plus_one, late=spec.round_after_weight)
        bias = self.get(f"{name}.bias") if spec.norm_bias and spec.norm_weight else None
        return LayerNorm(weight, bias, spec.eps)
