"""Tiny random checkpoints of every architecture that transformers' tables of text models name.

A name is `causal/TYPE` or `seq2seq/TYPE`, as AutoModelForCausalLM and AutoModelForSeq2SeqLM know it; `TYPE+WHAT` is a
further checkpoint of the same architecture, for another kind of positions or of layers.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests import tiny
from tests.tiny import BOS, EOS, HIDDEN, PAD, WINDOW
from tests.zoo.overrides import OVERRIDES
from tests.zoo.seeds import SEEDS
from tests.zoo.shrink import shrink
from tests.zoo.weights import draw

TABLES: dict[str, dict[str, str]] = {
    "causal": dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "seq2seq": dict(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
}
_AUTO: dict[str, Any] = {"causal": transformers.AutoModelForCausalLM, "seq2seq": transformers.AutoModelForSeq2SeqLM}
NAMED: tuple[str, ...] = tuple(f"{kind}/{name}" for kind, table in TABLES.items() for name in table)

# What transformers itself cannot build from a config alone, or cannot continue a text with.
NOT_TEXT: dict[str, str] = {
    "causal/gemma3n": "its vision tower is a timm model, and building it needs timm and pillow",
    "causal/gemma4_assistant": "drafts for another model, whose keys and values it reads",
    "causal/gemma4_unified_assistant": "drafts for another model, whose keys and values it reads",
    "causal/musicgen": "the table names a decoder of audio codes, which the config of this type does not fit",
    "causal/musicgen_melody": "the table names a decoder of audio codes, which the config of this type does not fit",
    "seq2seq/voxtral_realtime": "forward refuses to run without audio",
}
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24):
    NOT_TEXT["causal/llama4"] = "its forward asks its text model for image outputs"

_PARTS = frozenset(
    f"causal/{name}" for name in ("dots3_note", "emu3", "llama4", "mllama", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
)

_RULES = (  # of generation configs that classes bring along
    *("begin_suppress_tokens", "suppress_tokens", "encoder_no_repeat_ngram_size"),
    *("forced_bos_token_id", "forced_eos_token_id", "max_length", "max_new_tokens", "min_length", "num_beams"),
)
_ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 8}
_LONGROPE = {
    "original_max_position_embeddings": 16,  # within what is written, other factors take over
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 16,
    },
}  # fmt: skip
# Further checkpoints: positions and layers that the defaults of an architecture do not show.
VARIANTS: dict[str, dict[str, Any]] = {
    "causal/falcon+alibi": {"alibi": True},
    "causal/falcon+new": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "causal/gemma4_text+experts": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
    },
    "causal/granitemoehybrid+rope": {"position_embedding_type": "rope"},
    "causal/llama+dynamic": {"rope_parameters": {**_ROPE, "rope_type": "dynamic", "factor": 4.0}},
    "causal/llama+llama3": {
        "rope_parameters": {
            **_ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        }
    },
    "causal/llama+yarn": {"rope_parameters": {**_ROPE, "rope_type": "yarn", "factor": 4.0}},
    "causal/mistral+full": {"sliding_window": None},
    "causal/opt+post": {"do_layer_norm_before": False, "word_embed_proj_dim": HIDDEN // 2},
    "causal/phi3+longrope": _LONGROPE,
    "causal/phi4_multimodal+longrope": _LONGROPE,
    "causal/qwen2+sliding": {
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
    },
    "seq2seq/t5+gated": {"feed_forward_proj": "gated-gelu"},
    "seq2seq/led+long": {"attention_window": [4, 4]},
}  # fmt: skip
NAMES: tuple[str, ...] = tuple(sorted(({*NAMED} - {*NOT_TEXT}) | {*VARIANTS}))


def split(name: str) -> tuple[str, str]:
    """`causal/falcon+alibi` -> ("causal", "falcon")."""
    kind, _, rest = name.partition("/")
    return kind, rest.partition("+")[0]


def auto_class(name: str) -> Any:
    """The class of transformers that loads the checkpoint."""
    return _AUTO[split(name)[0]]


def make(name: str, folder: Path) -> Path:
    """Write the checkpoint `name` and the tiny tokenizer to `folder`, and return the folder. Always the same bytes."""
    return tiny.save(build(name), folder)


@cache
def build(name: str) -> Any:
    """The model, in eval mode: do not change it."""
    if name == "seq2seq/encoder-decoder":
        return tiny.tiny("encoder_decoder")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(SEEDS.get(name, 0))
        model = _whole(name).from_config(config(name)).eval()
        draw(model)
    return _with_ids(model)


def _whole(name: str) -> Any:
    """The class to build with: where the causal one is the text part of a model of several parts, that whole model.

    That is what lies on the Hub, and what AutoModelForCausalLM takes its part from.
    """
    return transformers.AutoModelForImageTextToText if name in _PARTS else auto_class(name)


def config(name: str) -> Any:
    """The small config of `name`."""
    kind, model_type = split(name)
    made = CONFIG_MAPPING[model_type]
    default = made()
    changes = {**OVERRIDES.get(model_type, {}), **VARIANTS.get(name, {})}
    if kind == "causal" and getattr(default, "is_decoder", None) is False:
        changes["is_decoder"] = True  # an encoder's architecture, with a causal mask
    return made(**shrink(default, changes))


def _with_ids(model: Any) -> Any:
    """One pad, BOS and EOS, and no further rules that a class of config brings along."""
    generation = model.generation_config
    for each in (model.config, model.config.get_text_config(decoder=True), generation):
        each.pad_token_id, each.bos_token_id, each.eos_token_id = PAD, BOS, EOS
    if model.config.is_encoder_decoder:
        start = getattr(model.config, "decoder_start_token_id", None)
        start = PAD if start is None else start
        model.config.decoder_start_token_id = generation.decoder_start_token_id = start
    for rule in _RULES:
        setattr(generation, rule, None)
    return model
