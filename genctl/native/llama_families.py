"""LLaMA and the families that follow it: RMS norms, rotary positions, a gated MLP, tensors named alike.

One function for each: config.json -> `Spec` and names. Defaults are those of transformers' configuration classes, for
fields that older config.json files leave out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from genctl.native.config import Config, NotNative
from genctl.native.spec import Found, Names, Spec

_LLAMA_PARTS = {
    "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}  # fmt: skip
QK_NORM = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


def llama_names(**changes: str | None) -> Names:
    """Llama's names with some parts added, renamed, or (None) left out."""
    parts = {name: theirs for name, theirs in {**_LLAMA_PARTS, **changes}.items() if theirs is not None}
    return Names("model.", "embed_tokens", "layers.{}.", parts, "norm", ignored=("rotary_emb.inv_freq",))


def sizes_of(c: Config, *, head_dim: int | None = None, kv_heads: bool = True) -> dict[str, Any]:
    """The sizes that have the same names in most families."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    dim = c.take("head_dim", head_dim)
    shared = c.take("num_key_value_heads", None) if kv_heads else None
    layers = c.size("num_hidden_layers")
    return {
        "vocab": c.size("vocab_size"),
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": heads if shared is None else c.size("num_key_value_heads"),
        "head_dim": hidden // heads if dim is None else c.size("head_dim", head_dim),
        "inner": c.size("intermediate_size"),
        "context": c.size("max_position_embeddings"),
        "windows": (None,) * layers,
    }


def plain(c: Config, family: str, sizes: dict[str, Any], *, tied: bool = False, **more: Any) -> Spec:
    """Llama and close relatives: RMS norm, rotary positions, a gated MLP. `more` are the fields that differ."""
    common: dict[str, Any] = {
        "scaling": sizes["head_dim"] ** -0.5,
        "activation": c.take("hidden_act", "silu"),
        "tied": c.flag("tie_word_embeddings", tied),
    }
    if "rope" not in more:
        more["rope"] = c.rope(sizes["head_dim"])
    if "norm" not in more:
        common["eps"] = c.number("rms_norm_eps", 1e-6)
    return Spec(family, **{**sizes, **common, **more})


def biases(c: Config, name: str = "attention_bias", default: bool = False) -> dict[str, bool]:
    """One field that says whether all matrices of the attention have a bias."""
    bias = c.flag(name, default)
    return {"qkv_bias": bias, "o_bias": bias}


def llama(c: Config) -> Found:
    """LLaMA (Touvron et al. 2023, arXiv:2302.13971; Llama 3, arXiv:2407.21783)."""
    return plain(c, "llama", sizes_of(c), **biases(c), mlp_bias=c.flag("mlp_bias", False)), llama_names()


def mistral(c: Config) -> Found:
    """Mistral 7B (Jiang et al. 2023, arXiv:2310.06825): a sliding window in every layer."""
    sizes = sizes_of(c)
    c.size("num_key_value_heads")  # transformers' default is not `num_attention_heads` here
    sizes["windows"] = (c.window(4096),) * sizes["layers"]
    return plain(c, "mistral", sizes), llama_names()


def qwen2(c: Config) -> Found:
    """Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): biases on queries, keys and values."""
    sizes = sizes_of(c)
    c.size("num_key_value_heads")
    sizes["windows"] = _upper_windows(c, sizes["layers"])
    return plain(c, "qwen2", sizes, qkv_bias=True), llama_names()


def qwen3(c: Config) -> Found:
    """Qwen3 (Yang et al. 2025, arXiv:2505.09388): queries and keys are normalised per head."""
    sizes = sizes_of(c, head_dim=128)
    c.size("num_key_value_heads")
    sizes["windows"] = _upper_windows(c, sizes["layers"])
    return plain(c, "qwen3", sizes, **biases(c), qk_norm="head"), llama_names(**QK_NORM)


def _upper_windows(c: Config, layers: int) -> tuple[int | None, ...]:
    """Qwen's windows: from layer `max_window_layers` on, if they are used at all."""
    window, used = c.window(4096), c.flag("use_sliding_window", False)
    first = c.take("max_window_layers", 28)
    return c.windows(layers, window if used else None, lambda number: number >= first)


def smollm3(c: Config) -> Found:
    """SmolLM3 (Bakouch et al. 2025): every fourth layer has no positions (Yang et al. 2025, arXiv:2501.18795)."""
    c.take("num_key_value_heads")  # transformers' default is not `num_attention_heads` here
    sizes = sizes_of(c)
    layers = sizes["layers"]
    turns, interval = c.take("no_rope_layers", None), c.size("no_rope_layer_interval", 4)
    if turns is None:
        turns = [int((number + 1) % interval != 0) for number in range(layers)]
    if not isinstance(turns, list) or len(turns) < layers:
        raise NotNative(f"config.json: no_rope_layers = {turns!r:.60}")
    no_rope = frozenset(number for number in range(layers) if not turns[number])
    window, used = c.window(), c.flag("use_sliding_window", False)
    c.take("max_window_layers", None)  # written, but not read
    # layers marked in `layer_types` have the config's window, whatever `use_sliding_window` is
    listed = c.values.get("layer_types") is not None
    sizes["windows"] = c.windows(layers, window if used or listed else None, lambda number: number in no_rope)
    rope = c.rope(sizes["head_dim"], base=2000000.0)
    mlp_bias = c.flag("mlp_bias", False)
    spec = plain(c, "smollm3", sizes, tied=True, rope=rope, no_rope_layers=no_rope, **biases(c), mlp_bias=mlp_bias)
    return spec, llama_names()


