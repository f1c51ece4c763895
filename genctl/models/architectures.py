"""The facts about each architecture, one row each, by `model_type` of config.json. This file does not import torch.

A native family is a function in one of `genctl/native/*_families.py` and a row here. An architecture without a row runs
on transformers' classes; its abilities are measured before use (`genctl/transformers/abilities.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from genctl.native.config import Config, NotNative, read_config
from genctl.native.spec import Found

# Values of `tokenizer` other than the name of a class with a recipe.
BACKEND = "TokenizersBackend"  # transformers registers the class that takes tokenizer.json unchanged
NO_CLASS = "no class"  # transformers registers none: the folder may name one
LEFT_TO_TRANSFORMERS = "left to transformers"  # a class with special rules


@dataclass(frozen=True)
class Native:
    """A family of the native runtime."""

    function: str  # FILE.FUNCTION, in `genctl/native/FILE_families.py`: imported on use
    model_class: str  # transformers' class of its language model, as `architectures` in config.json names it
    context: int | None = None  # `max_position_embeddings` of transformers' class, if config.json has none

    def read(self, config: Config) -> Found:
        """Read a config.json with the family's function. Raises NotNative."""
        file, _, function = self.function.partition(".")
        read: Callable[[Config], Found] = getattr(import_module(f"genctl.native.{file}_families"), function)
        return read(config)


@dataclass(frozen=True)
class Architecture:
    """The facts about one `model_type`."""

    name: str
    native: Native | None = None

    # -- the tokenizer (see `tokenizer_class`) -------------------------------------------------------------------------
    tokenizer: str = ""  # the class that transformers registers for it, or one of the values above; "": unknown
    tokenizer_wins: bool = False  # the registered class is used even if the folder names another one
    reads_tekken: bool = False  # the registered class reads tekken.json if mistral-common is installed

    # -- passes of transformers' classes -------------------------------------------------------------------------------
    # Its passes were compared with `generate()` in this role: cached, batched, padded and reordered (tests/zoo)
    compared: Literal["", "decoder", "encoder-decoder"] = ""
    cache_differs: bool = False  # logits differ with and without a cache: the cache is used, as in `generate()`
    dense: bool = False  # attention from transformers' table of attention functions: a mask may have the final form
    relative: bool = False  # an encoder-decoder whose decoder has relative positions only: its rows may be padded
    # `generate()` reads the full text again when it passes the bound of longrope, because its preparation of inputs
    # drops the cache. genctl does this in `decode.runtime`, and does not call that preparation.
    reads_again: bool = False
    returns: str = ""  # the field of the output that becomes the `past_key_values` of the next pass
    reads_history: bool = False  # its preparation of inputs reads the full text, not only the new tokens
    states_in_modules: bool = False  # the modules hold the recurrent states (see `foreign.ModuleStates`)

    # -- config.json ---------------------------------------------------------------------------------------------------
    unbounded: bool = False  # the length in its config is not a limit: positions are relative or recurrent
    # a `max_position_embeddings` of published files with linear scaling that already includes the factor
    scaled_context: int | None = None
    computes_positions: bool = False  # computes a table of positions when it is built, so no weight bounds its size
    audio_parts: bool = False  # nested configs describe audio models, not the language model
    unfit: str = ""  # why it cannot continue a text, although transformers lists it as a language model


def _family(
    file: str, name: str, model_class: str, tokenizer: str, context: int | None = None, **facts: Any
) -> Architecture:
    """The row of a native family: the function `name` of `genctl/native/FILE_families.py`."""
    compared: Literal["decoder", "encoder-decoder"] = "encoder-decoder" if file == "seq2seq" else "decoder"
    return Architecture(name, Native(f"{file}.{name}", model_class, context), tokenizer, compared=compared, **facts)


