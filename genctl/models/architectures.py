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

# Values of `tokenizer` that are not the name of a class with a recipe.
BACKEND = "TokenizersBackend"  # transformers registers the class that takes tokenizer.json unchanged
NO_CLASS = "no class"  # transformers registers none: the folder may name one
LEFT_TO_TRANSFORMERS = "left to transformers"  # a class with special rules


@dataclass(frozen=True)
class Native:
    """A family of the native runtime."""

    function: str  # FILE.FUNCTION, in `genctl/native/FILE_families.py`: imported where it is used
    model_class: str  # transformers' class of its language model, as `architectures` in config.json names it
    context: int | None = None  # `max_position_embeddings` of transformers' class, where config.json has none

    def read(self, config: Config) -> Found:
        """What the family's function reads in a config.json. Raises NotNative."""
        file, _, function = self.function.partition(".")
        read: Callable[[Config], Found] = getattr(import_module(f"genctl.native.{file}_families"), function)
        return read(config)


@dataclass(frozen=True)
class Architecture:
    """The facts about one `model_type`. Raises ValueError for a native family without a tokenizer."""

    name: str
    native: Native | None = None

    # -- the tokenizer (see `tokenizer_class`) -------------------------------------------------------------------------
    tokenizer: str = ""  # the class that transformers registers for it, or one of the values above; "": not known
    tokenizer_wins: bool = False  # the registered class is used even if the folder names another one
    reads_tekken: bool = False  # the registered class reads tekken.json if mistral-common is installed

    # -- passes of transformers' classes -------------------------------------------------------------------------------
    # Its passes were compared with `generate()` in this role: cached, batched, padded and reordered (tests/zoo)
    compared: Literal["", "decoder", "encoder-decoder"] = ""
    cache_differs: bool = False  # logits differ with and without a cache: the cache is used, as in `generate()`
    dense: bool = False  # attention from transformers' table of attention functions: a mask may have the final form
    relative: bool = False  # an encoder-decoder whose decoder has relative positions only: its rows may be padded
    # `generate()` reads the full text again when it passes the bound of longrope: its preparation of inputs drops the
    # cache. genctl does this in `decode.runtime`, and does not call that preparation.
    reads_again: bool = False
    returns: str = ""  # the field of the output whose states are the `past_key_values` of the next pass
    reads_history: bool = False  # its preparation of inputs reads the full text, not only the new tokens
    states_in_modules: bool = False  # recurrent states are kept in the modules (see `model_states`)

    # -- config.json ---------------------------------------------------------------------------------------------------
    unbounded: bool = False  # the length in its config is not a limit: positions are relative or recurrent
    computes_positions: bool = False  # computes a table of positions when it is built: no weight bounds its size
    audio_parts: bool = False  # nested configs describe audio models, not the language model
    unfit: str = ""  # why it cannot continue a text, although transformers lists it among language models

    def __post_init__(self) -> None:
        if self.native is not None and not self.tokenizer:
            raise ValueError(
                f"the native family {self.name} has no tokenizer: name the class that transformers registers for it, "
                "or BACKEND, NO_CLASS or LEFT_TO_TRANSFORMERS"
            )


