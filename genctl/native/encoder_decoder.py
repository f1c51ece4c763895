"""The forward passes of an encoder-decoder: a source in, states out; states and a text in, logits out.

    encoder:  x = embedding of each token of the source (+ its position)
              for each layer:
                  x = x + attention(norm(x))         tokens look at all others
                  x = x + MLP(norm(x))               each token for itself
    decoder:  x = embedding of each token of the text (+ its position)
              for each layer:
                  x = x + attention(norm(x))         tokens look at those before them
                  x = x + attention(norm(x), states) tokens look at the source
                  x = x + MLP(norm(x))
    logits = head(norm(x))

That is Vaswani et al. 2017 (arXiv:1706.03762) with the norms in front, as T5, mBART and Pegasus have it; BART and
Marian norm each sum instead, as the paper did. The other variations are branches on a field of the spec.

N rows, F tokens fed to each, S tokens of a source, P sources (N / P rows in turn belong to one), E features of the
residual stream, H heads, D features of a head, I features of the MLP, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.cache.layer import KeyValues
from genctl.native.attention import Mask, attention, cross_attention
from genctl.native.decoder import ACTIVATIONS, Map, same
from genctl.native.linear import Joined, Linear
from genctl.native.seq2seq_spec import Relative, Seq2SeqSpec, Side


@dataclass
class CrossWeights:
    """How a decoder's layer looks at the source."""

    q: Linear  # E -> H·D
    kv: Joined  # E -> H·D twice
    o: Linear  # H·D -> E
    norm: Map = same
    sum_norm: Map = same


@dataclass
class Seq2SeqLayerWeights:
    """One layer. A norm that the family does not have is `same`."""

    qkv: Joined  # E -> H·D three times
    o: Linear  # H·D -> E
    up: Joined  # E -> I, with a gate E -> I and I
    down: Linear  # I -> E
    cross: CrossWeights | None = None  # of a decoder
    attn_norm: Map = same  # of what attention reads
    attn_sum_norm: Map = same  # of the sum with what it adds
    mlp_norm: Map = same
    mlp_sum_norm: Map = same


@dataclass
class SideWeights:
    """The encoder, or the decoder."""

    embed: Tensor  # [V, E]
    layers: list[Seq2SeqLayerWeights]
    positions: Tensor | None = None  # [T, E]
    relative: Tensor | None = None  # [buckets, H]
    embed_norm: Map = same
    final_norm: Map = same


@dataclass
class Seq2SeqWeights:
    """An encoder-decoder's tensors, as they lie in its file."""

    encoder: SideWeights
    decoder: SideWeights
    head: Linear  # E -> V


