"""The forward pass of a decoder: tokens in, logits out. The families differ by a `Spec`, and this is what it means.

    x = embedding of each token (+ its position)
    for each layer:
        x = x + attention(norm(x))       tokens look at those before them
        x = x + MLP(norm(x))             each token for itself
    logits = head(norm(x))

That is GPT-2 (Radford et al. 2019), which took Vaswani et al. 2017 (arXiv:1706.03762) and moved the norms to the front.
Everything since is a variation of one of these lines; each is a branch on one field of the spec below.

N rows, F tokens fed to each, E features of the residual stream, H heads of queries, K heads of keys and values,
D features of a head, I features of the MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from genctl.decode.cache.layer import KeyValues
from genctl.decode.cache.static import Slots
from genctl.native.attention import Mask, SlotMask, alibi, alibi_slopes, attention
from genctl.native.linear import Joined, Linear
from genctl.native.products import ops
from genctl.native.rope import Rotary
from genctl.native.spec import Spec

Map = Callable[[Tensor], Tensor]  # a norm or a matrix: [..., in] -> [..., out]


def same(x: Tensor) -> Tensor:
    """What stands where a family has no norm."""
    return x


@dataclass
class LayerWeights:
    """One layer. A norm that the family does not have is `same`; a matrix that it does not have is None."""

    qkv: Joined  # E -> H·D, K·D, K·D; of a `grouped` matrix all in one
    o: Linear  # H·D -> E
    up: Joined  # E -> I, with a gate E -> I and I
    down: Linear  # I -> E
    q_norm: Map = same
    k_norm: Map = same
    attn_norm: Map = same  # of what attention reads
    attn_out_norm: Map = same  # of what it adds
    attn_sum_norm: Map = same  # of the sum
    mlp_norm: Map | None = None  # None: the MLP reads what attention reads (with `parallel`)
    mlp_out_norm: Map = same
    mlp_sum_norm: Map = same


@dataclass
class DecoderWeights:
    """A decoder's tensors, as they lie in its file."""

    embed: Tensor  # [V, E]
    layers: list[LayerWeights]
    head: Linear  # E -> V
    final_norm: Map = same
    positions: Tensor | None = None  # [T, E]
    embed_norm: Map = same
    project_in: Map = same
    project_out: Map = same


@dataclass
class Pass:
    """What all layers of one pass share."""

    visible: Mask
    angles: tuple[Tensor, Tensor] | None = None  # cosines and sines, each [N, 1, F, r]
    local_angles: tuple[Tensor, Tensor] | None = None  # of layers with a window
    bias: Tensor | None = None  # of the scores, [N or 1, H, 1, T]


