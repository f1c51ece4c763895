"""A checkpoint's safetensors files -> a `Decoder`. Tensors stay mapped from the files; none is copied.

Which tensors a spec needs, and their shapes, is known from the headers, before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from genctl.native.config import Unfit
from genctl.native.names import COMPUTED, Names
from genctl.native.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from genctl.native.decoder import Decoder, LayerWeights
    from genctl.native.linear import Products

Shape = tuple[int, ...]
Shapes = dict[str, Shape]  # of tensors, by their names in the files
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

_NORMS = ("attn_norm", "attn_out_norm", "attn_sum_norm", "mlp_norm", "mlp_out_norm", "mlp_sum_norm")


class WeightPlan:
    """What a checkpoint holds for a spec: names and shapes. Raises Unfit where its files hold something else."""

    def __init__(self, spec: Spec, names: Names, shapes: Shapes) -> None:
        self.spec, self.names = spec, names
        self.prefix = prefix_of(self.names.prefix, self.names.embed, shapes)
        self.embed = f"{self.prefix}{self.names.embed}.weight"
        self.head = next((head for head in self.names.heads if f"{head}.weight" in shapes), "")
        if not self.head and not self.spec.tied:
            raise Unfit(f"the weight files lack {self.names.heads[0]}.weight")
        self.reads, self.unused = checked(self._wanted(), shapes, self.names.ignored)

    def _wanted(self) -> Iterator[tuple[str, Shape]]:
        spec, names = self.spec, self.names
        yield self.embed, (spec.vocab, spec.width)
        if spec.learned is not None:
            assert spec.context is not None
            yield f"{self.prefix}{names.positions}.weight", (spec.context + spec.learned, spec.hidden)
        if spec.embed_norm:
            yield from _norm(f"{self.prefix}{names.embed_norm}", spec)
        if spec.embed_size:
            yield f"{self.prefix}{names.project_in}.weight", (spec.hidden, spec.width)
            yield f"{self.prefix}{names.project_out}.weight", (spec.width, spec.hidden)
        for number in range(spec.layers):
            begin = self.prefix + names.layer.format(number)
            for part, theirs in names.parts.items():
                yield from _part(part, begin + theirs, spec, transposed=names.transposed)
        if spec.final_norm:
            yield from _norm(f"{self.prefix}{names.final}", spec)
        if self.head:
            yield f"{self.head}.weight", (spec.vocab, spec.width)
        if spec.head_bias:
            yield f"{self.head or names.heads[0]}.bias", (spec.vocab,)


def prefix_of(prefix: str, embed: str, shapes: Shapes) -> str:
    """What the names in the files begin with: `prefix`, or without its first part in a checkpoint of the bare model."""
    bare = prefix.partition(".")[2]
    return bare if f"{bare}{embed}.weight" in shapes and f"{prefix}{embed}.weight" not in shapes else prefix


def checked(
    wanted: Iterable[tuple[str, Shape]], shapes: Shapes, ignored: tuple[str, ...], known: Collection[str] = ()
) -> tuple[frozenset[str], list[str]]:
    """The names of the tensors that are read, and of those in the files that nobody reads.

    Raises Unfit where the files hold something else. `ignored` are endings of names.
    """
    shape_of = dict(wanted)
    for name, shape in shape_of.items():
        if shapes.get(name) != shape:
            held = "nothing" if name not in shapes else str(list(shapes[name]))
            raise Unfit(f"the weight files hold {held} as {name}, where config.json implies {list(shape)}")
    others = (name for name in shapes.keys() - shape_of.keys() - set(known) if not name.endswith(ignored or ("\0",)))
    return frozenset(shape_of), sorted(name for name in others if not COMPUTED.fullmatch(name.rpartition(".")[2]))


def matrix_shape(part: str, spec: Spec) -> tuple[Shape, bool] | None:
    """[out, in] of a part of a layer that is a matrix, and whether it has a bias; None for a norm."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[Shape, bool]] = {
        "q": ((queries, spec.hidden), spec.qkv_bias),
        "k": ((keys, spec.hidden), spec.qkv_bias),
        "v": ((keys, spec.hidden), spec.qkv_bias),
        "qkv": ((queries + 2 * keys, spec.hidden), spec.qkv_bias),
        "o": ((spec.hidden, queries), spec.o_bias),
        "gate": ((spec.inner, spec.hidden), spec.mlp_bias),
        "up": ((spec.inner, spec.hidden), spec.mlp_bias),
        "gate_up": ((2 * spec.inner, spec.hidden), spec.mlp_bias),
        "down": ((spec.hidden, spec.inner), spec.mlp_bias),
    }
    return shapes.get(part)


def _part(part: str, name: str, spec: Spec, *, transposed: bool) -> Iterator[tuple[str, Shape]]:
    found = matrix_shape(part, spec)
    if found is not None:
        (out, into), bias = found
        yield f"{name}.weight", (into, out) if transposed else (out, into)
        if bias:
            yield f"{name}.bias", (out,)
    elif part in _NORMS:
        yield from _norm(name, spec)
    else:  # q_norm, k_norm
        heads = spec.heads if part == "q_norm" else spec.kv_heads
        if spec.qk_norm == "each":
            yield from ((f"{name}.{head}.weight", (spec.head_dim,)) for head in range(heads))
        else:
            yield from _norm(name, spec, spec.head_dim if spec.qk_norm == "head" else heads * spec.head_dim)


