"""GPT-2 and the families that follow it: layer norms, an MLP without a gate, their own names for tensors.

One function for each: config.json -> `Spec` and names. Defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

from dataclasses import replace

from genctl.native.config import Config, NotNative
from genctl.native.llama_families import plain, sizes_of
from genctl.native.names import Found, Names, whole_heads
from genctl.native.spec import Rope, Spec


def gpt2(c: Config) -> Found:
    """GPT-2 (Radford et al. 2019)."""
    hidden, heads = c.either("n_embd", "hidden_size"), c.either("n_head", "num_attention_heads")
    layers, context = c.either("n_layer", "num_hidden_layers"), c.either("n_positions", "max_position_embeddings")
    whole_heads(hidden, heads)
    c.only("reorder_and_upcast_attn", False)
    dim = hidden // heads
    spec = Spec(
        "gpt2",
        c.size("vocab_size"),
        hidden,
        layers,
        heads,
        heads,
        dim,
        4 * hidden if c.take("n_inner", None) is None else c.size("n_inner"),
        context,
        norm="layer",
        norm_bias=True,
        eps=c.number("layer_norm_epsilon", 1e-5),
        learned=0,
        scaling=dim**-0.5 if c.flag("scale_attn_weights", True) else 1.0,
        scaling_by_layer=c.flag("scale_attn_by_inverse_layer_idx", False),
        qkv="joined",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        windows=(None,) * layers,
        activation=c.take("activation_function", "gelu_new"),
        gated=False,
        tied=c.flag("tie_word_embeddings", True),
    )
    parts = {
        "attn_norm": "ln_1",
        "qkv": "attn.c_attn",
        "o": "attn.c_proj",
        "mlp_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    }
    ignored = (".attn.bias", ".attn.masked_bias")
    return spec, Names("transformer.", "wte", "h.{}.", parts, "ln_f", positions="wpe", transposed=True, ignored=ignored)


def gptj(c: Config) -> Found:
    """GPT-J (Wang and Komatsuzaki 2021): attention and MLP side by side, neighbouring features turn together."""
    hidden, heads = c.either("n_embd", "hidden_size"), c.either("n_head", "num_attention_heads")
    layers, context = c.either("n_layer", "num_hidden_layers"), c.either("n_positions", "max_position_embeddings")
    whole_heads(hidden, heads)
    dim = hidden // heads
    size = c.size("rotary_dim", 64)
    if size % 2 or size > dim:
        raise NotNative(f"config.json: rotary_dim = {size}, where a head has {dim} features")
    c.only("rotary", True)
    c.only("scale_attn_weights", True)
    spec = Spec(
        "gptj",
        c.size("vocab_size"),
        hidden,
        layers,
        heads,
        heads,
        dim,
        4 * hidden if c.take("n_inner", None) is None else c.size("n_inner"),
        context,
        norm="layer",
        norm_bias=True,
        eps=c.number("layer_norm_epsilon", 1e-5),
        rope=Rope(size, interleaved=True),
        scaling=dim**-0.5,
        mlp_bias=True,
        windows=(None,) * layers,
        activation=c.take("activation_function", "gelu_new"),
        gated=False,
        parallel=True,
        tied=c.flag("tie_word_embeddings", False),
        head_bias=True,
    )
    parts = {
        "attn_norm": "ln_1",
        "q": "attn.q_proj",
        "k": "attn.k_proj",
        "v": "attn.v_proj",
        "o": "attn.out_proj",
        "up": "mlp.fc_in",
        "down": "mlp.fc_out",
    }
    ignored = (".attn.bias", ".attn.masked_bias", ".attn.embed_positions")
    return spec, Names("transformer.", "wte", "h.{}.", parts, "ln_f", ignored=ignored)


def gpt_neox(c: Config) -> Found:
    """GPT-NeoX and Pythia (Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373)."""
    sizes = sizes_of(c, kv_heads=False)
    whole_heads(sizes["hidden"], sizes["heads"])
    c.only("head_dim", None, sizes["hidden"] // sizes["heads"])
    bias = c.flag("attention_bias", True)
    spec = plain(
        c,
        "gpt_neox",
        sizes,
        norm="layer",
        norm_bias=True,
        eps=c.number("layer_norm_eps", 1e-5),
        rope=c.rope(sizes["head_dim"], partial=c.number("rotary_pct", 0.25), theta="rotary_emb_base"),
        qkv="grouped",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        activation=c.take("hidden_act", "gelu"),
        gated=False,
        parallel=c.flag("use_parallel_residual", True),
    )
    parts = {
        "attn_norm": "input_layernorm",
        "qkv": "attention.query_key_value",
        "o": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    }
    names = Names("gpt_neox.", "embed_in", "layers.{}.", parts, "final_layer_norm", heads=("embed_out", "lm_head"))
    ignored = (".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")
    return spec, replace(names, ignored=ignored)


def opt(c: Config) -> Found:
    """OPT (Zhang et al. 2022, arXiv:2205.01068). The one with 350M parameters has its norms after each sum."""
    hidden, heads, layers = c.size("hidden_size"), c.size("num_attention_heads"), c.size("num_hidden_layers")
    whole_heads(hidden, heads)
    before = c.flag("do_layer_norm_before", True)
    bias, affine = c.flag("enable_bias", True), c.flag("layer_norm_elementwise_affine", True)
    width = c.take("word_embed_proj_dim", None)
    dim = hidden // heads
    spec = Spec(
        "opt",
        c.size("vocab_size"),
        hidden,
        layers,
        heads,
        heads,
        dim,
        c.size("ffn_dim"),
        c.size("max_position_embeddings"),
        norm="layer",
        norm_bias=affine,
        norm_weight=affine,
        eps=1e-5,
        learned=2,
        scaling=dim**-0.5,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        windows=(None,) * layers,
        activation=c.take("activation_function", "relu"),
        gated=False,
        embed_size=0 if width in (None, hidden) else c.size("word_embed_proj_dim"),
        tied=c.flag("tie_word_embeddings", True),
        final_norm=not c.flag("_remove_final_layer_norm", False) and before,
    )
    parts = {
        "attn_norm" if before else "attn_sum_norm": "self_attn_layer_norm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.out_proj",
        "mlp_norm" if before else "mlp_sum_norm": "final_layer_norm",
        "up": "fc1",
        "down": "fc2",
    }
    names = Names("model.decoder.", "embed_tokens", "layers.{}.", parts, "final_layer_norm")
    return spec, replace(names, positions="embed_positions", project_in="project_in", project_out="project_out")


def bloom(c: Config) -> Found:
    """BLOOM (BigScience 2022, arXiv:2211.05100): ALiBi, and a norm of the embeddings."""
    hidden = c.either("hidden_size", "n_embed")
    heads, layers = c.either("n_head", "num_attention_heads"), c.either("n_layer", "num_hidden_layers")
    whole_heads(hidden, heads)
    c.only("apply_residual_connection_post_layernorm", False)
    c.only("slow_but_exact", False)
    c.only("n_inner", None, 4 * hidden)
    dim = hidden // heads
    spec = Spec(
        "bloom",
        c.size("vocab_size"),
        hidden,
        layers,
        heads,
        heads,
        dim,
        4 * hidden,
        norm="layer",
        norm_bias=True,
        eps=c.number("layer_norm_epsilon", 1e-5),
        alibi="bloom",
        scaling=dim**-0.5,
        qkv="grouped",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        windows=(None,) * layers,
        activation="gelu_new",
        gated=False,
        embed_norm=True,
        tied=c.flag("tie_word_embeddings", True),
    )
    parts = {
        "attn_norm": "input_layernorm",
        "qkv": "self_attention.query_key_value",
        "o": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    }
    names = Names("transformer.", "word_embeddings", "h.{}.", parts, "ln_f")
    return spec, replace(names, embed_norm="word_embeddings_layernorm")


def falcon(c: Config) -> Found:
    """Falcon (Almazrouei et al. 2023, arXiv:2311.16867), in three layouts.

    7B: one head of keys and values for all queries, one norm for both sublayers. 40B and 180B ("new decoder
    architecture"): a head for each group, and a norm for each sublayer. RW-1B: heads of its own for every query, ALiBi.
    """
    hidden, heads, layers = c.size("hidden_size"), c.size("num_attention_heads"), c.size("num_hidden_layers")
    whole_heads(hidden, heads)
    dim = hidden // heads
    new, multi = c.flag("new_decoder_architecture", False), c.flag("multi_query", True)
    parallel, norms = c.flag("parallel_attn", True), c.take("num_ln_in_parallel_attn", None)
    kv_heads = heads if c.take("num_kv_heads", None) is None else c.size("num_kv_heads")
    if new:
        norms = 2 if norms is None else norms
    elif multi:
        kv_heads = 1
    elif kv_heads != heads:
        raise NotNative("config.json: num_kv_heads without the new decoder architecture")
    if (new and not parallel) or norms not in ((1, 2) if new else (None, 1)):
        raise NotNative(f"config.json: parallel_attn = {parallel}, num_ln_in_parallel_attn = {norms!r:.40}")
    bias, alibi = c.flag("bias", False), c.flag("alibi", False)
    rope = c.rope(dim)
    spec = Spec(
        "falcon",
        c.size("vocab_size"),
        hidden,
        layers,
        heads,
        kv_heads,
        dim,
        4 * hidden if c.take("ffn_hidden_size", None) is None else c.size("ffn_hidden_size"),
        c.size("max_position_embeddings"),
        norm="layer",
        norm_bias=True,
        eps=c.number("layer_norm_epsilon", 1e-5),
        rope=None if alibi else rope,
        alibi="falcon" if alibi else "",
        scaling=dim**-0.5,
        qkv="grouped",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        windows=(None,) * layers,
        activation=c.take("activation", "gelu"),
        gated=False,
        parallel=parallel,
        tied=c.flag("tie_word_embeddings", True),
    )
    if norms == 2:
        read = {"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    else:
        read = {"attn_norm": "input_layernorm", **({} if parallel else {"mlp_norm": "post_attention_layernorm"})}
    parts = {
        **read,
        "qkv": "self_attention.query_key_value",
        "o": "self_attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    }
    return spec, Names("transformer.", "word_embeddings", "h.{}.", parts, "ln_f")
