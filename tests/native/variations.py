"""Tiny random checkpoints of every family that the native runtime knows, and of every variation of its config."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from tests.tiny import BOS, CONTEXT, EOS, HEADS, HIDDEN, INNER, LAYERS, PAD, VOCABULARY, WINDOW, sharpen
from tests.versions import OLDER, as_loaded

_IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_BASE = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INNER,
    "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
}  # fmt: skip
_GROUPED = {**_BASE, "num_key_value_heads": 2}
_GPT = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT, "tie_word_embeddings": False}
_OPT = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "ffn_dim": INNER,
    "word_embed_proj_dim": HIDDEN, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
}  # fmt: skip
_FALCON = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN_MOE = {**_GROUPED, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GPT_OSS = {
    **_GROUPED,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_ALTERNATE = ["sliding_attention", "full_attention"]
_GEMMA = {**_GROUPED, "head_dim": 16, "sliding_window": WINDOW, "layer_types": _ALTERNATE, "query_pre_attn_scalar": 12}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED),
    "mistral": ("Mistral", {**_GROUPED, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2", _GROUPED),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": 16}),
    "gemma": ("Gemma", {**_GROUPED, "head_dim": 16}),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3_text": ("Gemma3", _GEMMA),
    "granite": (
        "Granite",
        {
            **_GROUPED,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.7,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.3,
        },
    ),
    "olmo": ("Olmo", _GROUPED),
    "olmo2": ("Olmo2", _GROUPED),
    "stablelm": ("StableLm", _GROUPED),
    "starcoder2": ("Starcoder2", _GROUPED),
    "phi": ("Phi", _BASE),
    "phi3": ("Phi3", _GROUPED),
    "gpt2": ("GPT2", _GPT),
    "gptj": ("GPTJ", {**_GPT, "rotary_dim": 4}),
    "gpt_neox": ("GPTNeoX", _BASE),
    "opt": ("OPT", _OPT),
    "bloom": (
        "Bloom",
        {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "tie_word_embeddings": False},
    ),
    "falcon": ("Falcon", _FALCON),
    "olmo3": ("Olmo3", {**_GROUPED, "sliding_window": WINDOW, "layer_types": _ALTERNATE}),
    "glm4": ("Glm4", {**_GROUPED, "head_dim": 8}),
    "ernie4_5": ("Ernie4_5", {**_GROUPED, "head_dim": 16}),
    "cohere2": ("Cohere2", {**_GROUPED, "sliding_window": WINDOW, "layer_types": _ALTERNATE}),
    "gpt_bigcode": ("GPTBigCode", _GPT),
    "codegen": ("CodeGen", {**_GPT, "n_head": 8, "rotary_dim": 2}),
    "mpt": ("Mpt", {"d_model": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": CONTEXT}),
    "mixtral": ("Mixtral", {**_GROUPED, "num_local_experts": 5}),
    "qwen3_moe": ("Qwen3Moe", _QWEN_MOE),
    "gpt_oss": ("GptOss", _GPT_OSS),
    "smollm3": ("SmolLM3", {**_GROUPED, "no_rope_layer_interval": 2}),
}


_CLASSES = {"GPT2": "GPT2LMHeadModel"}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


_LONG = {
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}
_LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip

# name -> family, what is different
VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILIES},
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 12}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, a key head for each": ("llama", {"num_key_value_heads": HEADS}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, quick gelu": ("llama", {"hidden_act": "quick_gelu"}),
    "llama, theta": ("llama", _rope("default", rope_theta=500.0)),
    "llama, linear rope": ("llama", _rope("linear", factor=4.0)),
    "llama, dynamic rope": ("llama", {**_rope("dynamic", factor=4.0), "max_position_embeddings": 16}),
    "llama, yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama, yarn with all knobs": (
        "llama",
        _rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=64,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=1.0,
            mscale_all_dim=0.5,
            truncate=False,
        ),
    ),
    "llama, yarn with a factor of attention": (
        "llama",
        _rope("yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.3),
    ),
    "llama, llama3 rope": ("llama", _rope("llama3", **_LLAMA3)),
    "llama, longrope": ("llama", _rope("longrope", factor=4.0, **_LONG)),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, wide heads": ("mistral", {"head_dim": 12}),
    "qwen2, upper windows": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3, upper windows": ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "gemma, tied": ("gemma", {"tie_word_embeddings": True}),
    "gemma, biases": ("gemma", {"attention_bias": True}),
    "gemma2, no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2, low caps": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma2, tied": ("gemma2", {"tie_word_embeddings": True}),
    "gemma3_text, tied": ("gemma3_text", {"tie_word_embeddings": True}),
    "gemma3_text, final cap": ("gemma3_text", {"final_logit_softcapping": 5.0}),
    "gemma3_text, two ropes": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            }
        },
    ),
    "gemma3_text, a pattern that is not read": ("gemma3_text", {"layer_types": None, "_sliding_window_pattern": 2}),
    "gemma3_text, a pattern": ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2}),
    "llama, longrope with a factor of 0": ("llama", _rope("longrope", factor=0, **_LONG)),
    "granite, biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "olmo, clipped": ("olmo", {"clip_qkv": 0.5}),
    "olmo, biases": ("olmo", {"attention_bias": True}),
    "olmo2, biases": ("olmo2", {"attention_bias": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
    "stablelm, normed heads": ("stablelm", {"qk_layernorm": True}),
    "stablelm, biases": ("stablelm", {"use_qkv_bias": True}),
    "stablelm, half turned": ("stablelm", {"partial_rotary_factor": 0.5}),
    "starcoder2, no biases": ("starcoder2", {"use_bias": False}),
    "starcoder2, window": ("starcoder2", {"sliding_window": WINDOW}),
    "starcoder2, tied": ("starcoder2", {"tie_word_embeddings": True}),
    "phi, normed heads": ("phi", {"qk_layernorm": True}),
    "phi, whole heads turned": ("phi", {"partial_rotary_factor": 1.0}),
    "phi, grouped": ("phi", {"num_key_value_heads": 2}),
    "phi3, window": ("phi3", {"sliding_window": WINDOW}),
    "phi3, part of a head": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3, longrope": (
        "phi3",
        {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **_LONG},
            "original_max_position_embeddings": 128,
        },
    ),
    "gpt2, tied": ("gpt2", {"tie_word_embeddings": True}),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, not scaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt2, inner": ("gpt2", {"n_inner": 48}),
    "gptj, inner": ("gptj", {"n_inner": 48}),
    "gptj, whole heads turned": ("gptj", {"rotary_dim": HIDDEN // HEADS}),
    "gpt_neox, one after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox, no biases": ("gpt_neox", {"attention_bias": False}),
    "gpt_neox, whole heads turned": ("gpt_neox", {"rotary_pct": 1.0}),
    "gpt_neox, tied": ("gpt_neox", {"tie_word_embeddings": True}),
    "opt, as 350m": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt, norms after": ("opt", {"do_layer_norm_before": False}),
    "opt, projected": ("opt", {"word_embed_proj_dim": 16}),
    "opt, tied": ("opt", {"tie_word_embeddings": True}),
    "opt, tied and projected": ("opt", {"tie_word_embeddings": True, "word_embed_proj_dim": 16}),
    "opt, no biases": ("opt", {"enable_bias": False}),
    "opt, plain norms": ("opt", {"layer_norm_elementwise_affine": False}),
    "opt, no final norm": ("opt", {"_remove_final_layer_norm": True}),
    "bloom, tied": ("bloom", {"tie_word_embeddings": True}),
    "bloom, three heads": ("bloom", {"n_head": 3, "hidden_size": 24}),
    "falcon, own heads": ("falcon", {"multi_query": False}),
    "falcon, one after the other": ("falcon", {"parallel_attn": False}),
    "falcon, alibi": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon, alibi and one key head": ("falcon", {"alibi": True}),
    "falcon, biases": ("falcon", {"bias": True}),
    "falcon, new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, new with one norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon, tied": ("falcon", {"tie_word_embeddings": True}),
    "olmo3, biases": ("olmo3", {"attention_bias": True}),
    "olmo3, theta": ("olmo3", {"rope_theta": 500.0}),
    "olmo3, yarn": (
        "olmo3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "glm4, no biases": ("glm4", {"attention_bias": False}),
    "glm4, whole heads turned": ("glm4", {"partial_rotary_factor": 1.0}),
    "glm4, tied": ("glm4", {"tie_word_embeddings": True}),
    "ernie4_5, biases": ("ernie4_5", {"use_bias": True}),
    "ernie4_5, tied": ("ernie4_5", {"tie_word_embeddings": True}),
    "cohere2, biases": ("cohere2", {"attention_bias": True}),
    "cohere2, tied": ("cohere2", {"tie_word_embeddings": True, "logit_scale": 0.3}),
    "cohere2, a pattern": ("cohere2", {"layer_types": None, "sliding_window_pattern": 2}),
    "gpt_bigcode, own heads": ("gpt_bigcode", {"multi_query": False}),
    "gpt_bigcode, tied": ("gpt_bigcode", {"tie_word_embeddings": True}),
    "gpt_bigcode, inner": ("gpt_bigcode", {"n_inner": 48, "activation_function": "gelu"}),
    "gpt_bigcode, not scaled": ("gpt_bigcode", {"scale_attn_weights": False}),
    "codegen, four heads": ("codegen", {"n_head": 4, "rotary_dim": 4}),
    "codegen, inner": ("codegen", {"n_inner": 48}),
    "codegen, whole heads turned": ("codegen", {"rotary_dim": HIDDEN // 8}),
    "codegen, tied": ("codegen", {"tie_word_embeddings": True}),
    "mpt, not tied": ("mpt", {"tie_word_embeddings": False}),
    "mpt, three heads": ("mpt", {"n_heads": 3, "d_model": 24}),
    "mpt, twelve heads": ("mpt", {"n_heads": 12, "d_model": 48}),
    "mpt, clipped": ("mpt", {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.2}}),
    "mixtral, window": ("mixtral", {"sliding_window": WINDOW}),
    "mixtral, one of two": ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "mixtral, wide heads": ("mixtral", {"head_dim": 12, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "qwen3_moe, normed": ("qwen3_moe", {"norm_topk_prob": True, "attention_bias": True}),
    "qwen3_moe, windows": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": WINDOW}),
    "qwen3_moe, every other layer": ("qwen3_moe", {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
    "qwen3_moe, listed layers": ("qwen3_moe", {"mlp_only_layers": [1], "hidden_act": "gelu"}),
    "gpt_oss, no biases": ("gpt_oss", {"attention_bias": False}),
    "gpt_oss, low limit": ("gpt_oss", {"swiglu_limit": 0.3, "swiglu_alpha": 1.1}),
    "gpt_oss, usual angles": ("gpt_oss", {"rope_parameters": None}),
    "smollm3, windows": ("smollm3", {"use_sliding_window": True, "sliding_window": WINDOW}),
    "smollm3, listed windows": ("smollm3", {"layer_types": _ALTERNATE, "sliding_window": WINDOW}),
    "smollm3, listed layers": ("smollm3", {"no_rope_layers": [0, 1], "attention_bias": True, "mlp_bias": True}),
    "smollm3, tied": ("smollm3", {"tie_word_embeddings": True}),
}


def model(name: str) -> Any:
    """transformers' model of a variation, float32, in eval mode. Equal names give the same object: do not change it.

    A module keeps dynamic frequencies from its last pass, so a used model is not equal to a new one: with them a new
    object each time.
    """
    family, changes = VARIATIONS[name]
    found = made(family, json.dumps(changes, sort_keys=True))
    rope = json.dumps(found.config.to_dict().get("rope_parameters"))
    return deepcopy(found) if "dynamic" in rope or "longrope" in rope else found


@cache
def made(family: str, changes: str, seed: int = 0) -> Any:
    """A model of a family, with changed fields (JSON)."""
    stem, fields = FAMILIES[family]
    if OLDER and "swiglu_limit" in json.loads(changes):
        pytest.skip("older versions of transformers do not read swiglu_limit, and genctl refuses another one for them")
    config = getattr(transformers, f"{stem}TextConfig" if stem == "Gemma3" else f"{stem}Config")(
        vocab_size=VOCABULARY, **{**fields, **_IDS, **json.loads(changes)}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, _CLASSES.get(stem, f"{stem}ForCausalLM"))(config)
        sharpen(as_loaded(model))
        for name, weight in model.named_parameters():
            if weight.ndim < 2 and weight.requires_grad:  # norms and biases away from their initial values
                weight.data += torch.randn_like(weight) * 0.1
            elif "pos" in name or "wpe" in name:
                weight.data *= 0.5
    return model.eval()