class Decoder:
    """A decoder with its weights."""

    def __init__(self, spec: Spec, weights: DecoderWeights) -> None:
        self.spec, self.weights = spec, weights
        device = weights.embed.device
        self.dtype, self.device = weights.embed.dtype, device
        self.activation = ACTIVATIONS[spec.activation]
        self.rotary = None if spec.rope is None else Rotary(spec.rope, device)
        self.local_rotary = self.rotary if spec.local_rope is None else Rotary(spec.local_rope, device)
        self.slopes = alibi_slopes(spec.heads).to(device) if spec.alibi else None
        self.embed_scale = torch.tensor(spec.embed_scale, device=device).to(self.dtype)

    # -- the pass ------------------------------------------------------------------------------------------------------

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
        visible: Mask | None = None,
    ) -> Tensor:
        """tokens int64 [N, F] at positions int64 [N or 1, F] -> logits [N, F, V], of the last `keep` tokens if not 0.

        `layers` is a cache with `past` columns, to which keys and values are added. mask [N, past + F] is 0 where a row
        has padding. `states` is given what each layer reads, and last what the head reads, each [N, F, E].
        `visible` says what is seen where `mask` does not.
        """
        spec, weights = self.spec, self.weights
        shared = self._shared(tokens, positions, mask, past, visible)
        x = self._embed(tokens, positions)
        for number, layer in enumerate(weights.layers):
            if states is not None:
                states.append(x)
            x = self._layer(x, layer, shared, number, None if layers is None else layers[number])
        if keep and states is None:  # nobody asks for the rest
            x = x[:, -keep:]
        x = weights.project_out(weights.final_norm(x))
        if states is not None:
            states.append(x)
            x = x[:, -keep:] if keep else x
        logits = weights.head(x) / spec.logits_scale if spec.logits_scale != 1.0 else weights.head(x)
        if spec.final_softcap is not None:  # Gemma 2
            logits = TANH(logits / spec.final_softcap) * spec.final_softcap
        return logits

    def step(
        self, tokens: Tensor, positions: Tensor, place: Tensor, slots: Tensor, buffers: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """One token of each row, on tensors whose shapes and addresses may stay from step to step (see `graphs`).

        tokens and positions int64 [N, 1]; of each layer keys and values [N, K, C, D], to which column `place` int64 [1]
        is written; slots bool [N, 1, 1, C] says which columns count, the new one included -> logits [N, 1, V].
        """
        layers = [Slots(keys, values, place) for keys, values in buffers]
        return self(tokens, positions, layers, past=slots.shape[-1] - 1, visible=SlotMask(slots))

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[N, F] -> x [N, F, E]."""
        spec, weights = self.spec, self.weights
        x = weights.project_in(F.embedding(tokens, weights.embed))
        if spec.embed_scale != 1.0:
            x = x * self.embed_scale
        if weights.positions is not None and spec.learned is not None:
            x = x + F.embedding(positions + spec.learned, weights.positions)
        return weights.embed_norm(x)

    def _shared(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, past: int, visible: Mask | None) -> Pass:
        fed = tokens.shape[1]
        shared = Pass(visible or Mask(past, fed, mask, self.device))
        if self.rotary is not None:
            shared.angles = self._angles(self.rotary, positions, past)
            shared.local_angles = shared.angles
        if self.local_rotary is not None and self.local_rotary is not self.rotary:
            shared.local_angles = self._angles(self.local_rotary, positions, past)
        if self.slopes is not None:
            keys = torch.arange(past + fed, device=self.device)[None] if mask is None else (mask.cumsum(-1) - 1) * mask
            if self.spec.alibi == "falcon":  # rounded as in its training, and scaled with the scores
                shared.bias = alibi(self.slopes.bfloat16(), keys).float() * self.spec.scaling
            else:
                shared.bias = alibi(self.slopes, keys)
        return shared

    def _angles(self, rotary: Rotary, positions: Tensor, past: int) -> tuple[Tensor, Tensor]:
        cos, sin = rotary.angles(positions, first=past == 0)
        return cos.to(self.dtype), sin.to(self.dtype)

    def _layer(self, x: Tensor, w: LayerWeights, shared: Pass, number: int, cache: KeyValues | None) -> Tensor:
        """x [N, F, E] -> [N, F, E]. `cache` is the layer's keys and values, or None."""
        spec = self.spec
        h = w.attn_norm(x)
        a = w.attn_out_norm(self._attention(h, w, shared, number, cache))
        if spec.parallel:  # GPT-J: both sublayers at once, which two devices could share
            m = self._mlp(h if w.mlp_norm is None else w.mlp_norm(x), w)
            return x + a + m
        if spec.residual_scale != 1.0:
            a = a * spec.residual_scale
        x = w.attn_sum_norm(x + a)
        m = w.mlp_out_norm(self._mlp(x if w.mlp_norm is None else w.mlp_norm(x), w))
        if spec.residual_scale != 1.0:
            m = m * spec.residual_scale
        return w.mlp_sum_norm(x + m)

    # -- the sublayers -------------------------------------------------------------------------------------------------

    def _attention(self, h: Tensor, w: LayerWeights, shared: Pass, number: int, cache: KeyValues | None) -> Tensor:
        """h [N, F, E] -> what attention adds, [N, F, E]."""
        spec = self.spec
        q, k, v = self._queries_keys_values(h, w)  # [N, H, F, D], [N, K, F, D] twice
        window = spec.windows[number]
        angles = shared.angles if window is None else shared.local_angles
        rotary = self.rotary if window is None else self.local_rotary
        if rotary is not None and angles is not None:
            q, k = rotary.turn(q, *angles), rotary.turn(k, *angles)
        mixed = attention(
            q,
            k,
            v,
            cache,
            shared.visible,
            scaling=spec.scaling / (number + 1) if spec.scaling_by_layer else spec.scaling,
            window=window,
            softcap=spec.softcap,
            bias=shared.bias,
        )  # [N, F, H·D]
        return w.o(mixed)

    def _queries_keys_values(self, h: Tensor, w: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
        """h [N, F, E] -> q [N, H, F, D], k and v [N, K, F, D]."""
        spec = self.spec
        heads, kv_heads, size = spec.heads, spec.kv_heads, spec.head_dim
        rows, fed, _ = h.shape
        if (
            spec.qkv == "grouped"
        ):  # the queries that share a head, then its keys and values; K = H: q, k, v of each head
            together = w.qkv(h)[0].view(rows, fed, kv_heads, heads // kv_heads + 2, size)
            q, k, v = torch.split(together, [heads // kv_heads, 1, 1], 3)
        else:
            q, k, v = w.qkv(h)
        if spec.clip_qkv is not None:  # OLMo
            q, k, v = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
        if spec.qk_norm == "whole":  # OLMo 2
            q, k = w.q_norm(q), w.k_norm(k)
        q, k, v = (
            q.reshape(rows, fed, heads, size),
            k.reshape(rows, fed, kv_heads, size),
            v.reshape(rows, fed, -1, size),
        )
        if spec.qk_norm in ("head", "each"):  # Qwen3, Gemma 3 (after Dehghani et al. 2023, arXiv:2302.05442)
            q, k = w.q_norm(q), w.k_norm(k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _mlp(self, h: Tensor, w: LayerWeights) -> Tensor:
        """h [N, F, E] -> what the MLP adds, [N, F, E]."""
        if not self.spec.gated:
            return w.down(self.activation(w.up(h)[0]))
        gate, up = w.up(h)  # gated linear units (Shazeer 2020, arXiv:2002.05202)
        return w.down(self.activation(gate, times=up))


# -- norms and activations ---------------------------------------------------------------------------------------------


class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, weight: Tensor, eps: float, *, from_one: bool = False) -> None:
        self.weight = weight.float() + 1 if from_one else weight  # Gemma stores the distance from 1
        self.eps = torch.tensor(eps, device=weight.device)
        self.number = eps
        self.late = from_one  # Gemma rounds to the weights' type after the product, the others before

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


class Activation:
    """A function of each number: by the compiled library, or by torch."""

    def __init__(self, name: str, plain: Map) -> None:
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
    "quick_gelu": Activation("quick_gelu", lambda x: x * torch.sigmoid(1.702 * x)),
}
