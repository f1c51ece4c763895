"""A config of any architecture, made small: every size that it has becomes a small number, whatever it is nested in."""

from __future__ import annotations

from typing import Any

from tests.tiny import BOS, CONTEXT, EOS, HEADS, HIDDEN, INNER, LAYERS, PAD, VOCABULARY, WINDOW

GROUPED = 2  # key and value heads
HEAD = HIDDEN // HEADS

_NAMES: tuple[tuple[int, str], ...] = (
    (
        VOCABULARY,
        "vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    ),
    (
        HIDDEN,
        "hidden_size d_model n_embd emb_dim embedding_dim word_embed_proj_dim input_embedding_size "
        "output_embedding_size lru_width output_dim",
    ),
    (
        LAYERS,
        "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers speech_encoder_layers t2u_encoder_layers t2u_decoder_layers num_layers_per_stack depth "
        "hidden_layers",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "speech_encoder_attention_heads "
        "t2u_encoder_attention_heads t2u_decoder_attention_heads swa_num_attention_heads linear_num_heads "
        "linear_num_value_heads mamba_n_heads mamba_num_heads index_n_heads",
    ),
    (
        GROUPED,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads linear_num_key_heads "
        "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts num_shared_experts n_shared_experts "
        "moe_num_shared_experts n_groups mamba_n_groups",
    ),
    (
        INNER,
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff dff d_inner dim_ff ffn_hidden_size "
        "feed_forward_size moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size "
        "dense_intermediate_size intermediate_size_mlp speech_encoder_intermediate_size t2u_encoder_ffn_dim "
        "t2u_decoder_ffn_dim mlp_dim mamba_d_ssm",
    ),
    (
        HEAD,
        "head_dim d_kv dim_head d_head attention_head_size kv_channels swa_head_dim global_head_dim index_head_dim "
        "qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim query_pre_attn_scalar "
        "state_size ssm_state_size mamba_d_state kv_lora_rank q_lora_rank o_lora_rank laurel_rank adapter_rank "
        "router_hidden_size hidden_size_per_layer_input d_rel gated_norm_rank hc_lowrank embedding_size",
    ),
    (
        4,
        "num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim rotary_dim time_step_rank "
        "mamba_dt_rank zero_expert_num",
    ),
    (
        CONTEXT,
        "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions "
        "max_encoder_position_embeddings max_decoder_position_embeddings context_length model_max_length "
        "original_max_position_embeddings position_bias_max_distance",
    ),
    (
        WINDOW,
        "sliding_window sliding_window_size attention_window_size window_size local_attention attention_chunk_size "
        "local_attention_window_len block_size index_block_size mamba_chunk_size chunk_size attention_window",
    ),
    (1, "n_group topk_group num_expert_group first_k_dense_replace num_mem_blocks"),
    (PAD, "pad_token_id"),
    (BOS, "bos_token_id"),
    (EOS, "eos_token_id"),
)
SMALL: dict[str, Any] = {name: value for value, names in _NAMES for name in names.split()}
SMALL["tie_word_embeddings"] = False
# Everything else of the kind `*_token_id`: ids of images, audio and so on. The prompts hold none of them.
_OTHERS = VOCABULARY - 1
_IDS = ("_token_id", "_token_index")


def shrink(default: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Fields for a small config of the kind of `default`; `changes` goes last, and into nested configs too."""
    nested = {name: getattr(default, name, None) for name in getattr(default, "sub_configs", {})}
    nested = {name: part for name, part in nested.items() if hasattr(part, "to_dict")}
    found: dict[str, Any] = {}
    others = _OTHERS
    for name, value in vars(default).items():
        if name in SMALL:
            if value is not None or name.startswith(("pad", "bos", "eos")):
                found[name] = SMALL[name]
        elif name.endswith(_IDS) and isinstance(value, int) and value >= 3:
            found[name], others = others, others - 1
    found.update(_per_layer(default, found))
    for name, part in nested.items():
        inner = changes.get(name, {})
        found[name] = {"model_type": part.model_type, **shrink(part, inner)} if isinstance(inner, dict) else inner
    found.update({name: value for name, value in changes.items() if name not in nested})
    return {name: value for name, value in found.items() if value is not ...}


def _per_layer(default: Any, small: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry for each layer: one layer for each kind that the default has, and two at least."""
    depth = next((name for name in ("num_hidden_layers", "num_layers") if isinstance(small.get(name), int)), None)
    if depth is None:
        return {}
    count = getattr(default, depth)
    lists = {
        name: list(dict.fromkeys(value))
        for name, value in vars(default).items()
        if isinstance(value, list) and len(value) == count and isinstance(value[0], str)
    }
    layers = max([LAYERS, *map(len, lists.values())])
    found: dict[str, Any] = {depth: layers}
    for name, kinds in lists.items():
        found[name] = [kinds[min(place, len(kinds) - 1)] for place in range(layers)]
    return found