def granite(c: Config) -> Found:
    """Granite 3 (IBM 2024): Llama with four multipliers (muP, Yang et al. 2022, arXiv:2203.03466)."""
    spec = plain(
        c,
        "granite",
        sizes_of(c),
        **biases(c),
        mlp_bias=c.flag("mlp_bias", False),
        scaling=c.number("attention_multiplier", 1.0),
        embed_scale=c.number("embedding_multiplier", 1.0),
        residual_scale=c.number("residual_multiplier", 1.0),
        logits_scale=c.number("logits_scaling", 1.0),
    )
    return spec, llama_names()


def glm4(c: Config) -> Found:
    """GLM-4-0414 (GLM Team 2024, arXiv:2406.12793): norms before and after each sublayer, interleaved RoPE."""
    sizes = sizes_of(c, head_dim=128)
    c.size("num_key_value_heads")
    rope = c.rope(sizes["head_dim"], partial=c.number("partial_rotary_factor", 0.5))
    spec = plain(
        c,
        "glm4",
        sizes,
        eps=c.number("rms_norm_eps", 1.5625e-07),
        rope=replace(rope, interleaved=True),
        qkv_bias=c.flag("attention_bias", True),
    )
    names = llama_names(
        attn_out_norm="post_self_attn_layernorm",
        mlp_out_norm="post_mlp_layernorm",
        gate=None,
        up=None,
        gate_up="mlp.gate_up_proj",
    )
    return spec, names


def ernie4_5(c: Config) -> Found:
    """Dense ERNIE 4.5 models (Baidu 2025): Llama with interleaved RoPE."""
    sizes = sizes_of(c, head_dim=128)
    c.take("num_key_value_heads")
    rope = replace(c.rope(sizes["head_dim"], base=500000.0), interleaved=True)
    bias = biases(c, "use_bias", False)
    spec = plain(
        c,
        "ernie4_5",
        sizes,
        tied=True,
        eps=c.number("rms_norm_eps", 1e-5),
        rope=rope,
        **bias,
        mlp_bias=bias["o_bias"],
    )
    return spec, llama_names()


def cohere2(c: Config) -> Found:
    """Command R7B and Command A (Cohere 2025, arXiv:2504.00698): no positions in the layers without a window."""
    sizes = sizes_of(c)
    window, pattern = c.size("sliding_window", 4096), c.size("sliding_window_pattern", 4)
    windows = c.windows(sizes["layers"], window, lambda number: (number + 1) % pattern != 0)
    sizes["windows"] = windows
    for name in _COHERE_UNREAD:
        c.take(name, None)
    c.only("use_qk_norm", False)
    c.only("use_parallel_block", True)
    c.only("use_gated_activation", True)
    spec = plain(
        c,
        "cohere2",
        sizes,
        tied=True,
        norm="layer",
        eps=c.number("layer_norm_eps", 1e-5),
        rope=replace(c.rope(sizes["head_dim"]), interleaved=True),
        no_rope_layers=frozenset(number for number, size in enumerate(windows) if size is None),
        **biases(c),
        parallel=True,
        logits_scale=1 / c.number("logit_scale", 0.0625),
    )
    return spec, llama_names(mlp_norm=None)


# Written by Cohere's own tools; transformers does not read them.
_COHERE_UNREAD = (
    "layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing",
    "use_parallel_embedding", "_sliding_window_pattern",
)  # fmt: skip


def olmo(c: Config) -> Found:
    """OLMo (Groeneveld et al. 2024, arXiv:2402.00838): layer norms without weights."""
    clip = c.optional("clip_qkv")
    spec = plain(c, "olmo", sizes_of(c), norm="layer", norm_weight=False, eps=1e-5, **biases(c), clip_qkv=clip)
    return spec, llama_names()


def olmo2(c: Config) -> Found:
    """OLMo 2 (OLMo Team 2024, arXiv:2501.00656): norms after each sublayer only, and over all queries and keys."""
    spec = plain(c, "olmo2", sizes_of(c), **biases(c), qk_norm="whole", eps=c.number("rms_norm_eps", 1e-5))
    return spec, olmo2_names()