def _norm(name: str, spec: Spec, size: int | None = None) -> Iterator[tuple[str, Shape]]:
    if spec.norm_weight:
        yield f"{name}.weight", (size or spec.hidden,)
        if spec.norm == "layer" and spec.norm_bias:
            yield f"{name}.bias", (size or spec.hidden,)


def build(
    plan: WeightPlan,
    get: Callable[[str], Tensor],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    products: Products | None = None,
) -> Decoder:
    """The decoder of a plan, whose tensors `get` gives by their names in the files.

    Each is moved to `device` as it comes (None: it stays where it is), so that no second copy of the model is made.
    """
    from genctl.native import pages
    from genctl.native.decoder import Decoder
    from genctl.native.linear import Products

    held = products or Products()
    embed = get(plan.embed)
    kind = embed.dtype if dtype is None else dtype

    def converted(name: str) -> Tensor:
        if name == plan.embed:
            return pages.converted(embed, kind, device)
        return held.converted(get(name), kind, device)

    if plan.head or held.quantize is not None:  # whoever looked read them all; a step reads a row for each token
        pages.release(embed, pages.mapped_files())
    return Decoder(plan.spec, _Builder(plan, converted, held).weights())


class _Builder:
    def __init__(self, plan: WeightPlan, get: Callable[[str], Tensor], products: Products) -> None:
        self.plan, self.get, self.products = plan, get, products
        self.spec, self.names, self.prefix = plan.spec, plan.names, plan.prefix

    def weights(self) -> Any:
        from genctl.native.decoder import DecoderWeights, same

        spec, names, prefix, get = self.spec, self.names, self.prefix, self.get
        embed = get(self.plan.embed)
        head = get(f"{self.plan.head}.weight") if self.plan.head else embed
        bias = get(f"{self.plan.head or names.heads[0]}.bias") if spec.head_bias else None
        layers = [self.layer(prefix + names.layer.format(number)) for number in range(spec.layers)]
        return DecoderWeights(
            embed,
            layers,
            self.products.head(head, bias),
            self.norm(prefix + names.final) if spec.final_norm else same,
            get(f"{prefix}{names.positions}.weight") if spec.learned is not None else None,
            self.norm(prefix + names.embed_norm) if spec.embed_norm else same,
            self.products.linear(get(f"{prefix}{names.project_in}.weight")) if spec.embed_size else same,
            self.products.linear(get(f"{prefix}{names.project_out}.weight")) if spec.embed_size else same,
        )

    def layer(self, begin: str) -> LayerWeights:
        from genctl.native.decoder import LayerNorm, LayerWeights

        spec, products = self.spec, self.products
        theirs = {part: begin + name for part, name in self.names.parts.items()}
        norms: dict[str, Any] = {}
        for part, name in theirs.items():
            if part not in _NORMS and part in ("q_norm", "k_norm") and spec.qk_norm == "each":
                norms[part] = LayerNorm(self._heads(name, part), None, spec.eps)
            elif matrix_shape(part, spec) is None:
                norms[part] = self.norm(name)
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        if "qkv" in theirs:
            sizes = [queries + 2 * keys] if spec.qkv == "grouped" else [queries, keys, keys]
            qkv = products.split(*self.matrix("qkv", theirs), sizes)
        else:
            qkv = products.joined(*(self.matrix(part, theirs) for part in ("q", "k", "v")))
        if "gate_up" in theirs:
            up = products.split(*self.matrix("gate_up", theirs), [spec.inner, spec.inner])
        else:
            up = products.joined(*(self.matrix(part, theirs) for part in ("gate", "up") if part in theirs))
        o, down = (products.linear(*self.matrix(part, theirs)) for part in ("o", "down"))
        return LayerWeights(qkv, o, up, down, **norms)

    def matrix(self, part: str, theirs: dict[str, str]) -> tuple[Tensor, Tensor | None]:
        """Weight [out, in] and bias of a part of a layer."""
        found = matrix_shape(part, self.spec)
        assert found is not None
        weight = self.get(f"{theirs[part]}.weight")
        bias = self.get(f"{theirs[part]}.bias") if found[1] else None
        return weight.t() if self.names.transposed else weight, bias

    def _heads(self, name: str, part: str) -> Tensor:
        import torch

        heads = self.spec.heads if part == "q_norm" else self.spec.kv_heads
        return torch.stack([self.get(f"{name}.{head}.weight") for head in range(heads)])

    def norm(self, name: str) -> Any:
        from genctl.native.decoder import LayerNorm, RMSNorm

        spec = self.spec
        weight = self.get(f"{name}.weight") if spec.norm_weight else None
        if spec.norm == "rms":
            assert weight is not None
            return RMSNorm(weight, spec.eps, from_one=spec.norm_from_one)
        bias = self.get(f"{name}.bias") if spec.norm_bias and spec.norm_weight else None
        return LayerNorm(weight, bias, spec.eps)
