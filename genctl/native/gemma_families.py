"""Gemma: norms whose weights are stored as distances from 1, scaled embeddings; later windows, caps and two ropes.

One function for each: config.json -> `Spec` and names. Defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

from typing import Any

from genctl.native.config import Config, NotNative
from genctl.native.llama_families import QK_NORM, biases, llama_names, plain, sizes_of
from genctl.native.spec import Found, Spec


def gemma(c: Config) -> Found:
    """Gemma (Gemma Team 2024, arXiv:2403.08295)."""
    sizes = sizes_of(c, head_dim=256)
    c.size("num_key_value_heads")
    act = c.take("hidden_act", "gelu_pytorch_tanh")
    c.take("hidden_activation", None)  # not read: "gelu" here always meant its approximation by tanh
    spec = plain(
        c,
        "gemma",
        sizes,
        tied=True,
        activation="gelu_pytorch_tanh" if act == "gelu" else act,
        **biases(c),
        weight_plus_one=True,
        embed_scale=sizes["hidden"] ** 0.5,
        embed_scale_rounded=True,
    )
    return spec, llama_names()


_SANDWICH = {  # a norm before and after each sublayer
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def gemma2(c: Config) -> Found:
    """Gemma 2 (Gemma Team 2024, arXiv:2408.00118): every other layer has a window; scores and logits have soft caps."""
    sizes = sizes_of(c, head_dim=256)
    c.size("num_key_value_heads")
    sizes["windows"] = c.windows(sizes["layers"], c.window(4096), lambda number: number % 2 == 0)
    c.take("sliding_window_size", None)  # an older name, which is not read
    spec = _gemma(c, "gemma2", sizes, rope=c.rope(sizes["head_dim"]), softcap=50.0, final=30.0)
    return spec, llama_names(**_SANDWICH)


def gemma3_text(c: Config) -> Found:
    """Gemma 3 (Gemma Team 2025, arXiv:2503.19786): five layers with a window to one without; two sets of angles."""
    sizes = sizes_of(c, head_dim=256)
    c.size("num_key_value_heads")
    pattern = c.take("sliding_window_pattern", 6)
    c.take("_sliding_window_pattern", None)  # written, but not read
    if type(pattern) is not int or pattern < 1:
        raise NotNative(f"config.json: sliding_window_pattern = {pattern!r:.40}")
    sizes["windows"] = c.windows(sizes["layers"], c.window(4096), lambda number: (number + 1) % pattern != 0)
    theta, local_theta = c.number("rope_theta", 1e6), c.number("rope_local_base_freq", 1e4)
    rope, local = c.ropes(sizes["head_dim"], theta=theta, local_theta=local_theta)
    c.take("attn_logit_softcapping", None)  # not read: queries and keys are normalised instead
    spec = _gemma(c, "gemma3_text", sizes, rope=rope, local_rope=local, final=None, qk_norm="head")
    return spec, llama_names(**_SANDWICH, **QK_NORM)


def _gemma(c: Config, family: str, sizes: dict[str, Any], *, final: float | None, **more: Any) -> Spec:
    """What Gemma 2 and 3 have in common."""
    c.take("hidden_act", None)  # not read
    if "softcap" in more:
        more["softcap"] = c.optional("attn_logit_softcapping", more["softcap"])
    return plain(
        c,
        family,
        sizes,
        tied=True,
        activation=c.take("hidden_activation", "gelu_pytorch_tanh"),
        **biases(c),
        weight_plus_one=True,
        embed_scale=sizes["hidden"] ** 0.5,
        embed_scale_rounded=True,
        scaling=c.number("query_pre_attn_scalar", 256) ** -0.5,
        final_softcap=c.optional("final_logit_softcapping", final),
        **more,
    )