_ROWS = (
    # -- decoders with a native family
    _family("llama", "llama", "LlamaForCausalLM", NO_CLASS, 2048, dense=True),
    _family("llama", "mistral", "MistralForCausalLM", BACKEND, 131072, reads_tekken=True, dense=True),
    _family("llama", "qwen2", "Qwen2ForCausalLM", "Qwen2Tokenizer", 32768, tokenizer_wins=True, dense=True),
    _family("llama", "qwen3", "Qwen3ForCausalLM", "Qwen2Tokenizer", 32768, dense=True),
    _family("derived", "gemma", "GemmaForCausalLM", "GemmaTokenizer", 8192, dense=True),
    _family("derived", "gemma2", "Gemma2ForCausalLM", "GemmaTokenizer", 8192),
    _family("derived", "gemma3_text", "Gemma3ForCausalLM", "GemmaTokenizer", 131072, dense=True, scaled_context=131072),
    _family("llama", "granite", "GraniteForCausalLM", BACKEND, 2048, dense=True),
    _family("llama", "olmo", "OlmoForCausalLM", "GPTNeoXTokenizer", 2048, dense=True),
    _family("llama", "olmo2", "Olmo2ForCausalLM", BACKEND, 2048, dense=True),
    _family("llama", "stablelm", "StableLmForCausalLM", BACKEND, 4096, dense=True),
    _family("llama", "starcoder2", "Starcoder2ForCausalLM", "GPT2Tokenizer", 4096, dense=True),
    _family("llama", "phi", "PhiForCausalLM", "GPT2Tokenizer", 2048, dense=True),
    _family("llama", "phi3", "Phi3ForCausalLM", BACKEND, 4096, tokenizer_wins=True, reads_again=True),
    _family("gpt", "gpt2", "GPT2LMHeadModel", "GPT2Tokenizer", dense=True),
    _family("gpt", "gptj", "GPTJForCausalLM", "GPT2Tokenizer", computes_positions=True),
    _family("gpt", "gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXTokenizer", 2048, dense=True),
    _family("gpt", "opt", "OPTForCausalLM", "GPT2Tokenizer", 2048, dense=True),
    _family("gpt", "bloom", "BloomForCausalLM", NO_CLASS, unbounded=True),
    _family("gpt", "falcon", "FalconForCausalLM", NO_CLASS, 2048),
    _family("llama", "smollm3", "SmolLM3ForCausalLM", NO_CLASS, 32768),
    _family("llama", "olmo3", "Olmo3ForCausalLM", BACKEND, 2048),
    _family("llama", "glm4", "Glm4ForCausalLM", BACKEND, 131072),
    _family("llama", "ernie4_5", "Ernie4_5ForCausalLM", BACKEND, 131072, tokenizer_wins=True),
    _family("llama", "cohere2", "Cohere2ForCausalLM", "CohereTokenizer", 8192),
    _family("gpt", "gpt_bigcode", "GPTBigCodeForCausalLM", BACKEND),
    _family("gpt", "codegen", "CodeGenForCausalLM", "GPT2Tokenizer", computes_positions=True),
    _family("gpt", "mpt", "MptForCausalLM", "GPTNeoXTokenizer", unbounded=True),
    # -- decoders with experts
    _family("derived", "mixtral", "MixtralForCausalLM", BACKEND, 131072),
    _family("derived", "qwen3_moe", "Qwen3MoeForCausalLM", "Qwen2Tokenizer", 32768),
    _family("derived", "gpt_oss", "GptOssForCausalLM", NO_CLASS, 131072),
    # -- encoder-decoders with a native family
    _family("seq2seq", "t5", "T5ForConditionalGeneration", "T5Tokenizer", dense=True, relative=True, unbounded=True),
    _family("seq2seq", "mt5", "MT5ForConditionalGeneration", "T5Tokenizer", dense=True, relative=True, unbounded=True),
    _family("seq2seq", "bart", "BartForConditionalGeneration", "RobertaTokenizer", 1024, dense=True),
    _family("seq2seq", "mbart", "MBartForConditionalGeneration", LEFT_TO_TRANSFORMERS, 1024, dense=True),
    _family("seq2seq", "marian", "MarianMTModel", LEFT_TO_TRANSFORMERS, 1024, dense=True, computes_positions=True),
    _family(
        "seq2seq",
        "pegasus",
        "PegasusForConditionalGeneration",
        "PegasusTokenizer",
        1024,
        dense=True,
        computes_positions=True,
    ),
    _family("seq2seq", "umt5", "UMT5ForConditionalGeneration", BACKEND, relative=True, unbounded=True),
    _family(
        "seq2seq", "m2m_100", "M2M100ForConditionalGeneration", LEFT_TO_TRANSFORMERS, 1024, computes_positions=True
    ),
    # -- architectures on transformers' classes with further facts
    Architecture("cpmant", cache_differs=True, reads_history=True),
    Architecture("ctrl", compared="decoder", computes_positions=True),
    Architecture("falcon_mamba", compared="decoder", unbounded=True),
    Architecture("fsmt", cache_differs=True),
    Architecture("gemma4_assistant", unfit="drafts for another model, whose keys and values it reads"),
    Architecture("gemma4_unified_assistant", unfit="drafts for another model, whose keys and values it reads"),
    Architecture("longt5", compared="encoder-decoder", relative=True, unbounded=True),
    Architecture("mamba", compared="decoder", unbounded=True),
    Architecture("mamba2", compared="decoder", unbounded=True),
    Architecture("moshi", compared="decoder", audio_parts=True),
    Architecture("musicgen", unfit="writes codes of sound"),
    Architecture("musicgen_melody", unfit="writes codes of sound"),
    Architecture("nllb-moe", compared="encoder-decoder", computes_positions=True),
    Architecture("pegasus_x", compared="encoder-decoder", computes_positions=True),
    Architecture("phi4_multimodal", compared="decoder", reads_again=True),
    Architecture("phimoe", compared="decoder", reads_again=True),
    Architecture("prophetnet", cache_differs=True),
    Architecture("recurrent_gemma", compared="decoder", states_in_modules=True),
    Architecture("reformer", returns="past_buckets_states"),
    Architecture("switch_transformers", compared="encoder-decoder", relative=True, unbounded=True),
    Architecture("voxtral_realtime", unfit="does not run without sound"),
    Architecture("xglm", compared="decoder", computes_positions=True),
    Architecture("xlnet", reads_history=True, returns="mems"),
)

