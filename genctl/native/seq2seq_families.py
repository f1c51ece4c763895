"""Encoder-decoder families: config.json -> the decoder's `Spec`, which contains the encoder's, and names.

Defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from genctl.native.config import Config, NotNative, whole_heads
from genctl.native.spec import Found, Names, Relative, Spec

# Fields of encoder-decoders that change nothing in a forward pass.
_HARMLESS = (
    "replacing_rate", "student_encoder_layers", "student_decoder_layers", "extra_pos_embeddings", "n_positions",
    "save_step", "scalable_attention",
)  # fmt: skip


FARTHEST = 1 << 16  # the largest `Relative.farthest` accepted: `Distances` holds a bias for every distance up to it


def t5(c: Config) -> Found:
    """T5 (Raffel et al. 2020, arXiv:1910.10683). Version 1.1 and Flan-T5 have a gate and do not scale the head."""
    return _t5(c, "t5", "relu", scaled_head=_scaled_head(c))


def mt5(c: Config) -> Found:
    """mT5 (Xue et al. 2021, arXiv:2010.11934): T5 1.1 for many languages."""
    c.take("tie_word_embeddings", None)
    return _t5(c, "mt5", "gated-gelu", scaled_head=False)


def umt5(c: Config) -> Found:
    """umT5 (Chung et al. 2023, arXiv:2304.09151): mT5 with a table of distances in each layer, and T5's head."""
    return _t5(c, "umt5", "gated-gelu", scaled_head=_scaled_head(c), every_layer=True)


def _scaled_head(c: Config) -> bool:
    """Whether the head is scaled. transformers derives the newer field from the older, and ties missing matrices."""
    tied = c.take("tie_word_embeddings", None)
    return c.flag("scale_decoder_outputs", tied is not False)


def _t5(c: Config, family: str, feed_forward: str, *, scaled_head: bool, every_layer: bool = False) -> Found:
    _of_both(c)
    hidden, heads = c.either("d_model", "hidden_size"), c.either("num_heads", "num_attention_heads")
    head_dim, layers = c.either("d_kv", "head_dim"), c.either("num_layers", "num_hidden_layers")
    decoder_layers = layers if c.take("num_decoder_layers", None) is None else c.size("num_decoder_layers")
    gated, activation = _feed_forward(c.take("feed_forward_proj", feed_forward))
    c.only("is_gated_act", gated)
    c.only("dense_act_fn", activation)
    buckets, farthest = c.size("relative_attention_num_buckets", 32), c.size("relative_attention_max_distance", 128)
    if buckets < 4 or buckets % 2 or not buckets // 2 < farthest <= FARTHEST:
        raise NotNative(f"config.json: {buckets} buckets for distances up to {farthest}")
    vocab, inner = c.size("vocab_size"), c.size("d_ff")
    encoder = Spec(
        family,
        vocab,
        hidden,
        layers,
        heads,
        heads,
        head_dim,
        inner,
        causal=False,
        eps=c.number("layer_norm_epsilon", 1e-6),
        relative=Relative(buckets, farthest, every_layer),
        activation=activation,
        gated=gated,
        windows=(None,) * layers,
    )
    scale = hidden**-0.5 if scaled_head else 1.0
    spec = _decoder(encoder, layers=decoder_layers, tied=True, head_scale=scale)
    attention = {part: f"layer.0.SelfAttention.{part}" for part in "qkvo"} | {"attn_norm": "layer.0.layer_norm"}
    cross = {f"cross_{part}": f"layer.1.EncDecAttention.{part}" for part in "qkvo"}
    names = Names(
        "decoder.",
        "embed_tokens",
        "block.{}.",
        attention | cross | {"cross_norm": "layer.1.layer_norm"} | _t5_mlp("layer.2", gated),
        "final_layer_norm",
        relative="block.{}.layer.0.SelfAttention.relative_attention_bias",
        shared="shared",
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    )
    return spec, replace(names, encoder=replace(names, prefix="encoder.", parts=attention | _t5_mlp("layer.1", gated)))


def _feed_forward(kind: Any) -> tuple[bool, str]:
    """Whether there is a gate, and the activation: "relu", "gated-silu", …"""
    if not isinstance(kind, str) or kind.count("-") > 1 or ("-" in kind and not kind.startswith("gated-")):
        raise NotNative(f"config.json: feed_forward_proj = {kind!r:.40}")
    if kind == "gated-gelu":  # an older name for a gate with "gelu_new"
        return True, "gelu_new"
    return "-" in kind, kind.removeprefix("gated-")


def _t5_mlp(layer: str, gated: bool) -> dict[str, str]:
    first = {"gate": "wi_0", "up": "wi_1"} if gated else {"up": "wi"}
    parts = {part: f"{layer}.DenseReluDense.{theirs}" for part, theirs in {**first, "down": "wo"}.items()}
    return parts | {"mlp_norm": f"{layer}.layer_norm"}


def bart(c: Config) -> Found:
    """BART (Lewis et al. 2020, arXiv:1910.13461): the original transformer (2017) with learned positions."""
    return _bart(c, "bart", norm_first=False, embed_norm=True, learned=2)


def mbart(c: Config) -> Found:
    """mBART (Liu et al. 2020, arXiv:2001.08210): BART with its norms moved to the front."""
    return _bart(c, "mbart", norm_first=True, embed_norm=True, learned=2)


