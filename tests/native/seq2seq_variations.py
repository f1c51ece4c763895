"""Tiny random checkpoints of every native encoder-decoder family, and of every variation of its config."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
import transformers

from tests.tiny import BOS, CONTEXT, EOS, HEADS, HIDDEN, INNER, LAYERS, PAD, VOCABULARY, sharpen
from tests.versions import as_loaded

_IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_T5 = {
    "d_model": HIDDEN,
    "d_kv": 8,
    "d_ff": INNER,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": PAD,
    "relative_attention_num_buckets": 12,  # few, so that tests reach the shared ones and the last
    "relative_attention_max_distance": 16,
}
_BART = {
    "d_model": HIDDEN, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER,
    "max_position_embeddings": CONTEXT, "decoder_start_token_id": EOS, "forced_eos_token_id": None,
}  # fmt: skip

# family -> (config class, model class, config fields)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5),
    "mt5": ("MT5Config", "MT5ForConditionalGeneration", _T5),
    "umt5": ("UMT5Config", "UMT5ForConditionalGeneration", _T5),
    "bart": ("BartConfig", "BartForConditionalGeneration", _BART),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", _BART),
    "marian": ("MarianConfig", "MarianMTModel", _BART),
    "m2m_100": ("M2M100Config", "M2M100ForConditionalGeneration", _BART),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", _BART),
}
_UNEVEN = {
    "encoder_layers": 1, "decoder_layers": 3, "encoder_attention_heads": 2, "decoder_attention_heads": 8,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 72,
}  # fmt: skip
_SIMILAR = ("bart", "mbart", "marian", "pegasus", "m2m_100")

# name -> family, what is different
VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILIES},
    "t5, head not scaled": ("t5", {"tie_word_embeddings": False}),
    "t5, gated": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5, gated silu": ("t5", {"feed_forward_proj": "gated-silu"}),
    "t5, plain gelu": ("t5", {"feed_forward_proj": "gelu"}),
    "t5, uneven": ("t5", {"num_layers": 1, "num_decoder_layers": 3}),
    "t5, one layer": ("t5", {"num_layers": 1}),
    "t5, wide heads": ("t5", {"d_kv": 12, "num_heads": 3}),
    "t5, usual buckets": ("t5", {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}),
    "umt5, plain gelu": ("umt5", {"feed_forward_proj": "gelu", "num_layers": 1, "num_decoder_layers": 3}),
    "mt5, relu": ("mt5", {"feed_forward_proj": "relu"}),
    **{f"{name}, scaled embeddings": (name, {"scale_embedding": True}) for name in _SIMILAR},
    **{f"{name}, not tied": (name, {"tie_word_embeddings": False}) for name in _SIMILAR},
    **{f"{name}, uneven": (name, _UNEVEN) for name in _SIMILAR},
    "bart, one layer": ("bart", {"encoder_layers": 1, "decoder_layers": 1}),
    "m2m_100, not scaled": ("m2m_100", {"scale_embedding": False, "activation_function": "gelu"}),
    "m2m_100, another padding": ("m2m_100", {"pad_token_id": 7}),
    "pegasus, relu": ("pegasus", {"activation_function": "relu"}),
    "marian, silu": ("marian", {"activation_function": "swish"}),
    "marian, two vocabularies": ("marian", {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 280}),
    "marian, two vocabularies, not tied": (
        "marian",
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 280, "tie_word_embeddings": False},
    ),
}


def model(name: str) -> Any:
    """transformers' model of a variation, float32, in eval mode. Equal names give the same object: do not change it."""
    family, changes = VARIATIONS[name]
    return made(family, json.dumps(changes, sort_keys=True))


@cache
def made(family: str, changes: str, seed: int = 0) -> Any:
    """A model of a family, with changed fields (JSON)."""
    config_class, model_class, fields = FAMILIES[family]
    config = getattr(transformers, config_class)(**{"vocab_size": VOCABULARY, **fields, **_IDS, **json.loads(changes)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config)
        sharpen(as_loaded(model))
        for name, weight in model.named_parameters():
            if weight.ndim < 2 and weight.requires_grad:  # norms and biases away from their initial values
                weight.data += torch.randn_like(weight) * 0.1
            elif "embed_positions" in name and weight.requires_grad:
                weight.data *= 0.5
            elif "relative_attention_bias" in name:
                weight.data.normal_(0.0, 1.0)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(0.0, 1.0)
    model.generation_config.decoder_start_token_id = config.decoder_start_token_id
    model.generation_config.forced_eos_token_id = None
    return model.eval()