class EncoderDecoder:
    """An encoder-decoder with its weights."""

    def __init__(self, spec: Seq2SeqSpec, weights: Seq2SeqWeights) -> None:
        self.spec, self.weights = spec, weights
        self.dtype, self.device = weights.decoder.embed.dtype, weights.decoder.embed.device
        self.activation = ACTIVATIONS[spec.activation]
        self.both_ways = _distances(weights.encoder, spec, both_ways=True)
        self.backwards = _distances(weights.decoder, spec, both_ways=False)

    # -- the passes ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, tokens: Tensor) -> Tensor:
        """Sources without padding: int64 [P, S] -> states [P, S, E]."""
        side, w = self.spec.encoder, self.weights.encoder
        length = tokens.shape[1]
        x = self._embed(tokens, torch.arange(length, device=tokens.device)[None], w)
        bias = None if self.both_ways is None else self.both_ways.bias(0, length)  # [1, H, S, S]
        for layer in w.layers:
            q, k, v = (_heads(part, side) for part in layer.qkv(layer.attn_norm(x)))  # each [P, H, S, D]
            x = layer.attn_sum_norm(x + layer.o(cross_attention(q, k, v, bias, scaling=self.spec.scaling(side))))
            x = layer.mlp_sum_norm(x + self._mlp(layer.mlp_norm(x), layer))
        return w.final_norm(x)

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        source: Tensor,
        layers: Sequence[KeyValues] | None = None,
        cross: Sequence[GrowingLayer] | None = None,
        *,
        mask: Tensor | None = None,
        source_mask: Tensor | None = None,
        past: int = 0,
        keep: int = 0,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """tokens int64 [N, F] at positions int64 [N or 1, F] -> logits [N, F, V], of the last `keep` tokens if not 0.

        `layers` is a cache with `past` columns, to which keys and values are added. `cross` holds those of the source;
        where it is empty it is filled from `source` [N or P, S, E], which is not read otherwise. mask [N, past + F] and
        source_mask [N, S] are 0 where a row has padding. `states` is given what each layer reads, and last what the
        head reads, each [N, F, E].
        """
        w, fed = self.weights.decoder, tokens.shape[1]
        if self.backwards is None:
            visible = Mask(past, fed, mask, self.device)
        else:
            visible = RelativeMask(past, fed, mask, self.device, self.backwards)
        seen = None if source_mask is None else source_mask.bool()[:, None, None]  # [N, 1, 1, S]
        x = self._embed(tokens, positions, w)
        for number, layer in enumerate(w.layers):
            if states is not None:
                states.append(x)
            own = None if layers is None else layers[number]
            x = layer.attn_sum_norm(x + self._attention(layer.attn_norm(x), layer, own, visible))
            assert layer.cross is not None
            keys, values = self._source(source, layer.cross, None if cross is None else cross[number])
            x = layer.cross.sum_norm(x + self._look(layer.cross.norm(x), layer.cross, keys, values, seen))
            x = layer.mlp_sum_norm(x + self._mlp(layer.mlp_norm(x), layer))
        if keep and states is None:  # nobody asks for the rest
            x = x[:, -keep:]
        x = w.final_norm(x)
        if states is not None:
            states.append(x)
            x = x[:, -keep:] if keep else x
        return self.head(x)

    def head(self, x: Tensor) -> Tensor:
        """What the decoder ends with, [..., E] -> logits [..., V]."""
        scale = self.spec.head_scale
        return self.weights.head(x if scale == 1.0 else x * scale)

    # -- the sublayers -------------------------------------------------------------------------------------------------

    def _embed(self, tokens: Tensor, positions: Tensor, w: SideWeights) -> Tensor:
        """tokens [N, F] at positions [N or 1, F] -> x [N, F, E]."""
        x = F.embedding(tokens, w.embed)
        if self.spec.embed_scale != 1.0:
            x = x * self.spec.embed_scale
        if w.positions is not None:
            x = x + F.embedding(positions + (self.spec.learned or 0), w.positions)
        return w.embed_norm(x)

    def _attention(self, h: Tensor, w: Seq2SeqLayerWeights, layer: KeyValues | None, visible: Mask) -> Tensor:
        """h [N, F, E] -> what the text so far adds, [N, F, E]."""
        side = self.spec.decoder
        q, k, v = (_heads(part, side) for part in w.qkv(h))  # each [N, H, F, D]
        return w.o(attention(q, k, v, layer, visible, scaling=self.spec.scaling(side)))

    def _source(self, source: Tensor, w: CrossWeights, layer: GrowingLayer | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the source, [N or P, H, S, D] each: computed once, where there is a cache."""
        if layer is not None and layer.is_initialized:
            keys, values = layer.content()
            return keys, values
        keys, values = (_heads(part, self.spec.decoder) for part in w.kv(source))
        if layer is not None:
            layer.hold(keys, values)
        return keys, values

    def _look(self, h: Tensor, w: CrossWeights, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
        """h [N, F, E] -> what the source adds, [N, F, E]."""
        side = self.spec.decoder
        return w.o(cross_attention(_heads(w.q(h), side), keys, values, seen, scaling=self.spec.scaling(side)))

    def _mlp(self, h: Tensor, w: Seq2SeqLayerWeights) -> Tensor:
        """h [N, F, E] -> what the MLP adds, [N, F, E]."""
        if not self.spec.gated:
            return w.down(self.activation(w.up(h)[0]))
        gate, up = w.up(h)  # gated linear units (Shazeer 2020, arXiv:2002.05202)
        return w.down(self.activation(gate, times=up))


def _heads(x: Tensor, side: Side) -> Tensor:
    """[N, F, H·D] -> [N, H, F, D]."""
    return x.view(*x.shape[:2], side.heads, side.head_dim).transpose(1, 2)


# -- positions ---------------------------------------------------------------------------------------------------------


class Distances:
    """The bias of a head's scores for each distance of a key from its query. All layers have those of the first."""

    def __init__(self, table: Tensor, relative: Relative, *, both_ways: bool) -> None:
        far = self.farthest = relative.farthest
        distances = torch.arange(-far, far + 1, device=table.device)
        self.values = table[_buckets(distances, relative, both_ways)].t().contiguous()  # [H, 2 * farthest + 1]

    def bias(self, past: int, fed: int) -> Tensor:
        """Of `fed` queries, which come after `past` keys and are keys too: [1, H, F, past + F]."""
        keys = torch.arange(past + fed, device=self.values.device)
        distances = keys - keys[past:, None]  # [F, past + F]
        return self.values[:, distances.clamp(-self.farthest, self.farthest) + self.farthest][None]


def _distances(w: SideWeights, spec: Seq2SeqSpec, *, both_ways: bool) -> Distances | None:
    if spec.relative is None or w.relative is None:
        return None
    return Distances(w.relative, spec.relative, both_ways=both_ways)


def _buckets(distances: Tensor, relative: Relative, both_ways: bool) -> Tensor:
    """int64 [...], key - query -> bucket. A decoder needs those before a query only (Raffel et al. 2020, section 2.1).

    The operations are those of transformers' `_relative_position_bucket`, in the same order.
    """
    count = relative.buckets
    first = torch.zeros_like(distances)
    if both_ways:
        count //= 2
        first = (distances > 0).long() * count
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    exact = count // 2  # so many near distances have a bucket each
    share = torch.log(distances.clamp(min=1).float() / exact) / math.log(relative.farthest / exact)
    shared = (exact + (share * (count - exact)).long()).clamp(max=count - 1)
    return first + torch.where(distances < exact, distances, shared)


class RelativeMask(Mask):
    """What each fed token sees, as numbers that are added to its scores: a bias by distance, -inf for the others."""

    def __init__(self, past: int, fed: int, mask: Tensor | None, device: torch.device, distances: Distances) -> None:
        super().__init__(past, fed, mask, device)
        self.distances = distances

    def columns(self, count: int, window: int | None) -> dict[str, Any]:
        """With the bias of the newest `count` columns."""
        return {**super().columns(count, window), "bias": self.distances.bias(self.past, self.fed)[..., -count:]}

    def _make(self, columns: int, window: int | None) -> Tensor:
        """[N or 1, H, F, columns]."""
        bias = self.distances.bias(self.past, self.fed)
        seen = super()._make(columns, window)
        if seen is None and self.fed > 1:
            seen = torch.ones(self.fed, columns, dtype=torch.bool, device=self.device).tril(self.past)
        return bias if seen is None else bias.masked_fill(~seen, -math.inf)


def sinusoids(positions: int, features: int) -> Tensor:
    """f32 [positions, features]: sines in the first half, cosines in the second (Vaswani et al. 2017, section 3.5).

    Neighbouring features of the paper's table are half a table apart here, as transformers has it.
    """
    exponents = 2 * (torch.arange(features, dtype=torch.float64) // 2) / features
    angles = torch.arange(positions, dtype=torch.float64)[:, None] / 10000.0**exponents
    return torch.cat([angles[:, 0::2].sin(), angles[:, 1::2].cos()], -1).float()
