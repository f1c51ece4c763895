"""GPT-2 and the families that follow it: layer norms, an MLP without a gate, their own names for tensors.

One function for each: config.json -> `Spec` and names. Defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from genctl.native.config import Config, NotNative, whole_heads
from genctl.native.llama_families import biases, plain, sizes_of
from genctl.native.spec import Found, Names, Rope, Spec


def _spec(c: Config, family: str, hidden: int, heads: int, layers: int, **more: Any) -> Spec:
    """The fields that these families share. `more` are those that differ."""
    whole_heads(hidden, heads)
    dim = hidden // heads
    common: dict[str, Any] = {
        "kv_heads": heads,
        "head_dim": dim,
        "inner": 4 * hidden,
        "norm": "layer",
        "norm_bias": True,
        "scaling": dim**-0.5,
        "mlp_bias": True,
        "windows": (None,) * layers,
        "gated": False,
        "tied": c.flag("tie_word_embeddings", True),
    }
    return Spec(family, c.size("vocab_size"), hidden, layers, heads, **{**common, **more})


def _gpt_sizes(c: Config, activation: str = "gelu_new") -> dict[str, Any]:
    """Sizes, norm and activation: fields with the same names in GPT-2 and GPT-J."""
    hidden = c.either("n_embd", "hidden_size")
    return {
        "hidden": hidden,
        "heads": c.either("n_head", "num_attention_heads"),
        "layers": c.either("n_layer", "num_hidden_layers"),
        "context": c.either("n_positions", "max_position_embeddings"),
        "inner": _inner(c, "n_inner", hidden),
        "eps": c.number("layer_norm_epsilon", 1e-5),
        "activation": c.take("activation_function", activation),
    }


def _inner(c: Config, name: str, hidden: int) -> int:
    return 4 * hidden if c.take(name, None) is None else c.size(name)


def _joined_parts(attention: str) -> dict[str, str]:
    """The matrices of a layer in GPT-NeoX, BLOOM and Falcon."""
    return {
        "qkv": f"{attention}.query_key_value", "o": f"{attention}.dense", "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    }  # fmt: skip


_TWO_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def gpt2(c: Config) -> Found:
    """GPT-2 (Radford et al. 2019)."""
    c.only("reorder_and_upcast_attn", False)
    spec = _spec(
        c,
        "gpt2",
        **_gpt_sizes(c),
        learned=0,
        scaling_by_layer=c.flag("scale_attn_by_inverse_layer_idx", False),
        qkv="joined",
        qkv_bias=True,
        o_bias=True,
    )
    if not c.flag("scale_attn_weights", True):
        spec = replace(spec, scaling=1.0)
    names = Names("transformer.", "wte", "h.{}.", _GPT2_PARTS, "ln_f", positions="wpe", transposed=True)
    return spec, replace(names, ignored=(".attn.bias", ".attn.masked_bias"))


_GPT2_PARTS = {
    "attn_norm": "ln_1", "qkv": "attn.c_attn", "o": "attn.c_proj", "mlp_norm": "ln_2", "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}  # fmt: skip


def gpt_bigcode(c: Config) -> Found:
    """SantaCoder and StarCoder (Li et al. 2023, arXiv:2305.06161): GPT-2 with multi-query attention."""
    shared = c.flag("multi_query", True)
    sizes = _gpt_sizes(c, "gelu_pytorch_tanh")
    for name in _BIGCODE_UNREAD:
        c.take(name, None)
    spec = _spec(
        c, "gpt_bigcode", **sizes, learned=0, qkv_bias=True, o_bias=True, qkv="joined" if shared else "grouped"
    )
    if shared:
        spec = replace(spec, kv_heads=1)
    if not c.flag("scale_attn_weights", True):
        spec = replace(spec, scaling=1.0)
    names = Names("transformer.", "wte", "h.{}.", _GPT2_PARTS, "ln_f", positions="wpe")
    return spec, replace(names, ignored=(".attn.bias", ".attn.masked_bias", "transformer.bias"))


# Written for the inference servers of the models' makers and for their cache.
_BIGCODE_UNREAD = (
    "inference_runner", "max_batch_size", "pad_key_length", "pre_allocate_kv_cache", "runner_max_sequence_length",
    "validate_runner_input", "num_key_value_heads",
)  # fmt: skip


def gptj(c: Config) -> Found:
    """GPT-J (Wang and Komatsuzaki 2021): attention and MLP in parallel, interleaved RoPE."""
    size = c.size("rotary_dim", 64)
    c.only("rotary", True)
    c.only("scale_attn_weights", True)
    spec = _spec(
        c,
        "gptj",
        **_gpt_sizes(c),
        rope=Rope(size, interleaved=True),
        parallel=True,
        tied=c.flag("tie_word_embeddings", False),
        head_bias=True,
    )
    if size % 2 or size > spec.head_dim:
        raise NotNative(f"config.json: rotary_dim = {size}, where a head has {spec.head_dim} features")
    parts = {
        "attn_norm": "ln_1", "q": "attn.q_proj", "k": "attn.k_proj", "v": "attn.v_proj", "o": "attn.out_proj",
        "up": "mlp.fc_in", "down": "mlp.fc_out",
    }  # fmt: skip
    ignored = (".attn.bias", ".attn.masked_bias", ".attn.embed_positions")
    return spec, Names("transformer.", "wte", "h.{}.", parts, "ln_f", ignored=ignored)


def codegen(c: Config) -> Found:
    """CodeGen (Nijkamp et al. 2022, arXiv:2203.13474): GPT-J, with one matrix for queries, values and keys."""
    size = c.size("rotary_dim", 64)
    spec = _spec(
        c,
        "codegen",
        **_gpt_sizes(c),
        rope=Rope(size, interleaved=True),
        qkv="blocks",
        parallel=True,
        tied=c.flag("tie_word_embeddings", False),
        head_bias=True,
    )
    if size % 2 or size > spec.head_dim:
        raise NotNative(f"config.json: rotary_dim = {size}, where a head has {spec.head_dim} features")
    c.take("scale_attn_weights", True)  # written, but not read: scores are always scaled
    if spec.heads % 4:
        raise NotNative(f"config.json: {spec.heads} heads are not four blocks of heads")
    parts = {"attn_norm": "ln_1", "qkv": "attn.qkv_proj", "o": "attn.out_proj", "up": "mlp.fc_in", "down": "mlp.fc_out"}
    return spec, Names("transformer.", "wte", "h.{}.", parts, "ln_f", ignored=(".attn.causal_mask",))


def gpt_neox(c: Config) -> Found:
    """GPT-NeoX and Pythia (Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373)."""
    sizes = sizes_of(c, kv_heads=False)
    whole_heads(sizes["hidden"], sizes["heads"])
    c.only("head_dim", None, sizes["hidden"] // sizes["heads"])
    rope = c.rope(sizes["head_dim"], partial=c.number("rotary_pct", 0.25), theta="rotary_emb_base")
    # newer names, which some versions wrote beside the names that are read
    c.only("rope_theta", c.number("rotary_emb_base", 10000.0))
    c.only("partial_rotary_factor", c.number("rotary_pct", 0.25))
    spec = plain(
        c,
        "gpt_neox",
        sizes,
        norm="layer",
        norm_bias=True,
        eps=c.number("layer_norm_eps", 1e-5),
        rope=rope,
        qkv="grouped",
        **biases(c, "attention_bias", True),
        mlp_bias=True,
        activation=c.take("hidden_act", "gelu"),
        gated=False,
        parallel=c.flag("use_parallel_residual", True),
    )
    parts = _TWO_NORMS | _joined_parts("attention")
    names = Names("gpt_neox.", "embed_in", "layers.{}.", parts, "final_layer_norm", heads=("embed_out", "lm_head"))
    return spec, replace(names, ignored=(".attention.bias", ".attention.masked_bias"))


def opt(c: Config) -> Found:
    """OPT (Zhang et al. 2022, arXiv:2205.01068). OPT-350m has its norms after each residual sum."""
    hidden, width = c.size("hidden_size"), c.take("word_embed_proj_dim", None)
    before, affine = c.flag("do_layer_norm_before", True), c.flag("layer_norm_elementwise_affine", True)
    attention_biases = biases(c, "enable_bias", True)
    spec = _spec(
        c,
        "opt",
        hidden,
        c.size("num_attention_heads"),
        c.size("num_hidden_layers"),
        inner=c.size("ffn_dim"),
        context=c.size("max_position_embeddings"),
        norm_bias=affine,
        norm_weight=affine,
        eps=1e-5,
        learned=2,
        **attention_biases,
        mlp_bias=attention_biases["o_bias"],
        activation=c.take("activation_function", "relu"),
        embed_size=0 if width in (None, hidden) else c.size("word_embed_proj_dim"),
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
    """BLOOM (BigScience 2022, arXiv:2211.05100): ALiBi, and a norm on the embeddings."""
    hidden = c.either("hidden_size", "n_embed")
    c.only("apply_residual_connection_post_layernorm", False)
    c.only("slow_but_exact", False)
    c.only("n_inner", None, 4 * hidden)
    spec = _spec(
        c,
        "bloom",
        hidden,
        c.either("n_head", "num_attention_heads"),
        c.either("n_layer", "num_hidden_layers"),
        eps=c.number("layer_norm_epsilon", 1e-5),
        alibi="bloom",
        qkv="grouped",
        qkv_bias=True,
        o_bias=True,
        activation="gelu_new",
        embed_norm=True,
    )
    names = Names("transformer.", "word_embeddings", "h.{}.", _TWO_NORMS | _joined_parts("self_attention"), "ln_f")
    return spec, replace(names, embed_norm="word_embeddings_layernorm")


def mpt(c: Config) -> Found:
    """MPT (MosaicML 2023): ALiBi, no biases anywhere."""
    hidden, heads = c.either("d_model", "hidden_size"), c.either("n_heads", "num_attention_heads")
    attention = Config(c.take("attn_config", None) or {})
    for name in ("attn_impl", "attn_pdrop", "attn_uses_sequence_id", *_MPT_CONFIG):
        attention.take(name, None)
    attention.only("attn_type", "multihead_attention")
    attention.only("alibi", True)
    attention.only("alibi_bias_max", 8)  # transformers ignores the field and uses 8
    attention.only("prefix_lm", False)
    attention.only("qk_ln", False)
    # transformers does not read these: its class is for the published models
    c.only("expansion_ratio", 4)
    c.only("no_bias", True)
    c.only("logit_scale", None)
    c.only("norm_type", "low_precision_layernorm")
    for name in _MPT_UNREAD:
        c.take(name, None)
    scale, clip = attention.optional("softmax_scale"), attention.optional("clip_qkv")
    attention.rest()
    spec = _spec(
        c,
        "mpt",
        hidden,
        heads,
        c.either("n_layers", "num_hidden_layers"),
        norm_bias=False,
        eps=c.number("layer_norm_epsilon", 1e-5),
        alibi="mpt",
        qkv="joined",
        clip_qkv=clip or None,  # 0 clips nothing
        mlp_bias=False,
        activation="gelu",
    )
    if scale is not None:
        spec = replace(spec, scaling=scale)
    parts = {
        "attn_norm": "norm_1", "qkv": "attn.Wqkv", "o": "attn.out_proj", "mlp_norm": "norm_2", "up": "ffn.up_proj",
        "down": "ffn.down_proj",
    }  # fmt: skip
    return spec, Names("transformer.", "wte", "blocks.{}.", parts, "norm_f")


# Fields that transformers writes into every config, and so into `attn_config` too; and fields that only MosaicML's
# code reads.
_MPT_CONFIG = ("model_type", "transformers_version", "dtype", "architectures", "id2label", "label2id", "problem_type")
_MPT_UNREAD = (
    "emb_pdrop", "embedding_fraction", "init_config", "init_device", "learned_pos_emb", "max_seq_len",
    "tokenizer_name", "verbose",
)  # fmt: skip


def falcon(c: Config) -> Found:
    """Falcon (Almazrouei et al. 2023, arXiv:2311.16867), in three layouts.

    7B: multi-query attention, one norm for both sublayers. 40B and 180B ("new decoder architecture"): grouped-query
    attention, and a norm for each sublayer. RW-1B: multi-head attention, ALiBi.
    """
    hidden, heads, layers = c.size("hidden_size"), c.size("num_attention_heads"), c.size("num_hidden_layers")
    whole_heads(hidden, heads)
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
    c.only("output_attentions", False)  # transformers uses other operations if it has to return the scores
    c.only("apply_residual_connection_post_layernorm", False)
    rope = c.rope(hidden // heads)
    spec = _spec(
        c,
        "falcon",
        hidden,
        heads,
        layers,
        kv_heads=kv_heads,
        inner=_inner(c, "ffn_hidden_size", hidden),
        context=c.size("max_position_embeddings"),
        eps=c.number("layer_norm_epsilon", 1e-5),
        rope=None if alibi else rope,
        alibi="falcon" if alibi else "",
        qkv="grouped",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        activation=c.take("activation", "gelu"),
        parallel=parallel,
    )
    if norms == 2:
        read = {"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    else:
        read = {"attn_norm": "input_layernorm"} if parallel else _TWO_NORMS
    return spec, Names("transformer.", "word_embeddings", "h.{}.", read | _joined_parts("self_attention"), "ln_f")
