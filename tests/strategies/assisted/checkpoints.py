"""Deep, narrow checkpoints for DoLa. Weights are drawn by parameter name: the same in every version of transformers."""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers

VOCABULARY, DEPTH, WIDTH = 120, 6, 32

_PLAIN = {
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_GPT2 = {"n_embd": WIDTH, "n_layer": DEPTH, "n_head": 4, "n_positions": 128}

# name -> (config class, model class, fields); "tied" uses the embeddings as the head
_RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**_GPT2, "tie_word_embeddings": False}),
    "gpt2-tied": ("GPT2Config", "GPT2LMHeadModel", {**_GPT2, "tie_word_embeddings": True}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**_PLAIN, "tie_word_embeddings": False}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_GROUPED, "tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", "LlamaForCausalLM", {**_GROUPED, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_GROUPED, "sliding_window": 8, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_GROUPED, "tie_word_embeddings": False}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**_GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 64, "tie_word_embeddings": False},
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "hidden_size": WIDTH,
            "word_embed_proj_dim": WIDTH,
            "num_hidden_layers": DEPTH,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
        },
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"hidden_size": WIDTH, "n_layer": DEPTH, "n_head": 4, "tie_word_embeddings": False},
    ),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**_PLAIN, "tie_word_embeddings": False}),
    "phi": ("PhiConfig", "PhiForCausalLM", {**_PLAIN, "tie_word_embeddings": False}),
}

NAMES = tuple(_RECIPES)
PROMPTS: tuple[tuple[int, ...], ...] = tuple(
    tuple(np.random.RandomState(length).randint(3, VOCABULARY, length).tolist()) for length in (5, 11)
)


@cache
def made(name: str) -> Any:
    """The model in eval mode, float32. Its matrices are scaled to make texts varied; see `tests.tiny`."""
    config_class, model_class, fields = _RECIPES[name]
    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, config_class)(**ids, **fields, attn_implementation="eager")
    model = getattr(transformers, model_class)(config).eval()
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for place, weight in model.named_parameters():
            if weight.ndim < 2:
                continue
            embedding = any(part in place for part in ("embed", "wte", "wpe"))
            # an embedding table that is also the head keeps the head's scale
            scale = 4.0 / WIDTH**0.5 if weight is head else 1.0 if embedding else 1.2 / weight.shape[-1] ** 0.5
            key = "head" if weight is head else place  # its name depends on the version
            drawn = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(tuple(weight.shape)) * scale
            weight.copy_(torch.from_numpy(drawn.astype(np.float32)))
    return model