# Architectures without further facts that were compared with `generate()`.
_DECODERS = """
afmoe apertus arcee aria_text axk1 bailing_hybrid beam bert bert-generation big_bird biogpt bitnet camembert cohere
cohere2_moe cohere_compass_text cwm data2vec-text dbrx deepseek_v2 deepseek_v3 diffllama doge dots1 electra
ernie ernie4_5_moe exaone4 exaone_moe flex_olmo flint fuyu gemma3 gemma3n_text gemma4 gemma4_text
gemma4_unified gemma4_unified_text glm glm4_moe glm4_moe_lite got_ocr2 gpt_neo gpt_neox_japanese
granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense
hunyuan_v1_moe hy_v3 hyperclovax inkling2_text inkling_text internlm3 iquestcoder jais2 jamba jetmoe kimi_linear
kolibri1 laguna lfm2 lfm2_moe lfm3 llama4_text longcat_flash megatron-bert mellum mimo_v2_flash minicpm3 minimax_m2
minimax_m3_vl_text ministral ministral3 modernbert-decoder nanochat nemotron olmo_hybrid olmoe persimmon
qwen2_moe qwen3_5_moe_text qwen3_5_text qwen3_next rembert roberta roberta-prelayernorm roc_bert seed_oss
solar_open vaultgemma xlm-roberta xlm-roberta-xl xmod youtu zaya
"""
_ENCODER_DECODERS = """
bigbird_pegasus blenderbot blenderbot-small encoder-decoder led moss_transcribe_diarize mvp plbart seamless_m4t
seamless_m4t_v2
"""

ROWS = (
    *_ROWS,
    *(Architecture(name, compared="decoder") for name in _DECODERS.split()),
    *(Architecture(name, compared="encoder-decoder") for name in _ENCODER_DECODERS.split()),
)
ARCHITECTURES = {row.name: row for row in ROWS}


def facts_of(model_type: object) -> Architecture:
    """The row of a `model_type`; a row without facts if it has none or is not a string."""
    row = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    return row or Architecture("")


def read_native(config: dict[str, Any]) -> Found:
    """The native spec of a checkpoint with this config.json, and the names of its tensors.

    Raises NotNative with the reason.
    """
    native = facts_of(config.get("model_type")).native
    if native is None:
        raise NotNative(f"{config.get('model_type')!r:.80} is not a family that the native runtime knows")
    return read_config(config, native.read, native.context)
