"""Families derived from Llama: Mixtral and others with experts, and Gemma.

One function for each: config.json -> `Spec` and names. Defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from genctl.native.config import Config, NotNative
from genctl.native.llama_families import QK_NORM, biases, llama_names, plain, sizes_of
from genctl.native.spec import Experts, Found, Spec


def mixtral(c: Config) -> Found:
    """Mixtral 8x7B (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts."""
    sizes = sizes_of(c)
    c.size("num_key_value_heads")
    sizes["windows"] = (c.window(),) * sizes["layers"]
    count = c.size("num_local_experts", 8)
    experts = _experts(c, count, sizes["inner"], chosen=2, layers=range(sizes["layers"]))
    rope, eps = c.rope(sizes["head_dim"], base=1e6), c.number("rms_norm_eps", 1e-5)
    block = "block_sparse_moe"
    parts = {"router": f"{block}.gate", "expert_gate": f"{block}.experts.{{}}.w1"}
    parts |= {"expert_up": f"{block}.experts.{{}}.w3", "expert_down": f"{block}.experts.{{}}.w2"}
    names = llama_names(gate=None, up=None, down=None, **parts)
    return plain(c, "mixtral", sizes, eps=eps, rope=rope, experts=experts), names


def qwen3_moe(c: Config) -> Found:
    """Qwen3-MoE, such as 30B-A3B (Yang et al. 2025, arXiv:2505.09388): Qwen3 with experts in all or some layers."""
    sizes = sizes_of(c)
    c.size("num_key_value_heads")
    window, used = c.window(4096), c.flag("use_sliding_window", False)
    c.take("max_window_layers", None)  # written, but not read
    sizes["windows"] = (window if used else None,) * sizes["layers"]
    step, dense = c.size("decoder_sparse_step", 1), c.take("mlp_only_layers", None) or []
    if not isinstance(dense, list):
        raise NotNative(f"config.json: mlp_only_layers = {dense!r:.60}")
    layers = [number for number in range(sizes["layers"]) if number not in dense and (number + 1) % step == 0]
    count = c.either("num_experts", "num_local_experts")
    inner = c.size("moe_intermediate_size", 768)
    experts = _experts(c, count, inner, chosen=8, layers=layers, normed=c.flag("norm_topk_prob", False))
    parts = {"router": "mlp.gate"} | {f"expert_{part}": f"mlp.experts.{{}}.{part}_proj" for part in _GATED}
    spec = plain(c, "qwen3_moe", sizes, **biases(c), qk_norm="head", experts=experts)
    return spec, llama_names(**QK_NORM, **parts)


def gpt_oss(c: Config) -> Found:
    """gpt-oss (OpenAI 2025, arXiv:2508.10925): attention sinks, windows in every other layer, experts with biases."""
    sizes = sizes_of(c, head_dim=64)
    c.size("num_key_value_heads")
    sizes["windows"] = c.windows(sizes["layers"], c.window(128), lambda number: (number + 1) % 2 != 0)
    if not c.values.get("rope_scaling") and c.values.get("rope_parameters") is None:
        c.values = {**c.values, "rope_parameters": _GPT_OSS_ROPE}
    c.only("hidden_act", "silu")
    c.take("initial_context_length", None)  # written, but not read
    c.only("experts_per_token", None, c.values.get("num_experts_per_tok", 4))
    limit, alpha = c.number("swiglu_limit", 7.0), c.number("swiglu_alpha", 1.702)
    count = c.either("num_local_experts", "num_experts")
    experts = _experts(c, count, sizes["inner"], chosen=4, layers=range(sizes["layers"]), limit=limit, alpha=alpha)
    spec = plain(
        c,
        "gpt_oss",
        sizes,
        eps=c.number("rms_norm_eps", 1e-5),
        norm="rms",
        round_after_weight=True,
        rope=c.rope(sizes["head_dim"], base=150000.0),
        **biases(c, "attention_bias", True),
        sinks=True,
        experts=experts,
    )
    parts = {"sinks": "self_attn.sinks", "router": "mlp.router"}
    parts |= {"experts_up": "mlp.experts.gate_up_proj", "experts_down": "mlp.experts.down_proj"}
    return spec, llama_names(gate=None, up=None, down=None, **parts)


_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_GATED = ("gate", "up", "down")


def _experts(c: Config, count: int, inner: int, *, chosen: int, layers: Iterable[int], **more: Any) -> Experts:
    """The fields that these families share. `chosen` is the default number of experts for a token."""
    for name in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):  # used in training only
        c.take(name, None)
    each = c.size("num_experts_per_tok", chosen)
    if each > count:
        raise NotNative(f"config.json: {each} of {count} experts for each token")
    return Experts(count, each, inner, frozenset(layers), **more)


def gemma(c: Config) -> Found:
    """Gemma (Gemma Team 2024, arXiv:2403.08295)."""
    sizes = sizes_of(c, head_dim=256)
    c.size("num_key_value_heads")
    act = c.take("hidden_act", "gelu_pytorch_tanh")
    c.take("hidden_activation", None)  # not read: for Gemma, "gelu" has always meant its tanh approximation
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
    """Gemma 2 (Gemma Team 2024, arXiv:2408.00118): a window in every other layer; soft caps on scores and logits."""
    sizes = sizes_of(c, head_dim=256)
    c.size("num_key_value_heads")
    sizes["windows"] = c.windows(sizes["layers"], c.window(4096), lambda number: number % 2 == 0)
    c.take("sliding_window_size", None)  # an older name, which is not read
    spec = _gemma(c, "gemma2", sizes, rope=c.rope(sizes["head_dim"]), softcap=50.0, final=30.0)
    return spec, llama_names(**_SANDWICH)


def gemma3_text(c: Config) -> Found:
    """Gemma 3 (Gemma Team 2025, arXiv:2503.19786): five layers with a window per layer without; two sets of angles."""
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
