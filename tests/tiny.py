"""Tiny random checkpoints with peaked distributions, made on the fly: one for each architecture that we promise.

Random weights at their usual scale give almost flat distributions, whose argmax flips with the order of a sum. Here the
weights are drawn so that logits have a standard deviation of about 4: the gap between the best and the second token is
nearly always above 1e-2, and greedy text wanders instead of repeating one token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast

from tests.versions import as_loaded

VOCABULARY = 300
PAD, BOS, EOS = 0, 1, 2
CONTEXT = 256
WINDOW = 8  # of every sliding-window layer
HIDDEN, LAYERS, HEADS, INNER = 32, 2, 4, 64

_IDS = {"pad_token_id": PAD, "bos_token_id": BOS}
_ROPE = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INNER,
    "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
}  # fmt: skip
_GROUPED = {**_ROPE, "num_key_value_heads": 2}
_SLIDING = ["sliding_attention", "full_attention"]
_SEQ2SEQ = {
    "d_model": HIDDEN, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER,
    "max_position_embeddings": CONTEXT, "decoder_start_token_id": EOS, "forced_eos_token_id": None,
}  # fmt: skip

# architecture -> (config class, model class, config fields)
_RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel",
     {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT, "tie_word_embeddings": False}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _ROPE),
    "gptj": (
        "GPTJConfig",
        "GPTJForCausalLM",
        {
            "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT, "rotary_dim": 4,
            "tie_word_embeddings": False,
        },
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_GROUPED, "sliding_window": WINDOW}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM",
     {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM",
     {**_GROUPED, "head_dim": 8, "sliding_window": WINDOW, "layer_types": _SLIDING, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM",
     {**_GROUPED, "head_dim": 8, "sliding_window": WINDOW, "layer_types": _SLIDING, "query_pre_attn_scalar": 8}),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "hidden_size": HIDDEN, "word_embed_proj_dim": HIDDEN, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "ffn_dim": INNER, "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": False,
        },
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM",
     {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "tie_word_embeddings": False}),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {
            "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
            "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
        },
    ),
    "phi": ("PhiConfig", "PhiForCausalLM", _ROPE),
    "mamba": ("MambaConfig", "MambaForCausalLM",
     {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "state_size": 8, "tie_word_embeddings": False}),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {
            **_GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
            "expert_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": HIDDEN,
            "d_kv": 8,
            "d_ff": INNER,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "tie_word_embeddings": False,  # here it only means: do not rescale the head's input
            "decoder_start_token_id": PAD,
        },
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", _SEQ2SEQ),
    "marian": ("MarianConfig", "MarianMTModel", {**_SEQ2SEQ, "decoder_start_token_id": PAD}),
}  # fmt: skip

SEQ2SEQ: tuple[str, ...] = ("t5", "bart", "marian", "encoder_decoder")
CAUSAL: tuple[str, ...] = tuple(name for name in _RECIPES if name not in SEQ2SEQ)
ARCHITECTURES: tuple[str, ...] = CAUSAL + SEQ2SEQ

_TEXT = (
    "the cat sat on the mat and the dog sat on the log. once upon a time there was a little girl who had a red ball. "
    "she threw the ball to the dog and the dog ran after it. what a day, said the girl, and they all went home. "
) * 3


def tiny(
    arch: str, folder: Path | None = None, *, seed: int = 0, eos: int | Sequence[int] = EOS, **changes: Any
) -> Any:
    """A tiny model of `arch` in eval mode, float32, on the CPU. Equal arguments give the same object: do not change it.

    Vocabulary 300; pad 0, bos 1, eos 2 in `config` and `generation_config`. `eos` may be several ids. `changes` are
    further fields of the config. With `folder` the checkpoint and its tokenizer are also written there.
    """
    ids = eos if isinstance(eos, int) else tuple(eos)
    model = _made(arch, seed, ids, json.dumps(changes, sort_keys=True))
    if folder is not None:
        save(model, folder)
    return model


def save(model: Any, folder: Path) -> Path:
    """Write `model` (safetensors) and the tiny tokenizer to `folder`, and return the folder."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def checkpoint(arch: str, folder: Path, **options: Any) -> Path:
    """`tiny(arch)` written to `folder`; returns the folder."""
    tiny(arch, folder, **options)
    return folder


@cache
def tokenizer(chat_template: str | None = None) -> Any:
    """A byte-level BPE tokenizer of exactly 300 tokens with <pad> 0, <bos> 1, <eos> 2; adds no special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([_TEXT], trainer)
    assert bpe.get_vocab_size() == VOCABULARY
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=CONTEXT
    )
    made.chat_template = chat_template
    return made


@cache
def _made(arch: str, seed: int, eos: int | tuple[int, ...], changes: str) -> Any:
    ids = {**_IDS, "eos_token_id": eos if isinstance(eos, int) else list(eos)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _encoder_decoder(ids) if arch == "encoder_decoder" else _plain(arch, {**ids, **json.loads(changes)})
        sharpen(as_loaded(model))
    for config in (model.config, model.generation_config):
        for name, value in ids.items():
            setattr(config, name, value)
    start = getattr(model.config, "decoder_start_token_id", None)
    if model.config.is_encoder_decoder:
        model.generation_config.decoder_start_token_id = start
        model.generation_config.forced_eos_token_id = None
    return model.eval()


def _plain(arch: str, fields: dict[str, Any]) -> Any:
    config_class, model_class, recipe = _RECIPES[arch]
    config = getattr(transformers, config_class)(**{"vocab_size": VOCABULARY, **recipe, **fields})
    make: Callable[..., Any] = getattr(transformers, model_class)
    return make(config)


def _encoder_decoder(ids: dict[str, Any]) -> Any:
    shape = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INNER}
    encoder = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, max_position_embeddings=CONTEXT, pad_token_id=PAD, **shape
    )
    decoder = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=CONTEXT,
        add_cross_attention=True, is_decoder=True, tie_word_embeddings=False, **ids,
    )  # fmt: skip
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, tie_word_embeddings=False)
    config.vocab_size = VOCABULARY
    config.decoder_start_token_id = BOS
    return transformers.EncoderDecoderModel(config)


def sharpen(model: Any) -> None:
    """Redraw all matrices: embeddings N(0, 1), linear maps that keep the scale, a head whose logits spread by 4."""
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if (
                weight is head
                or weight.ndim < 2
                or not weight.requires_grad
                or name.endswith(("A_log", "conv1d.weight"))
            ):
                continue
            embedding = any(part in name for part in ("embed", "shared", "wte", "wpe"))
            weight.normal_(0.0, 1.0 if embedding else gain(name, model.config.model_type) / weight.shape[-1] ** 0.5)
        head.normal_(0.0, 4.0 / head.shape[-1] ** 0.5)


def gain(name: str, model_type: str) -> float:
    """The spread of a linear map's output relative to its input, by its name."""
    # Cross-attention adds nearly the same vector at every step: at full strength the same token would always win.
    cross = any(part in name.lower() for part in ("encdecattention", "encoder_attn", "crossattention"))
    if model_type != "t5":
        return 0.6 if cross else 1.5
    # T5 ties its head to the embeddings, so quiet layers would echo their input; and it does not scale its attention.
    if name.endswith((".q.weight", ".k.weight")):
        return 0.8
    return 1.0 if cross else 3.0