def marian(c: Config) -> Found:
    """Marian (Junczys-Dowmunt et al. 2018, arXiv:1804.00344): translation, with sinusoidal positions."""
    return _bart(c, "marian", norm_first=False, embed_norm=False, learned=None)


def pegasus(c: Config) -> Found:
    """Pegasus (Zhang et al. 2020, arXiv:1912.08777): summarisation, with sinusoidal positions."""
    return _bart(c, "pegasus", norm_first=True, embed_norm=False, learned=None)


def m2m_100(c: Config) -> Found:
    """M2M-100 and NLLB-200 (Fan et al. 2020, arXiv:2010.11125; NLLB Team 2022, arXiv:2207.04672): many languages."""
    padding = c.take("pad_token_id", 1)
    if type(padding) is not int or not 0 <= padding < c.size("vocab_size"):
        raise NotNative(f"config.json: pad_token_id = {padding!r:.40}")
    c.take("static_position_embeddings", None)  # not read: positions are always computed
    c.values = {
        **{"scale_embedding": True, "activation_function": "relu"},
        **c.values,
        "static_position_embeddings": True,
    }
    spec, names = _bart(c, "m2m_100", norm_first=True, embed_norm=False, learned=None)
    if spec.hidden < 4 or spec.hidden % 2:
        raise NotNative(f"config.json: d_model = {spec.hidden}, which has no table of sines")
    assert spec.encoder is not None
    positions: dict[str, Any] = {"sinusoidal": "fairseq", "padding": padding}
    encoder = replace(spec.encoder, **positions)
    names = replace(names, logits_bias=(), ignored=(*names.ignored, "embed_positions.weights"))
    return replace(spec, encoder=encoder, **positions), names


def _bart(c: Config, family: str, *, norm_first: bool, embed_norm: bool, learned: int | None) -> Found:
    _of_both(c)
    # transformers no longer reads these: the family determines them
    c.only("normalize_before", norm_first)
    c.only("add_final_layer_norm", norm_first)
    c.only("normalize_embedding", embed_norm)
    c.only("static_position_embeddings", learned is None)
    c.only("add_bias_logits", False)
    hidden, vocab = c.either("d_model", "hidden_size"), c.size("vocab_size")
    shared = c.flag("share_encoder_decoder_embeddings", True) if family == "marian" else True
    own = family == "marian" and c.take("decoder_vocab_size", None) is not None
    target = c.size("decoder_vocab_size") if own else vocab
    if shared and target != vocab:
        raise NotNative(f"config.json: one matrix for vocabularies of {vocab} and {target}")
    # transformers uses these names for the encoder
    layers, heads = (
        c.either("encoder_layers", "num_hidden_layers"),
        c.either("encoder_attention_heads", "num_attention_heads"),
    )
    decoder_heads = c.size("decoder_attention_heads")
    whole_heads(hidden, heads)
    whole_heads(hidden, decoder_heads)
    encoder = Spec(
        family,
        vocab,
        hidden,
        layers,
        heads,
        heads,
        hidden // heads,
        c.size("encoder_ffn_dim"),
        c.size("max_position_embeddings"),
        causal=False,
        norm="layer",
        norm_bias=True,
        eps=1e-5,
        learned=learned,
        sinusoidal="marian" if learned is None else "",
        scaling=(hidden // heads) ** -0.5,
        qkv_bias=True,
        o_bias=True,
        windows=(None,) * layers,
        activation=c.take("activation_function", "gelu"),
        gated=False,
        mlp_bias=True,
        embed_scale=math.sqrt(hidden) if c.flag("scale_embedding", False) else 1.0,
        embed_norm=embed_norm,
        final_norm=norm_first,
    )
    spec = _decoder(
        encoder,
        vocab=target,
        layers=c.size("decoder_layers"),
        heads=decoder_heads,
        kv_heads=decoder_heads,
        head_dim=hidden // decoder_heads,
        scaling=(hidden // decoder_heads) ** -0.5,
        inner=c.size("decoder_ffn_dim"),
        shared=shared,
        tied=c.flag("tie_word_embeddings", True),
    )
    where = "norm" if norm_first else "sum_norm"
    attention = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    parts = {part: f"self_attn.{theirs}" for part, theirs in attention.items()}
    parts |= {f"attn_{where}": "self_attn_layer_norm", f"mlp_{where}": "final_layer_norm", "up": "fc1", "down": "fc2"}
    cross = {f"cross_{part}": f"encoder_attn.{theirs}" for part, theirs in attention.items()}
    names = Names(
        "model.decoder.",
        "embed_tokens",
        "layers.{}.",
        parts | cross | {f"cross_{where}": "encoder_attn_layer_norm"},
        "layer_norm",
        logits_bias=("model.final_logits_bias", "final_logits_bias"),
        positions="embed_positions",
        embed_norm="layernorm_embedding",
        shared="model.shared",
        ignored=("encoder.version", "decoder.version"),
    )
    return spec, replace(names, encoder=replace(names, prefix="model.encoder.", parts=parts))


def _decoder(encoder: Spec, *, layers: int, **more: Any) -> Spec:
    """The decoder's spec: the encoder's with these fields changed."""
    return replace(encoder, causal=True, encoder=encoder, layers=layers, windows=(None,) * layers, **more)


def _of_both(c: Config) -> None:
    c.only("is_encoder_decoder", True)
    c.only("is_decoder", False)
    for name in _HARMLESS:
        c.take(name, None)
