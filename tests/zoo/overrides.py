"""What single architectures need besides small numbers: sizes that hang together, and one layer of each kind."""

from __future__ import annotations

from typing import Any

from tests.tiny import BOS, EOS, HEADS, HIDDEN, INNER, PAD, VOCABULARY, WINDOW

DROP: Any = ...  # leave this field to the config class

# Multi-head latent attention: every head has its own keys, whose size is that of their two parts together.
_LATENT = {"num_key_value_heads": HEADS, "head_dim": DROP}
_RECURRENT_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_INDEXED = {**_LATENT, "index_topk": 6}
# Three of four layers have keys of their own; the last two share them.
_SHARED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
# Layers with a window have sizes of their own, under these names.
_DOTS3 = {
    **_INDEXED, "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS, "swa_q_lora_rank": 8,
    "swa_kv_lora_rank": 8, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
}  # fmt: skip
_QFORMER = {"hidden_size": HIDDEN, "encoder_hidden_size": HIDDEN, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
_SPEECH = {
    "encoder_config": {"num_layers": 1, "hidden_dim": HIDDEN, "input_dim": 16, "output_dim": 8, "context_size": 8},
    "projector_config": _QFORMER,
    "has_lora_adapter": False,
}
_ALIKE = {"num_key_value_heads": HEADS}  # their projections are stored as one tensor of three equal parts
_CONVOLUTIONS = {"num_filters": 2, "downsampling_ratios": [2], "depths": [1, 1]}
_LOCAL = {"hidden_size_global": HIDDEN}

OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _INDEXED,
    "bailing_hybrid": {**_LATENT, "qk_rope_head_dim": 4},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "use_cache": False,  # its cache asks the config for a number of layers that it does not have
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3, 4],
        "encoder_config": _LOCAL,
        "decoder_config": _LOCAL,
        "local_attention_window_len": WINDOW,
    },
    "cohere_compass_text": {
        **_SLIDING,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": INNER, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "sarvam_mla": _LATENT,
    # a layer before the loop, one inside it, one behind
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1, "layer_types": ["full_attention"] * 3},
    "deepseek_v32": _INDEXED,
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "num_hidden_layers": 3,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "index_topk": 3,
        "o_groups": 2,
    },
    "dots1": {**_SLIDING, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN, "downsample_hidden_size": 8},
    },
    "dots3_note_text": _DOTS3,
    "emu3": {
        "vocabulary_map": {"<image>": VOCABULARY - 1},
        "vq_config": {
            "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": [],
            "codebook_size": 8, "embed_dim": 4,
        },
    },
    "encoder-decoder": {},  # built in recipes.py from its two halves
    "gemma3n_text": {**_SHARED, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma4_text": _SHARED,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _INDEXED,
    "granitemoehybrid": _RECURRENT_FIRST,
    "hrm_text": {"num_layers_per_stack": DROP, "num_hidden_layers": 1},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2},
    "hy_v4": {"num_key_value_heads": HEADS, "index_topk": 6},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": _LATENT,
    "laguna": _SLIDING,
    "lfm2": {"full_attn_idxs": [1], "layer_types": DROP},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4": {
        "vision_config": {
            "image_size": 28,
            "projector_input_dim": HIDDEN,
            "projector_output_dim": HIDDEN,
            "vision_output_dim": HIDDEN,
        }
    },
    "longcat_flash": {"num_key_value_heads": HEADS, "head_dim": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mellum": _SLIDING,
    "minicpm3": _LATENT,
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2},
    "ministral": {"head_dim": 8, **_SLIDING},
    "nemo_speechlm": {
        "audio_config": {
            "asr_config": _ALIKE,
            "diarization_config": {
                "audio_config": {"num_hidden_layers": 1, **_ALIKE},
                "head_config": {"audio_hidden_size": HIDDEN},
            },
        },
        "word_timestamp_config": {"blank_token_id": 0, **_ALIKE},
    },
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "phi4_multimodal": {
        "audio_config": {"num_blocks": 1, "ext_pw_out_channel": HIDDEN, "depthwise_separable_out_channel": HIDDEN},
        "vision_config": {"image_size": 28, "crop_size": 28},
    },
    "qwen3_asr": {"audio_config": {"output_dim": HIDDEN, "downsample_hidden_size": 8, "num_mel_bins": 16}},
    "qwen4_exp_text": {
        "eos_token_id": EOS, "head_dim": 8, "ple_layer_ids": [1], "ple_embed_dim": HIDDEN, "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True, "attn_layers": ["local", "lsh"], "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 2,
        "hash_seed": 0,
    },
    "roc_bert": {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY, "concat_input": True},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite_speech": _SPEECH,
    "granite_speech_plus": _SPEECH,
    "t5": {"decoder_start_token_id": PAD, "bos_token_id": BOS},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": _CONVOLUTIONS,
        "semantic_tokenizer_encoder_config": _CONVOLUTIONS,
    },
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xlm": {"mask_token_id": 3, "causal": True},  # what it reads of the token to come; pad would be masked away
    "xmod": {"default_language": "en_XX"},
    "youtu": _LATENT,
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "adapter_rank": 8},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": WINDOW},
}  # fmt: skip
OVERRIDES["qwen4_exp"] = {"text_config": OVERRIDES["qwen4_exp_text"]}
