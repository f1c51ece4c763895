"""Checkpoints with weights drawn from the parameters' names: every version of transformers makes the same ones.

The goldens come from a version of transformers that still had these searches; the tests run with the installed one.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers

VOCABULARY = 120
_IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# architecture -> (config class, model class, fields)
_RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 128,
        },
    ),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 128,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": None,
        },
    ),
}

ARCHITECTURES = tuple(_RECIPES)
START = {"bart": 2}

PROMPTS: tuple[tuple[int, ...], ...] = tuple(
    tuple(np.random.RandomState(length).randint(3, VOCABULARY, length).tolist()) for length in (4, 9, 6)
)


@cache
def made(arch: str) -> Any:
    """The model in eval mode, float32. Matrices are scaled to make texts varied; see `tests.tiny`."""
    config_class, model_class, fields = _RECIPES[arch]
    config = getattr(transformers, config_class)(**_IDS, tie_word_embeddings=False, **fields)
    model = getattr(transformers, model_class)(config).eval()
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                continue
            cross = "encoder_attn" in name
            embedding = any(part in name for part in ("embed", "shared", "wte", "wpe"))
            scale = 1.0 if embedding else (0.6 if cross else 1.5) / weight.shape[-1] ** 0.5
            if weight is head:
                scale = 4.0 / weight.shape[-1] ** 0.5
            drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(weight.shape)) * scale
            weight.copy_(torch.from_numpy(drawn.astype(np.float32)))
        if arch == "bart":  # one table under three names
            shared = model.model.shared.weight
            model.model.encoder.embed_tokens.weight = shared
            model.model.decoder.embed_tokens.weight = shared
    return model
