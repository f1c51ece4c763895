"""The forward pass of a decoder: tokens in, logits out. A family is a `Spec`; this file implements its fields.

    x = embedding of each token (+ its position)
    for each layer:
        x = x + attention(norm(x))           each token attends to those before it
        x = x + attention(norm(x), source)   and to a source, if there is an encoder
        x = x + MLP(norm(x))                 each token on its own
    logits = head(norm(x))

Without the source line this is GPT-2 (Radford et al. 2019): Vaswani et al. 2017 (arXiv:1706.03762) with the norms moved
to the front. Later families vary one of these lines; each variation is a branch on one field of the spec below. An
encoder is a stack of the same layers: its tokens attend to all others, and it has no source and no head.

N rows, F tokens fed to each, E features of the residual stream, H heads of queries, K heads of keys and values,
D features of a head, V vocabulary; S tokens of a source, P sources (N / P consecutive rows share one).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.cache.layer import KeyValues
from genctl.native.attention import Mask, SlotMask, attention, cross_attention
from genctl.native.linear import Joined, Linear
from genctl.native.mlp import MLP, TANH, Mixture, Norm, same
from genctl.native.positions import Distances, RelativeSlotMask, Rotary, alibi, alibi_slopes, mpt_slopes
from genctl.native.spec import Spec

if TYPE_CHECKING:
    from genctl.native.blocks import Embeddings
Part = TypeVar("Part")


@dataclass
class CrossWeights:
    """The cross-attention of a layer."""

    q: Linear  # E -> H·D
    kv: Joined  # E -> H·D twice
    o: Linear  # H·D -> E
    norm: Norm = same
    sum_norm: Norm = same


@dataclass
class LayerWeights:
    """One layer. A norm that the family does not have is `same`."""

    qkv: Joined  # E -> H·D, K·D, K·D; one output for `grouped` and `blocks`
    o: Linear  # H·D -> E
    mlp: MLP | Mixture
    q_norm: Norm = same
    k_norm: Norm = same
    attn_norm: Norm = same  # on the input of attention
    attn_out_norm: Norm = same  # on its output
    attn_sum_norm: Norm = same  # on the sum
    mlp_norm: Norm | None = None  # None: the MLP reads what attention reads (with `parallel`), or x
    mlp_out_norm: Norm = same
    mlp_sum_norm: Norm = same
    cross: CrossWeights | None = None
    sinks: Tensor | None = None  # [H]


@dataclass
class StackWeights:
    """The weights of a stack."""

    embed: Tensor | Embeddings  # [V, E]
    layers: list[LayerWeights]
    final_norm: Norm = same
    positions: Tensor | None = None  # [T, E]
    relative: Sequence[Tensor] = ()  # [buckets, H], one for all layers or one for each
    embed_norm: Norm = same
    project_in: Callable[[Tensor], Tensor] = same
    project_out: Callable[[Tensor], Tensor] = same


@dataclass
class PassFacts:
    """What all layers of one pass share."""

    visible: Sequence[Mask]  # one for all layers or one for each
    angles: tuple[Tensor, Tensor] | None = None  # cosines and sines, each [N, 1, F, r]
    local_angles: tuple[Tensor, Tensor] | None = None  # of layers with a window
    biases: Sequence[Tensor | None] = (None,)  # on scores, [N or 1, H, 1 or F, T]; for all layers or each
    source: Tensor | None = None  # the encoder's output, [N or P, S, E]
    source_mask: Tensor | None = None  # bool [N, 1, 1, S]


class Stack:
    """A stack of layers with its weights: tokens in, states out."""

    def __init__(self, spec: Spec, weights: StackWeights) -> None:
        self.spec, self.weights = spec, weights
        device = weights.embed.device
        self.dtype, self.device = weights.embed.dtype, device
        self.rotary = None if spec.rope is None else Rotary(spec.rope, device)
        self.local_rotary = self.rotary if spec.local_rope is None else Rotary(spec.local_rope, device)
        self.slopes: Tensor | None = None
        if spec.alibi:
            slopes = mpt_slopes if spec.alibi == "mpt" else alibi_slopes
            self.slopes = slopes(spec.heads).to(device)
        self.distances: list[Distances] = []
        if spec.relative is not None:
            self.distances = [Distances(table, spec.relative, causal=spec.causal) for table in weights.relative]
        scale = torch.tensor(spec.embed_scale)
        self.embed_scale = float(scale.to(self.dtype)) if spec.embed_scale_rounded else spec.embed_scale
        self.scalings = [spec.scaling / (number + 1 if spec.scaling_by_layer else 1) for number in range(spec.layers)]

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [N, F] at positions [N or 1, F] -> x [N, F, E]."""
        spec, weights = self.spec, self.weights
        table = weights.embed
        x = weights.project_in(F.embedding(tokens, table) if isinstance(table, Tensor) else table.rows(tokens))
        if spec.embed_scale != 1.0:
            x = x * self.embed_scale
        if weights.positions is not None and spec.padding is not None:  # M2M-100: padding gets the zero row
            places = torch.where(tokens == spec.padding, spec.padding, positions + spec.padding + 1)
            x = x + F.embedding(places, weights.positions)
        elif weights.positions is not None:
            x = x + F.embedding(positions + (spec.learned or 0), weights.positions)
        return weights.embed_norm(x)

    def layer(
        self, x: Tensor, number: int, shared: PassFacts, cache: KeyValues | None, cross: GrowingLayer | None
    ) -> Tensor:
        """x [N, F, E] -> [N, F, E]. `cache` holds the keys and values of the layer, `cross` those of the source."""
        spec, w = self.spec, self.weights.layers[number]
        h = w.attn_norm(x)
        a = w.attn_out_norm(self._attention(h, w, shared, number, cache))
        if spec.parallel:  # GPT-J: both sublayers read the same x
            m = w.mlp(h if w.mlp_norm is None else w.mlp_norm(x))
            return self.sum(self.sum(x, a), m)
        x = w.attn_sum_norm(self.sum(x, a, spec.residual_scale))
        if w.cross is not None:
            q = self._heads(w.cross.q(w.cross.norm(x)))
            c = w.cross.o(self.attend_source(q, w.cross, shared, cross))
            x = w.cross.sum_norm(self.sum(x, c))
        m = w.mlp_out_norm(w.mlp(x if w.mlp_norm is None else w.mlp_norm(x)))
        return w.mlp_sum_norm(self.sum(x, m, spec.residual_scale))

    def end(self, x: Tensor) -> Tensor:
        """Output of the last layer [N, F, E] -> input of the head."""
        return self.weights.project_out(self.weights.final_norm(x))

    # -- the sublayers -------------------------------------------------------------------------------------------------

    def _attention(self, h: Tensor, w: LayerWeights, shared: PassFacts, number: int, cache: KeyValues | None) -> Tensor:
        """h [N, F, E] -> the output of attention, [N, F, E]."""
        spec = self.spec
        q, k, v = self._queries_keys_values(h, w)  # [N, H, F, D], [N, K, F, D] twice
        rotary = self.rotary if spec.windows[number] is None else self.local_rotary
        if rotary is not None and number not in spec.no_rope_layers:
            q, k = self.turn(q, k, rotary, shared)
        return w.o(self.attend(q, k, v, w, shared, number, cache))

    def _queries_keys_values(self, h: Tensor, w: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
        """h [N, F, E] -> q [N, H, F, D], k and v [N, K, F, D]."""
        spec = self.spec
        heads, kv_heads, size = spec.heads, spec.kv_heads, spec.head_dim
        rows, fed, _ = h.shape
        if spec.qkv == "grouped":  # per group: its queries, then its key and value head; K = H: q, k, v per head
            together = w.qkv(h)[0].view(rows, fed, kv_heads, heads // kv_heads + 2, size)
            q, k, v = torch.split(together, [heads // kv_heads, 1, 1], 3)
        elif spec.qkv == "blocks":
            q, v, k = w.qkv(h)[0].view(rows, fed, 4, 3, -1).unbind(3)
        else:
            q, k, v = w.qkv(h)
        if spec.clip_qkv is not None:  # OLMo
            q, k, v = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
        if spec.qk_norm == "whole":  # OLMo 2
            q, k = w.q_norm(q), w.k_norm(k)
        q = q.reshape(rows, fed, heads, size)
        k, v = k.reshape(rows, fed, kv_heads, size), v.reshape(rows, fed, kv_heads, size)
        if spec.qk_norm in ("head", "each"):  # Qwen3, Gemma 3 (after Dehghani et al. 2023, arXiv:2302.05442)
            q, k = w.q_norm(q), w.k_norm(k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _source(self, shared: PassFacts, w: CrossWeights, layer: GrowingLayer | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the source, [N or P, H, S, D] each; with a cache they are computed once."""
        if layer is not None and layer.is_initialized:
            keys, values = layer.content()
            return keys, values
        assert shared.source is not None
        keys, values = (self._heads(part) for part in w.kv(shared.source))
        if layer is not None:
            layer.hold(keys, values)
        return keys, values

    def _heads(self, x: Tensor) -> Tensor:
        """[N, F, H·D] -> [N, H, F, D]."""
        return x.view(*x.shape[:2], self.spec.heads, self.spec.head_dim).transpose(1, 2)

    # -- the operations without weights: here they compute, in `steps` they record calls -------------------------------

    def sum(self, x: Tensor | None, added: Tensor, factor: float = 1.0) -> Tensor:
        """x + added · factor, each [N, F, E]; without x only added · factor. The caller reads neither again."""
        added = added if factor == 1.0 else added * factor
        return added if x is None else x + added

    def turn(self, q: Tensor, k: Tensor, rotary: Rotary, shared: PassFacts) -> tuple[Tensor, Tensor]:
        """Queries [N, H, F, D] and keys [N, K, F, D], rotated by their positions."""
        angles = shared.angles if rotary is self.rotary else shared.local_angles
        assert angles is not None
        return rotary.turn(q, *angles), rotary.turn(k, *angles)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: LayerWeights, shared: PassFacts, number: int, cache: KeyValues | None
    ) -> Tensor:
        """Append keys and values [N, K, F, D] to the cache, and attend to it with queries [N, H, F, D]: [N, F, H·D]."""
        spec, scaling, bias = self.spec, self.scalings[number], of_layer(shared.biases, number)
        if not spec.causal:
            return cross_attention(q, k, v, bias, scaling=scaling)
        visible, window = of_layer(shared.visible, number), spec.windows[number]
        return attention(
            q, k, v, cache, visible, scaling=scaling, window=window, softcap=spec.softcap, bias=bias, sinks=w.sinks
        )

    def attend_source(self, q: Tensor, w: CrossWeights, shared: PassFacts, layer: GrowingLayer | None) -> Tensor:
        """Attend to the source with queries [N, H, F, D]: [N, F, H·D]."""
        keys, values = self._source(shared, w, layer)
        return cross_attention(q, keys, values, shared.source_mask, scaling=self.spec.scaling)


class Encoder(Stack):
    """A stack that reads a source. Each token attends to all others."""

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Sources without padding: int64 [P, S] -> states [P, S, E]."""
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)[None]
        if self.spec.padding is not None:  # M2M-100: padding tokens inside a source take no position
            positions = positions - (tokens == self.spec.padding).cumsum(-1)
        x = self.embed(tokens, positions)
        shared = PassFacts([Mask(0, length, None, self.device)])
        if self.distances:
            shared.biases = [distances.bias(0, length) for distances in self.distances]  # each [1, H, S, S]
        for number in range(self.spec.layers):
            x = self.layer(x, number, shared, None, None)
        return self.weights.final_norm(x)


class Decoder(Stack):
    """A stack with a head that turns its states into logits."""

    def __init__(self, spec: Spec, weights: StackWeights, output: Linear) -> None:
        super().__init__(spec, weights)
        self.output = output  # E -> V

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        layers: Sequence[KeyValues] | None = None,
        *,
        mask: Tensor | None = None,
        past: int = 0,
        keep: int = 0,
        states: list[Tensor] | None = None,
        visible: Sequence[Mask] | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        cross: Sequence[GrowingLayer] | None = None,
    ) -> Tensor:
        """tokens int64 [N, F] at positions int64 [N or 1, F] -> logits [N, F, V], of the last `keep` tokens if not 0.

        `layers` is a cache with `past` columns; keys and values are appended to it. mask [N, past + F] is 0 at padding.
        `states` receives the input of each layer and then that of the head, each [N, F, E].
        `visible` replaces the masks derived from `mask`: one for all layers or one for each.

        With an encoder: `cross` caches keys and values of the source. If empty, it is filled from `source`
        [N or P, S, E], which is otherwise not read. source_mask [N, S] is 0 where a source has padding.
        """
        shared = self.shared(tokens.shape[1], positions, mask, past, visible)
        shared.source = source
        shared.source_mask = None if source_mask is None else source_mask.bool()[:, None, None]
        x = self.embed(tokens, positions)
        for number in range(self.spec.layers):
            if states is not None:
                states.append(x)
            cache = None if layers is None else layers[number]
            x = self.layer(x, number, shared, cache, None if cross is None else cross[number])
        if keep and states is None:  # the rest is not needed
            x = x[:, -keep:]
        x = self.end(x)
        if states is not None:
            states.append(x)
            x = x[:, -keep:] if keep else x
        return self.scaled(self.head(x))

    def head(self, x: Tensor) -> Tensor:
        """The stack's output [..., E] -> logits [..., V], before scaling and soft cap."""
        scale = self.spec.head_scale
        return self.output(x if scale == 1.0 else self.sum(None, x, scale))

    def scaled(self, logits: Tensor) -> Tensor:
        """The head's output [..., V] -> logits [..., V]."""
        if self.spec.logits_scale != 1.0:
            logits = logits / self.spec.logits_scale
        if self.spec.final_softcap is not None:  # Gemma 2
            logits = TANH(logits / self.spec.final_softcap) * self.spec.final_softcap
        return logits

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        places: Mapping[int | None, Tensor],
        slots: Mapping[int | None, Tensor],
        buffers: Sequence[tuple[Tensor, Tensor]],
        *,
        cross: Sequence[GrowingLayer] | None = None,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """One token of each row, on tensors whose shapes and addresses can stay the same between steps (see `graphs`).

        tokens and positions int64 [N, 1]; `buffers`: keys and values [N, K, C, D] of each layer. For each window size:
        `places` int64 [1] is the column that a layer writes; `slots` bool [N, 1, 1, C] marks the valid columns, the
        new one included. `cross` and `source_mask` as in `__call__`. Returns logits [N, 1, V].
        """
        from genctl.decode.cache.forms import Slots

        windows = self.spec.windows
        layers = [Slots(*pair, places[window]) for pair, window in zip(buffers, windows, strict=True)]
        visible: list[Mask] = [SlotMask(slots)]
        if self.distances:
            visible = [RelativeSlotMask(slots, places, distances) for distances in self.distances]
        any_slots = next(iter(slots.values()))
        mask = any_slots[:, 0, 0].long() if self.spec.alibi else None
        past = any_slots.shape[-1] - 1
        given: dict[str, Any] = {"visible": visible, "cross": cross, "source_mask": source_mask}
        return self(tokens, positions, layers, mask=mask, past=past, **given)

    def shared(
        self, fed: int, positions: Tensor, mask: Tensor | None, past: int, visible: Sequence[Mask] | None = None
    ) -> PassFacts:
        """Masks, angles and biases that all layers of a pass over F tokens share (see `__call__`)."""
        if visible is None:
            visible = [distances.mask(past, fed, mask, self.device) for distances in self.distances]
        angles = local_angles = None
        if self.rotary is not None:
            angles = local_angles = self._angles(self.rotary, positions, past)
        if self.local_rotary is not None and self.local_rotary is not self.rotary:
            local_angles = self._angles(self.local_rotary, positions, past)
        shared = PassFacts(visible or [Mask(past, fed, mask, self.device)], angles, local_angles)
        if self.slopes is not None:
            keys = torch.arange(past + fed, device=self.device)[None] if mask is None else (mask.cumsum(-1) - 1) * mask
            if self.spec.alibi == "falcon":  # rounded as in training, and scaled like the scores
                shared.biases = [alibi(self.slopes.bfloat16(), keys).float() * self.spec.scaling]
            else:
                shared.biases = [alibi(self.slopes, keys)]
        return shared

    def _angles(self, rotary: Rotary, positions: Tensor, past: int) -> tuple[Tensor, Tensor]:
        cos, sin = rotary.angles(positions, first=past == 0)
        return cos.to(self.dtype), sin.to(self.dtype)


def of_layer(parts: Sequence[Part], number: int) -> Part:
    """The part for a layer; `parts` has one for all layers, or one for each."""
    return parts[number if len(parts) > 1 else 0]
