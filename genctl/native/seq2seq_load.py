"""The tensors of an encoder-decoder's checkpoint: which ones its spec needs, and the model that they make.

The three embeddings and the head may be one matrix, of which a file holds any copies: what it lacks is `shared`, and
where it lacks that too, the one that it holds (as transformers ties them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from genctl.native.config import NotNative, Unfit
from genctl.native.load import Shape, Shapes, checked
from genctl.native.seq2seq_families import Seq2SeqNames
from genctl.native.seq2seq_spec import Seq2SeqSpec, Side

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from genctl.native.encoder_decoder import EncoderDecoder, Seq2SeqLayerWeights, SideWeights
    from genctl.native.linear import Linear, Products

SideName = Literal["encoder", "decoder"]
SIDES: tuple[SideName, ...] = ("encoder", "decoder")
HEAD = "lm_head.weight"
_NORMS = ("attn_norm", "cross_norm", "mlp_norm")


class Seq2SeqPlan:
    """What a checkpoint holds for a spec: names and shapes. Raises Unfit where its files hold something else."""

    def __init__(self, spec: Seq2SeqSpec, names: Seq2SeqNames, shapes: Shapes) -> None:
        self.spec, self.names = spec, names
        self.prefix = self.names.prefix if any(name.startswith(self.names.prefix) for name in shapes) else ""
        self.embed, held = self._matrices(shapes)  # "encoder", "decoder", "head" -> the name of its matrix
        logits = (f"{self.prefix}final_logits_bias", "final_logits_bias")
        self.head_bias = next((name for name in logits if name in shapes), "") if self.spec.bias else ""
        self.position_tables = {side: self._positions(side, shapes) for side in SIDES}
        self.reads, self.unused = checked(self._wanted(), shapes, self.names.ignored, held)

    def _matrices(self, shapes: Shapes) -> tuple[dict[str, str], list[str]]:
        """Where the embeddings of each side and the head are; and all names of such matrices in the files."""
        spec = self.spec
        shared = f"{self.prefix}shared.weight"
        theirs = {side: f"{self.prefix}{side}.embed_tokens.weight" for side in SIDES}
        own = {"encoder": theirs["encoder"], "decoder": theirs["decoder"], "head": HEAD}
        held = [name for name in (shared, *own.values()) if name in shapes]
        missing = [part for part, name in own.items() if name not in shapes]
        fallback = {}
        if spec.tied and not spec.shared:  # two vocabularies: the head has the decoder's
            pair = {"decoder": HEAD, "head": own["decoder"]}
            fallback = {part: name for part, name in pair.items() if name in shapes}
        elif spec.tied:
            if shared not in held and missing and len(held) > 1:
                raise NotNative(f"the weight files hold no {shared}, and several matrices that could be it")
            fallback = dict.fromkeys(own, held[0]) if held else {}
        for part in missing:
            if part not in fallback:
                raise Unfit(f"the weight files lack {own[part] if spec.shared is False else shared}")
            own[part] = fallback[part]
        return own, held

    def _positions(self, side: SideName, shapes: Shapes) -> str:
        """The table of positions; "" where there is none, or none in the files, so that it is computed."""
        name = f"{self.prefix}{side}.{self.names.positions}.weight"
        return name if self.spec.learned is not None or (self.spec.sinusoidal and name in shapes) else ""

    def _wanted(self) -> Iterator[tuple[str, Shape]]:
        spec, names = self.spec, self.names
        yield self.embed["encoder"], (spec.encoder.vocab, spec.hidden)
        yield self.embed["decoder"], (spec.decoder.vocab, spec.hidden)
        yield self.embed["head"], (spec.decoder.vocab, spec.hidden)
        if self.head_bias:
            yield self.head_bias, (1, spec.decoder.vocab)
        for side in SIDES:
            begin, sizes = f"{self.prefix}{side}.", self.side(side)
            if self.position_tables[side]:
                assert spec.context is not None
                yield self.position_tables[side], (spec.context + (spec.learned or 0), spec.hidden)
            if spec.relative is not None:
                yield f"{begin}{names.relative}.weight", (spec.relative.buckets, sizes.heads)
            if spec.embed_norm:
                yield from self._norm(begin + names.embed_norm)
            if spec.final_norm:
                yield from self._norm(begin + names.final)
            for number in range(sizes.layers):
                for part, theirs in self.parts(side).items():
                    yield from self._part(part, begin + names.layer.format(number) + theirs, sizes)

    def side(self, side: SideName) -> Side:
        return self.spec.encoder if side == "encoder" else self.spec.decoder

    def parts(self, side: SideName) -> dict[str, str]:
        """Our names for the parts of a layer -> theirs."""
        return self.names.encoder if side == "encoder" else self.names.decoder

    def _part(self, part: str, name: str, sizes: Side) -> Iterator[tuple[str, Shape]]:
        if part in _NORMS:
            yield from self._norm(name)
            return
        hidden, attended = self.spec.hidden, sizes.heads * sizes.head_dim
        shapes = {"o": (hidden, attended), "up": (sizes.inner, hidden), "down": (hidden, sizes.inner)}
        shape = shapes.get({"gate": "up"}.get(part, part.removeprefix("cross_")), (attended, hidden))
        yield f"{name}.weight", shape
        if self.spec.bias:
            yield f"{name}.bias", shape[:1]

    def _norm(self, name: str) -> Iterator[tuple[str, Shape]]:
        yield f"{name}.weight", (self.spec.hidden,)
        if self.spec.norm == "layer":
            yield f"{name}.bias", (self.spec.hidden,)


def build(
    plan: Seq2SeqPlan,
    get: Callable[[str], Tensor],
    *,
    dtype: torch.dtype | None = None,
    products: Products | None = None,
) -> EncoderDecoder:
    """The model of a plan, whose tensors `get` gives by their names in the files."""
    from genctl.native import pages
    from genctl.native.encoder_decoder import EncoderDecoder, Seq2SeqWeights
    from genctl.native.linear import Products

    products = products or Products()
    read: dict[str, Tensor] = {}  # matrices that have several uses

    def converted(name: str) -> Tensor:
        if name not in plan.embed.values():
            return products.converted(get(name), kind)
        if name not in read:
            read[name] = pages.converted(get(name), kind)
        return read[name]

    first = get(plan.embed["decoder"])
    kind = first.dtype if dtype is None else dtype
    read[plan.embed["decoder"]] = pages.converted(first, kind)
    builder = _Seq2SeqBuilder(plan, converted, products)
    weights = Seq2SeqWeights(builder.side("encoder"), builder.side("decoder"), builder.head())
    for name in {plan.embed["encoder"], plan.embed["decoder"]} - {plan.embed["head"]}:
        pages.release(read[name], pages.mapped_files())  # only a row for each token is read from now on
    return EncoderDecoder(plan.spec, weights)


class _Seq2SeqBuilder:
    def __init__(self, plan: Seq2SeqPlan, get: Callable[[str], Tensor], products: Products) -> None:
        self.plan, self.get, self.products = plan, get, products
        self.spec, self.names = plan.spec, plan.names

    def head(self) -> Linear:
        bias = self.plan.head_bias
        return self.products.head(self.get(self.plan.embed["head"]), self.get(bias)[0] if bias else None)

    def side(self, side: SideName) -> SideWeights:
        from genctl.native.decoder import same
        from genctl.native.encoder_decoder import SideWeights, sinusoids

        spec, names, begin = self.spec, self.names, f"{self.plan.prefix}{side}."
        embed = self.get(self.plan.embed[side])
        positions = None
        if self.plan.position_tables[side]:
            positions = self.get(self.plan.position_tables[side])
        elif spec.sinusoidal:
            assert spec.context is not None
            positions = sinusoids(spec.context, spec.hidden).to(embed)
        return SideWeights(
            embed,
            [self.layer(side, begin + names.layer.format(number)) for number in range(self.plan.side(side).layers)],
            positions,
            self.get(f"{begin}{names.relative}.weight") if spec.relative is not None else None,
            self.norm(begin + names.embed_norm) if spec.embed_norm else same,
            self.norm(begin + names.final) if spec.final_norm else same,
        )

    def layer(self, side: SideName, begin: str) -> Seq2SeqLayerWeights:
        from genctl.native.encoder_decoder import CrossWeights, Seq2SeqLayerWeights

        parts = {part: begin + theirs for part, theirs in self.plan.parts(side).items()}

        def matrix(part: str) -> tuple[Tensor, Tensor | None]:
            """Weight [out, in] and bias."""
            return self.get(f"{parts[part]}.weight"), self.get(f"{parts[part]}.bias") if self.spec.bias else None

        def norms(part: str, at: str) -> dict[str, Any]:
            """Before the sublayer, or behind the sum."""
            return {at if self.spec.norm_first else at.replace("norm", "sum_norm"): self.norm(parts[part])}

        linear, joined, cross = self.products.linear, self.products.joined, None
        if side == "decoder":
            cross = CrossWeights(
                linear(*matrix("cross_q")),
                joined(matrix("cross_k"), matrix("cross_v")),
                linear(*matrix("cross_o")),
                **norms("cross_norm", "norm"),
            )
        return Seq2SeqLayerWeights(
            joined(*map(matrix, "qkv")),
            linear(*matrix("o")),
            joined(*(matrix(part) for part in ("gate", "up") if part in parts)),
            linear(*matrix("down")),
            cross,
            **norms("attn_norm", "attn_norm"),
            **norms("mlp_norm", "mlp_norm"),
        )

    def norm(self, name: str) -> Any:
        from genctl.native.decoder import LayerNorm, RMSNorm

        weight = self.get(f"{name}.weight")
        if self.spec.norm == "rms":
            return RMSNorm(weight, self.spec.eps)
        return LayerNorm(weight, self.get(f"{name}.bias"), self.spec.eps)