_ROWS = (
    # -- decoders with a native family
    Architecture(
        "llama",
        native=Native("llama.llama", "LlamaForCausalLM", context=2048),
        tokenizer=NO_CLASS,
        compared="decoder",
        dense=True,
    ),
    Architecture(
        "mistral",
        native=Native("llama.mistral", "MistralForCausalLM", context=131072),
        tokenizer=BACKEND,
        compared="decoder",
        reads_tekken=True,
        dense=True,
    ),
    Architecture(
        "qwen2",
        native=Native("llama.qwen2", "Qwen2ForCausalLM", context=32768),
        tokenizer="Qwen2Tokenizer",
        compared="decoder",
        tokenizer_wins=True,
        dense=True,
    ),
    Architecture(
        "qwen3",
        native=Native("llama.qwen3", "Qwen3ForCausalLM", context=32768),
        tokenizer="Qwen2Tokenizer",
        compared="decoder",
        dense=True,
    ),
    Architecture(
        "gemma",
        native=Native("gemma.gemma", "GemmaForCausalLM", context=8192),
        tokenizer="GemmaTokenizer",
        compared="decoder",
        dense=True,
    ),
    Architecture(
        "gemma2",
        native=Native("gemma.gemma2", "Gemma2ForCausalLM", context=8192),
        tokenizer="GemmaTokenizer",
        compared="decoder",
    ),
    Architecture(
        "gemma3_text",
        native=Native("gemma.gemma3_text", "Gemma3ForCausalLM", context=131072),
        tokenizer="GemmaTokenizer",
        compared="decoder",
        dense=True,
    ),
    Architecture(
        "granite",
        native=Native("llama.granite", "GraniteForCausalLM", context=2048),
        tokenizer=BACKEND,
        compared="decoder",
        dense=True,
    ),
    Architecture(
        "olmo",
        native=Native("llama.olmo", "OlmoForCausalLM", context=2048),
        tokenizer="GPTNeoXTokenizer",
        compared="decoder",
        dense=True,
    ),
    Architecture(
        "olmo2",
        native=Native("llama.olmo2", "Olmo2ForCausalLM", context=2048),
        tokenizer=BACKEND,
        compared="decoder",
        dense=True,
    ),
    Architecture(
        "stablelm",
        native=Native("llama.stablelm", "StableLmForCausalLM", context=4096),
        tokenizer=BACKEND,
        compared="decoder",
        dense=True,
    ),
    Architecture(
        "starcoder2",
        native=Native("llama.starcoder2", "Starcoder2ForCausalLM", context=4096),
        tokenizer="GPT2Tokenizer",
        compared="decoder",
        dense=True,
    ),
    Architecture(
        "phi",
        native=Native("llama.phi", "PhiForCausalLM", context=2048),
        tokenizer="GPT2Tokenizer",
        compared="decoder",
        dense=True,
    ),
    Architecture(
        "phi3",
        native=Native("llama.phi3", "Phi3ForCausalLM", context=4096),
        tokenizer=BACKEND,
        compared="decoder",
        tokenizer_wins=True,
        reads_again=True,
    ),
    Architecture(
        "gpt2", native=Native("gpt.gpt2", "GPT2LMHeadModel"), tokenizer="GPT2Tokenizer", compared="decoder", dense=True
    ),
    Architecture(
        "gptj",
        native=Native("gpt.gptj", "GPTJForCausalLM"),
        tokenizer="GPT2Tokenizer",
        compared="decoder",
        computes_positions=True,
    ),
    Architecture(
        "gpt_neox",
        native=Native("gpt.gpt_neox", "GPTNeoXForCausalLM", context=2048),
        tokenizer="GPTNeoXTokenizer",
        compared="decoder",
        dense=True,
    ),
    Architecture(
        "opt",
        native=Native("gpt.opt", "OPTForCausalLM", context=2048),
        tokenizer="GPT2Tokenizer",
        compared="decoder",
        dense=True,
    ),
    Architecture(
        "bloom", native=Native("gpt.bloom", "BloomForCausalLM"), tokenizer=NO_CLASS, compared="decoder", unbounded=True
    ),
    Architecture(
        "falcon", native=Native("gpt.falcon", "FalconForCausalLM", context=2048), tokenizer=NO_CLASS, compared="decoder"
    ),
    Architecture(
        "smollm3",
        native=Native("llama.smollm3", "SmolLM3ForCausalLM", context=32768),
        tokenizer=NO_CLASS,
        compared="decoder",
    ),
    Architecture(
        "olmo3", native=Native("llama.olmo3", "Olmo3ForCausalLM", context=2048), tokenizer=BACKEND, compared="decoder"
    ),
    Architecture(
        "glm4", native=Native("llama.glm4", "Glm4ForCausalLM", context=131072), tokenizer=BACKEND, compared="decoder"
    ),
    Architecture(
        "ernie4_5",
        native=Native("llama.ernie4_5", "Ernie4_5ForCausalLM", context=131072),
        tokenizer=BACKEND,
        tokenizer_wins=True,
        compared="decoder",
    ),
    Architecture(
        "cohere2",
        native=Native("llama.cohere2", "Cohere2ForCausalLM", context=8192),
        tokenizer="CohereTokenizer",
        compared="decoder",
    ),
    Architecture(
        "gpt_bigcode", native=Native("gpt.gpt_bigcode", "GPTBigCodeForCausalLM"), tokenizer=BACKEND, compared="decoder"
    ),
    Architecture(
        "codegen",
        native=Native("gpt.codegen", "CodeGenForCausalLM"),
        tokenizer="GPT2Tokenizer",
        compared="decoder",
        computes_positions=True,
    ),
    Architecture(
        "mpt",
        native=Native("gpt.mpt", "MptForCausalLM"),
        tokenizer="GPTNeoXTokenizer",
        compared="decoder",
        unbounded=True,
    ),
    # -- decoders with experts
    Architecture(
        "mixtral",
        native=Native("expert.mixtral", "MixtralForCausalLM", context=131072),
        tokenizer=BACKEND,
        compared="decoder",
    ),
    Architecture(
        "qwen3_moe",
        native=Native("expert.qwen3_moe", "Qwen3MoeForCausalLM", context=32768),
        tokenizer="Qwen2Tokenizer",
        compared="decoder",
    ),
    Architecture(
        "gpt_oss",
        native=Native("expert.gpt_oss", "GptOssForCausalLM", context=131072),
        tokenizer=NO_CLASS,
        compared="decoder",
    ),
    # -- encoder-decoders with a native family
    Architecture(
        "t5",
        native=Native("seq2seq.t5", "T5ForConditionalGeneration"),
        tokenizer="T5Tokenizer",
        compared="encoder-decoder",
        dense=True,
        relative=True,
        unbounded=True,
    ),
    Architecture(
        "mt5",
        native=Native("seq2seq.mt5", "MT5ForConditionalGeneration"),
        tokenizer="T5Tokenizer",
        compared="encoder-decoder",
        dense=True,
        relative=True,
        unbounded=True,
    ),
    Architecture(
        "bart",
        native=Native("seq2seq.bart", "BartForConditionalGeneration", context=1024),
        tokenizer="RobertaTokenizer",
        compared="encoder-decoder",
        dense=True,
    ),
    Architecture(
        "mbart",
        native=Native("seq2seq.mbart", "MBartForConditionalGeneration", context=1024),
        tokenizer=LEFT_TO_TRANSFORMERS,
        compared="encoder-decoder",
        dense=True,
    ),
    Architecture(
        "marian",
        native=Native("seq2seq.marian", "MarianMTModel", context=1024),
        tokenizer=LEFT_TO_TRANSFORMERS,
        compared="encoder-decoder",
        dense=True,
        computes_positions=True,
    ),
    Architecture(
        "pegasus",
        native=Native("seq2seq.pegasus", "PegasusForConditionalGeneration", context=1024),
        tokenizer="PegasusTokenizer",
        compared="encoder-decoder",
        dense=True,
        computes_positions=True,
    ),
    Architecture(
        "umt5",
        native=Native("seq2seq.umt5", "UMT5ForConditionalGeneration"),
        tokenizer=BACKEND,
        compared="encoder-decoder",
        relative=True,
        unbounded=True,
    ),
    Architecture(
        "m2m_100",
        native=Native("seq2seq.m2m_100", "M2M100ForConditionalGeneration", context=1024),
        tokenizer=LEFT_TO_TRANSFORMERS,
        compared="encoder-decoder",
        computes_positions=True,
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