def olmo2_names() -> Names:
    """Llama's names, with norms after the sublayers."""
    after = {"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
    return llama_names(attn_norm=None, mlp_norm=None, **after, **QK_NORM)


def olmo3(c: Config) -> Found:
    """OLMo 3 (OLMo Team 2025, arXiv:2512.13961): OLMo 2 with windows; RoPE scaling only in layers without one."""
    sizes = sizes_of(c)
    sizes["windows"] = c.windows(sizes["layers"], c.window(4096), lambda number: (number + 1) % 4 != 0)
    # like transformers, which uses `rope_theta` for full-attention layers only
    rope, local = c.ropes(sizes["head_dim"], theta=c.number("rope_theta", 5e5), local_theta=5e5)
    eps = c.number("rms_norm_eps", 1e-5)
    spec = plain(
        c,
        "olmo3",
        sizes,
        **biases(c),
        qk_norm="whole",
        norm="rms",
        eps=eps,
        round_after_weight=True,
        rope=rope,
        local_rope=local,
    )
    return spec, olmo2_names()


def stablelm(c: Config) -> Found:
    """StableLM 2 (Bellagente et al. 2024, arXiv:2402.17834)."""
    sizes = sizes_of(c)
    c.size("num_key_value_heads")
    c.only("head_dim", None, sizes["hidden"] // sizes["heads"])
    parallel, each = c.flag("use_parallel_residual", False), c.flag("qk_layernorm", False)
    for name in ("norm_eps", "rope_pct"):  # written, but not read
        c.take(name, None)
    spec = plain(
        c,
        "stablelm",
        sizes,
        norm="layer",
        norm_bias=True,
        eps=c.number("layer_norm_eps", 1e-5),
        rope=c.rope(sizes["head_dim"], partial=c.number("partial_rotary_factor", 0.25)),
        qkv_bias=c.flag("use_qkv_bias", False),
        qk_norm="each" if each else "",
        parallel=parallel,
    )
    norms = {"q_norm": "self_attn.q_layernorm.norms", "k_norm": "self_attn.k_layernorm.norms"} if each else {}
    return spec, llama_names(**({"mlp_norm": None} if parallel else {}), **norms)


def starcoder2(c: Config) -> Found:
    """StarCoder 2 (Lozhkov et al. 2024, arXiv:2402.19173)."""
    sizes = sizes_of(c)
    c.size("num_key_value_heads")
    sizes["windows"] = (c.window(),) * sizes["layers"]
    attention_biases = biases(c, "use_bias", True)
    for name in ("activation_function", "layer_norm_epsilon"):  # not read: `hidden_act` and `norm_epsilon` are
        c.take(name, None)
    c.only("norm_type", "layer_norm")
    c.only("mlp_type", "default")
    c.only("scale_attn_weights", True)
    spec = plain(
        c,
        "starcoder2",
        sizes,
        tied=True,
        norm="layer",
        norm_bias=True,
        eps=c.number("norm_epsilon", 1e-5),
        activation=c.take("hidden_act", "gelu_pytorch_tanh"),
        gated=False,
        **attention_biases,
        mlp_bias=attention_biases["o_bias"],
    )
    return spec, llama_names(gate=None, up="mlp.c_fc", down="mlp.c_proj")


def phi(c: Config) -> Found:
    """Phi-1 to Phi-2 (Li et al. 2023, arXiv:2309.05463): attention and MLP in parallel, after one norm."""
    sizes = sizes_of(c)
    normed = c.flag("qk_layernorm", False)
    spec = plain(
        c,
        "phi",
        sizes,
        norm="layer",
        norm_bias=True,
        eps=c.number("layer_norm_eps", 1e-5),
        rope=c.rope(sizes["head_dim"], partial=c.number("partial_rotary_factor", 0.5)),
        activation=c.take("hidden_act", "gelu_new"),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm="head" if normed else "",
        parallel=True,
        head_bias=True,
    )
    norms = {"q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm"} if normed else {}
    names = llama_names(mlp_norm=None, gate=None, o="self_attn.dense", up="mlp.fc1", down="mlp.fc2", **norms)
    return spec, replace(names, final="final_layernorm")


def phi3(c: Config) -> Found:
    """Phi-3 (Abdin et al. 2024, arXiv:2404.14219): Llama with fused QKV and gate-up matrices."""
    sizes = sizes_of(c)
    sizes["windows"] = (c.window(),) * sizes["layers"]
    original = c.take("original_max_position_embeddings", 4096)
    for name in ("rope_scaling", "rope_parameters"):
        scaling = c.take(name, None)
        kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else "default"
        if kind not in ("default", "longrope", "su", "yarn"):
            raise NotNative(f"config.json: rope_type = {kind!r:.40}, where Phi-3 has longrope alone")
        if kind in ("su", "yarn"):  # older names of longrope
            scaling = {key: value for key, value in scaling.items() if key not in ("type", "rope_type")}
            c.values = {**c.values, name: {**scaling, "rope_type": "longrope"}}
    c.values = {**c.values, "original_max_position_embeddings": original}
    rope = c.rope(sizes["head_dim"], partial=c.number("partial_rotary_factor", 1.0))
    rope = replace(rope, reads_again=rope.kind == "longrope")
    spec = plain(c, "phi3", sizes, rope=rope, qkv="joined", eps=c.number("rms_norm_eps", 1e-5))
    joined = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
    return spec, llama_names(q=None, k=None, v=None, gate=None, up=None, **joined)
