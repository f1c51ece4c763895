"""The knobs, each defined once: name, type, bounds, default and help text. Imports no torch.

Names are those of transformers' `GenerationConfig` if it has the knob. TOML presets, `--set`, JSONL `params`,
command-line flags, `--help`, the JSON Schema and `--dry` are all made from these definitions.
"""
# ruff: noqa: RUF009 — `knob` returns a dataclass field, which is what a dataclass default may be

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

DEFAULT_NEW_TOKENS = 256  # if nothing limits the length
MOST_DRAFTED = 20  # tokens in a draft if num_assistant_tokens is not set, as in transformers
GRAMMARS = ("json_schema", "regex", "grammar")  # knobs that constrain the whole text
MOST_MATCHED = 8  # most tokens that prompt lookup matches; transformers matches 2
DRAFTING = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")  # knobs that select a drafter
# tags around a thought: in DeepSeek-R1, Qwen3 and most others; in Claude-like data sets; in Magistral; in Seed-OSS
THOUGHT_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)

Ids: TypeAlias = list[int]
Words: TypeAlias = list[str]
Count: TypeAlias = Annotated[int, Ge(0)]
Number: TypeAlias = Annotated[int, Ge(1)]
Positive: TypeAlias = Annotated[float, Gt(0.0)]
Weight: TypeAlias = Annotated[float, Ge(0.0)]
Share: TypeAlias = Annotated[float, Ge(0.0), Le(1.0)]
Probability: TypeAlias = Annotated[float, Gt(0.0), Le(1.0)]

LENGTH, SAMPLING, PENALTIES, WORDS, STOPPING, CACHE = "Length", "Sampling", "Penalties", "Words", "Stopping", "Cache"
MODEL, RUN = "Model", "Run"
SEARCH = "Search"
STRUCTURE = "Structure"

Fraction: TypeAlias = Annotated[float, Ge(0.0), Lt(1.0)]
Rows: TypeAlias = Annotated[int, Ge(1), Le(1 << 16)]  # all in memory at once; larger numbers are typos
ThreadCount: TypeAlias = Annotated[int, Ge(1), Le(1024)]  # larger numbers are typos
CacheForm: TypeAlias = Literal["dynamic", "static", "quantized", "offloaded", "off"]
Quantized: TypeAlias = Literal["int8", "int4", "gguf"]
Bias: TypeAlias = tuple[Ids, float]  # a sequence of ids, and the number added to the score of its last id


def knob(
    default: Any,
    about: str,
    group: str,
    *,
    flag: str | None = None,
    rare: bool = False,
    neutral: Any = None,
    sampling: bool = False,
    refines: tuple[str, ...] = (),
) -> Any:
    """A field with its help text. `flag` is its command-line name if that differs; --help-all omits `rare` ones.

    `neutral` is the value that changes nothing; `sampling` knobs need `do_sample`. A knob has no effect while all knobs
    that it `refines` are off; for knobs of processors these are in their rows (`config/listed_knobs.py`).
    """
    metadata = {
        "about": about,
        "group": group,
        "flag": flag,
        "rare": rare,
        "neutral": neutral,
        "sampling": sampling,
        "refines": refines,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Generation:
    """All knobs that determine which tokens are generated. Optional knobs that are not set are None."""

    # -- length ------------------------------------------------------------------------------------------------------
    max_new_tokens: Number | None = knob(
        None, f"maximum number of new tokens (default: {DEFAULT_NEW_TOKENS}, or what fits the context)", LENGTH
    )
    max_length: Number | None = knob(None, "maximum number of tokens, prompt included", LENGTH)
    min_new_tokens: Count | None = knob(None, "minimum number of new tokens: no EOS before", LENGTH, neutral=0)
    min_length: Count = knob(0, "minimum number of tokens, prompt included: no EOS before", LENGTH, neutral=0)
    num_return_sequences: Rows = knob(1, "number of sequences per prompt", LENGTH, neutral=1)

    # -- sampling ----------------------------------------------------------------------------------------------------
    do_sample: bool = knob(False, "sample tokens instead of taking the most probable one", SAMPLING)
    temperature: Weight = knob(
        1.0, "below 1 sharpens the distribution, above 1 flattens it; 0 is greedy", SAMPLING, neutral=1.0, sampling=True
    )
    top_k: Count = knob(50, "keep the k most probable tokens; 0 keeps all", SAMPLING, neutral=0, sampling=True)
    top_p: Share = knob(
        1.0, "keep the smallest set of tokens with this total probability", SAMPLING, neutral=1.0, sampling=True
    )
    min_p: Share | None = knob(
        None, "drop tokens below this fraction of the highest probability", SAMPLING, sampling=True
    )
    top_h: Probability | None = knob(
        None,
        "keep the most probable tokens up to this share of the entropy (arXiv:2509.02510)",
        SAMPLING,
        sampling=True,
    )
    typical_p: Probability = knob(
        1.0,
        "keep the most typical tokens with this total probability (arXiv:2202.00666)",
        SAMPLING,
        neutral=1.0,
        sampling=True,
    )
    epsilon_cutoff: Fraction = knob(
        0.0, "drop tokens below this probability; 0 is off (arXiv:2210.15191)", SAMPLING, neutral=0.0, sampling=True
    )
    eta_cutoff: Fraction = knob(
        0.0,
        "like epsilon_cutoff, but lower if entropy is high; 0 is off (arXiv:2210.15191)",
        SAMPLING,
        neutral=0.0,
        sampling=True,
    )
    top_n_sigma: Positive | None = knob(
        None, "keep tokens within n standard deviations of the best score (arXiv:2411.07641)", SAMPLING, sampling=True
    )
    min_k: Weight | None = knob(
        None,
        "keep the best tokens down to the steepest drop of the sorted scores, and no fewer than this over their range; "
        "3 in the paper (arXiv:2604.11012)",
        SAMPLING,
        sampling=True,
        rare=True,
    )
    p_less: Literal["plain", "norm"] | None = knob(
        None,
        "keep tokens at least as probable as it is that two draws are equal; norm keeps more (arXiv:2509.23234)",
        SAMPLING,
        sampling=True,
        rare=True,
    )
    adaptive_target: Share | None = knob(
        None,
        "adaptive-p: hold the mean probability of the written tokens near this (llama.cpp)",
        SAMPLING,
        sampling=True,
        rare=True,
    )
    adaptive_decay: Annotated[float, Ge(0.0), Le(0.99)] = knob(
        0.9, "adaptive-p: how slowly earlier tokens are forgotten", SAMPLING, sampling=True, rare=True
    )
    xtc_probability: Share = knob(
        0.0,
        "XTC: probability of excluding the top choices at a step (oobabooga/text-generation-webui#6335)",
        SAMPLING,
        neutral=0.0,
        sampling=True,
    )
    xtc_threshold: Annotated[float, Gt(0.0), Le(0.5)] = knob(
        0.1,
        "XTC: tokens with at least this probability are top choices; the least probable one is kept",
        SAMPLING,
        sampling=True,
    )
    dynatemp_range: Weight = knob(
        0.0,
        "dynatemp: vary the temperature by up to this much, following the entropy (llama.cpp)",
        SAMPLING,
        neutral=0.0,
        sampling=True,
    )
    dynatemp_exponent: Positive = knob(
        1.0,
        "dynatemp: exponent that maps the normalised entropy to the temperature",
        SAMPLING,
        sampling=True,
        rare=True,
    )
    smoothing_factor: Weight = knob(
        0.0,
        "quadratic sampling: flatten the top choices, penalise the tail (oobabooga/text-generation-webui#5403)",
        SAMPLING,
        neutral=0.0,
        sampling=True,
        rare=True,
    )
    smoothing_curve: Annotated[float, Ge(1.0)] = knob(
        1.0,
        "quadratic sampling: above 1 the tail falls faster (oobabooga/text-generation-webui#5551)",
        SAMPLING,
        sampling=True,
        rare=True,
    )
    mirostat_tau: Positive | None = knob(
        None, "mirostat 2: target surprise in bits; use with top_k = 0 (arXiv:2007.14966)", SAMPLING, sampling=True
    )
    mirostat_eta: Probability = knob(0.1, "mirostat 2: learning rate", SAMPLING, sampling=True, rare=True)
    sampler: Literal["multinomial", "inverse-cdf", "counter"] = knob(
        "multinomial",
        "multinomial matches torch.multinomial on the same device; counter gives the same text on every device; "
        "inverse-cdf is fastest. Each draws different tokens for a seed",
        SAMPLING,
        sampling=True,
    )

    # -- penalties ---------------------------------------------------------------------------------------------------
    repetition_penalty: Positive = knob(
        1.0,
        "above 1 makes tokens that occurred before, prompt included, less likely (arXiv:1909.05858)",
        PENALTIES,
        neutral=1.0,
    )
    encoder_repetition_penalty: Positive = knob(
        1.0, "above 1 makes tokens of the prompt (or source) more likely", PENALTIES, neutral=1.0, rare=True
    )
    presence_penalty: Annotated[float, Ge(-2.0), Le(2.0)] = knob(
        0.0, "subtract this from the score of every token already generated (OpenAI API)", PENALTIES, neutral=0.0
    )
    frequency_penalty: Annotated[float, Ge(-2.0), Le(2.0)] = knob(
        0.0, "subtract this for each time a token was already generated (OpenAI API)", PENALTIES, neutral=0.0
    )
    penalty_last_n: Number | None = knob(
        None,
        "repetition_penalty, presence_penalty, frequency_penalty and DRY look at this many of the last tokens alone "
        "(llama.cpp repeat_last_n)",
        PENALTIES,
        rare=True,
        refines=("repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier"),
    )
    no_repeat_ngram_size: Count = knob(
        0, "never repeat a sequence of n tokens, prompt included; 0 is off", PENALTIES, neutral=0
    )
    encoder_no_repeat_ngram_size: Count = knob(
        0, "never repeat a sequence of n tokens of the prompt (or source); 0 is off", PENALTIES, neutral=0, rare=True
    )
    dry_multiplier: Weight = knob(
        0.0,
        "DRY: strength of the penalty for continuing a repetition (oobabooga/text-generation-webui#5677)",
        PENALTIES,
        neutral=0.0,
    )
    dry_base: Annotated[float, Ge(1.0)] = knob(
        1.75, "DRY: factor by which each repeated token raises the penalty", PENALTIES, rare=True
    )
    dry_allowed_length: Number = knob(2, "DRY: repetitions shorter than this are free", PENALTIES, rare=True)
    dry_sequence_breakers: Words = knob(["\n", ":", '"', "*"], "DRY: texts that end a repetition", PENALTIES, rare=True)
    exponential_decay_length_penalty: tuple[Count, Positive] | None = knob(
        None,
        "[start, factor]: after start new tokens, each token makes EOS more likely by factor",
        PENALTIES,
        rare=True,
    )
    remove_invalid_values: bool = knob(
        False, "replace NaN and infinite scores instead of failing", PENALTIES, neutral=False, rare=True
    )
    renormalize_logits: bool = knob(
        False, "normalise the scores to log-probabilities after all processors", PENALTIES, neutral=False, rare=True
    )
    guidance_scale: Weight | None = knob(
        None,
        "classifier-free guidance: strength, away from the negative prompt (arXiv:2306.17806)",
        PENALTIES,
        neutral=1.0,
    )
    negative_prompt: str | None = knob(
        None,
        "text that guidance_scale steers away from (default: the prompt's last token)",
        PENALTIES,
        refines=("guidance_scale",),
    )
    watermarking_config: dict[str, Any] | None = knob(
        None, "fields of WatermarkingConfig (arXiv:2306.04634) or SynthIDTextWatermarkingConfig", PENALTIES, rare=True
    )

    # -- words -------------------------------------------------------------------------------------------------------
    bad_words: Words | None = knob(
        None, "texts never generated; without a leading space, also excluded after a space", WORDS
    )
    bad_words_ids: list[Ids] | None = knob(None, "sequences of ids never generated", WORDS, rare=True)
    ban: Words | None = knob(None, "a text never generated, in any tokenisation; repeatable", WORDS)
    ban_ignore_case: bool = knob(False, "ban: upper and lower case are the same", WORDS, rare=True)
    logit_bias: dict[str, float] | None = knob(
        None, 'numbers added to scores: {" yes" = 2.0}; "#123" is the token with id 123', WORDS, rare=True
    )
    sequence_bias: list[Bias] | None = knob(
        None,
        "[[ids], bias] pairs: bias is added to the score of the last id where the others precede it",
        WORDS,
        rare=True,
    )
    suppress_tokens: Ids | None = knob(None, "ids never generated", WORDS, rare=True)
    begin_suppress_tokens: Ids | None = knob(None, "ids that the new text may not begin with", WORDS, rare=True)
    forced_bos_token_id: int | None = knob(
        None, "first id after decoder_start_token_id (multilingual encoder-decoders)", WORDS, rare=True
    )
    forced_eos_token_id: int | Ids | None = knob(None, "last id of a text that reaches max_length", WORDS, rare=True)

    # -- structure ---------------------------------------------------------------------------------------------------
    json_schema: dict[str, Any] | bool | str | None = knob(
        None,
        "the text must be JSON of this schema: a file, or the schema itself (an object, true or false)",
        STRUCTURE,
    )
    regex: str | None = knob(None, "the text must match this regular expression as a whole", STRUCTURE)
    grammar: str | None = knob(
        None, "the text must follow this grammar (Lark or GBNF): a file, or the grammar itself", STRUCTURE
    )
    grammar_after: str | None = knob(
        None,
        "text after which the json_schema, regex or grammar begins, such as </think>",
        STRUCTURE,
        rare=True,
        refines=GRAMMARS,
    )
    prefix: str | None = knob(None, "the new text must begin with this", STRUCTURE)
    token_healing: bool = knob(
        False,
        "generate the prompt's last tokens again, so that a longer token can replace them",
        STRUCTURE,
        neutral=False,
    )

    thinking_budget: Count | None = knob(None, "end the model's thought after this many tokens; 0 skips it", STRUCTURE)
    thinking_tags: tuple[str, str] | None = knob(
        None,
        'the tags around a thought, such as ["<think>", "</think>"] (default: known ones that the chat template '
        "or the vocabulary has)",
        STRUCTURE,
        rare=True,
        refines=("thinking_budget", "stop_strings", "stop_regex"),
    )
    thinking_end: str | None = knob(
        None, "the text with which thinking_budget ends a thought (default: the closing tag)", STRUCTURE, rare=True
    )

    # -- search ------------------------------------------------------------------------------------------------------
    num_beams: Rows = knob(1, "hypotheses kept at each step; 1 means no beam search", SEARCH)
    length_penalty: Annotated[float, Ge(-50.0), Le(50.0)] = knob(
        1.0,
        "score = log-probability / length ** length_penalty: above 0 favours long hypotheses, below 0 short ones",
        SEARCH,
    )
    early_stopping: bool | Literal["never"] = knob(
        False,
        "stop at num_beams results (true), or once better ones are unlikely (false) or impossible (never)",
        SEARCH,
        refines=("num_beams",),
    )
    num_beam_groups: Number = knob(
        1, "divide the beams into this many groups; diversity_penalty keeps them different (arXiv:1610.02424)", SEARCH
    )
    diversity_penalty: Weight = knob(
        0.0, "subtract this for each beam of an earlier group that chooses the same token at this step", SEARCH
    )
    force_words: list[str | Words] | None = knob(
        None, "texts that must appear; of an inner list, one must appear", SEARCH
    )
    force_words_ids: list[list[int | Ids]] | None = knob(
        None, "force_words as ids: [[ids], …], or [[[ids], [ids]], …] with alternatives", SEARCH, rare=True
    )
    best_of: Rows | None = knob(
        None,
        "draw this many samples, return the most probable ones (by log-probability / length ** length_penalty)",
        SEARCH,
    )
    mbr_samples: Annotated[int, Ge(2), Le(1 << 16)] | None = knob(
        None, "draw this many samples, return those most similar to the others (arXiv:2005.10283)", SEARCH
    )
    mbr_utility: Literal["chrf"] = knob(
        "chrf", "how mbr_samples measures similarity: chrF (Popović 2015)", SEARCH, refines=("mbr_samples",), rare=True
    )
    penalty_alpha: Share | None = knob(
        None,
        "contrastive search: weight of the penalty for resembling the context; needs top_k (arXiv:2202.06417)",
        SEARCH,
    )

    # -- drafting and contrast ---------------------------------------------------------------------------------------
    assistant_model: str | None = knob(
        None, "a smaller checkpoint that drafts tokens; the model checks them in one pass (arXiv:2211.17192)", SEARCH
    )
    prompt_lookup_num_tokens: Number | None = knob(
        None, "draft up to this many tokens: those that followed the latest tokens earlier in the text", SEARCH
    )
    max_matching_ngram_size: Number = knob(
        MOST_MATCHED,
        "prompt lookup: compare at most this many of the last tokens, and never more than 64, with what came before",
        SEARCH,
        refines=("prompt_lookup_num_tokens",),
        rare=True,
    )
    assistant_early_exit: Number | None = knob(
        None, "draft tokens with this many of the model's first layers (arXiv:2404.16710)", SEARCH
    )
    num_assistant_tokens: Number | None = knob(
        None,
        f"always draft this many tokens (default: as many as pay, at most {MOST_DRAFTED})",
        SEARCH,
        refines=("assistant_model", "assistant_early_exit"),
    )
    assistant_confidence_threshold: Share = knob(
        0.4,
        "an assistant ends its draft after a token with a lower probability than this; 0 never",
        SEARCH,
        refines=("assistant_model", "assistant_early_exit"),
        rare=True,
    )
    assistant_lookbehind: Number = knob(
        10,
        "assistant with another tokenizer: number of its tokens to encode again with each draft",
        SEARCH,
        refines=("assistant_model",),
        rare=True,
    )
    target_lookbehind: Number = knob(
        10,
        "assistant with another tokenizer: number of the model's tokens to encode again for it",
        SEARCH,
        refines=("assistant_model",),
        rare=True,
    )
    dola_layers: Literal["low", "high"] | list[Count] | None = knob(
        None,
        "DoLa: layers to contrast with the last one: low, high or a list such as [1, 3] (arXiv:2309.03883)",
        SEARCH,
    )
    amateur_model: str | None = knob(
        None, "contrastive decoding: a weaker checkpoint to subtract (arXiv:2210.15097)", SEARCH
    )
    contrastive_alpha: Share = knob(
        0.1,
        "contrastive decoding: drop tokens below this fraction of the highest probability",
        SEARCH,
        refines=("amateur_model",),
        rare=True,
    )
    contrastive_beta: Weight | None = knob(
        None,
        "contrastive decoding: use the score (1 + beta) log p - beta log p_amateur (arXiv:2309.09117)",
        SEARCH,
        refines=("amateur_model",),
        rare=True,
    )
    amateur_temperature: Positive = knob(
        1.0, "contrastive decoding: temperature of the amateur", SEARCH, refines=("amateur_model",), rare=True
    )

    # -- stopping ----------------------------------------------------------------------------------------------------
    stop_strings: str | Words | None = knob(
        None,
        "a text that ends a sequence, or a JSON list of them; it is removed unless keep_stop is set",
        STOPPING,
    )
    stop_regex: str | None = knob(
        None, "a regular expression that ends a sequence when it matches in the new text", STOPPING
    )
    stop_in_thought: bool = knob(
        False,
        "let stop_strings and stop_regex end a sequence within a thought, too (see thinking_tags)",
        STOPPING,
        neutral=False,
        refines=("stop_strings", "stop_regex"),
        rare=True,
    )
    keep_stop: bool = knob(False, "keep the stop string, token or match in the text", STOPPING, neutral=False)
    stop_token_ids: Ids | None = knob(None, "more ids that end a sequence", STOPPING, rare=True)
    max_time: Positive | None = knob(None, "maximum number of seconds for a sequence", STOPPING)
    stop_mean_logprob: Annotated[float, Le(0.0)] | None = knob(
        None, "stop when the mean log-probability of the new tokens falls below this (nats)", STOPPING, rare=True
    )
    stop_repeat_ngram: Number | None = knob(
        None, "stop when the same n tokens occur stop_repeat_times times in a row", STOPPING
    )
    stop_repeat_times: Annotated[int, Ge(2)] = knob(
        3, "number of repetitions at which stop_repeat_ngram stops", STOPPING, refines=("stop_repeat_ngram",), rare=True
    )

    # -- special tokens ----------------------------------------------------------------------------------------------
    eos_token_id: int | Ids | None = knob(
        None, "ids that end a sequence (default: the checkpoint's)", STOPPING, rare=True
    )
    pad_token_id: int | None = knob(None, "id used as padding (default: the checkpoint's)", STOPPING, rare=True)
    bos_token_id: int | None = knob(None, "id that begins a sequence (default: the checkpoint's)", STOPPING, rare=True)
    decoder_start_token_id: int | None = knob(
        None, "first decoder id of an encoder-decoder (default: the checkpoint's)", STOPPING, rare=True
    )

    # -- cache -------------------------------------------------------------------------------------------------------
    use_cache: bool = knob(
        True, "cache keys and values instead of computing them again at every step", CACHE, rare=True
    )  # on the command line: --cache off
    cache_implementation: CacheForm = knob(
        "dynamic", "how keys and values are stored; quantized (8 bits) is lossy", CACHE, flag="cache"
    )

    @property
    def structure(self) -> str:
        """The knob that gives the whole text its own structure, so it does not continue the prompt; "" if none."""
        return next((name for name in ("json_schema", "grammar") if getattr(self, name) is not None), "")

    @property
    def is_beam_search(self) -> bool:
        """Whether hypotheses compete with each other."""
        return self.num_beams > 1

    @property
    def several(self) -> dict[str, int]:
        """The knobs that give a prompt several hypotheses, with their values."""
        numbers = {"num_beams": self.num_beams, "num_return_sequences": self.num_return_sequences}
        return {name: number for name, number in numbers.items() if number > 1}

    @property
    def draws(self) -> bool:
        """Whether tokens are sampled, so the seed matters."""
        return self.do_sample and self.temperature > 0


@dataclass(frozen=True)
class Runtime:
    """All knobs that determine where and how tokens are computed."""

    model: str = knob("builtin:stories", "builtin:NAME, a local folder, a GGUF file, or a Hub id", MODEL)
    revision: str | None = knob(None, "branch, tag or commit of a Hub checkpoint", MODEL)
    offline: bool = knob(False, "never use the network", MODEL)
    backend: str | Words | None = knob(
        None, "openai:URL: generate on a running server; repeat to spread prompts", MODEL
    )
    tokenizer: str | None = knob(
        None, "with --backend: tokenise here with this tokenizer (a folder or builtin:NAME), and send ids", MODEL
    )
    device: str = knob("auto", "auto, cpu, cuda, cuda:1, mps, …", MODEL)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = knob(
        "auto", "auto keeps the checkpoint's dtype, but loads float32 as bfloat16 on a CUDA device", MODEL
    )
    device_map: str | None = knob(
        None, "auto: spread the weights over devices, memory and disk (needs accelerate)", MODEL
    )
    max_memory: str | None = knob(None, "with --device-map: 0=20GiB,cpu=64GiB", MODEL, refines=("device_map",))
    offload_folder: str | None = knob(
        None, "with --device-map: folder for weights that fit nowhere else", MODEL, refines=("device_map",), rare=True
    )
    tensor_parallel: bool = knob(False, "split the model over the processes that torchrun started", MODEL)
    adapter: str | None = knob(None, "folder of a PEFT adapter for the model (needs genctl[peft])", MODEL)
    merge_adapter: bool | None = knob(
        None,
        "merge the adapter into the weights, or compute it separately (default: merge if possible)",
        MODEL,
        refines=("adapter",),
        rare=True,
    )
    pack: bool = knob(True, "use genctl's own matrix products (on CPUs, and in steps on GPUs), or torch's", MODEL)
    quantize: Quantized | None = knob(
        None,
        "store the weights of linear layers in 8 or 4 bits: faster, less exact; gguf: require GGUF blocks",
        MODEL,
    )
    dequantize: bool = knob(False, "unpack the blocks of a GGUF file (default: run them packed if possible)", MODEL)
    compile: bool = knob(False, "use torch.compile, and CUDA graphs on a GPU: pays off in long runs on a GPU", MODEL)
    runtime: Literal["auto", "native", "transformers"] = knob(
        "auto",
        "genctl's own forward pass (native), transformers' classes, or auto: native where it supports the model",
        MODEL,
    )
    threads: ThreadCount | None = knob(
        None, "number of CPU threads (default: OMP_NUM_THREADS, else by the work and the free cores)", MODEL
    )
    seed: Annotated[int, Ge(0), Lt(2**64)] | None = knob(
        None, "seed of the first prompt (default: random, always recorded)", RUN
    )
    batch_size: Rows | Literal["auto"] | None = knob(
        None, "prompts decoded together, or auto: as many as fit in memory (default: 1 on a terminal, else 16)", RUN
    )
    truncate: Literal["left", "right", "middle"] | None = knob(
        None, "shorten prompts that are too long: drop tokens on the left, on the right or in the middle", RUN
    )
    row_timeout: Positive | None = knob(
        None, "maximum number of seconds for a row, including prefill and all its sequences", RUN
    )
    draft: bool = knob(
        True, "speculative drafting from earlier text, where it is faster; never changes the output (default: on)", RUN
    )
    draft_corpus: str | None = knob(
        None, "also draft from this file: a text, or earlier results (*.jsonl)", RUN, rare=True
    )
    processed_logprobs: bool = knob(
        False,
        "add to the tokens of records the log-probability after all processors, in the distribution that is drawn from",
        RUN,
        rare=True,
    )
    prompt_cache: str | None = knob(None, "reuse a prompt saved by genctl inspect-cache --save-cache", RUN)
    chat: bool = knob(False, "wrap each prompt in the checkpoint's chat template", RUN)
    system: str | None = knob(None, "system message of the chat; implies --chat", RUN)
    chat_template: str | None = knob(
        None,
        "which of the checkpoint's named chat templates (default: default, or tool_use with tools)",
        RUN,
        rare=True,
    )
    chat_template_kwargs: dict[str, Any] | None = knob(
        None, 'variables for the chat template: {reasoning_effort = "low"}', RUN, rare=True
    )
    enable_thinking: bool | None = knob(None, "the chat template's variable of this name", RUN, rare=True)
    src_lang: str | None = knob(None, "language of the prompts, as a multilingual tokenizer names it", RUN, rare=True)
    tgt_lang: str | None = knob(None, "language to translate into: its token is forced first", RUN, rare=True)
    tools: list[dict[str, Any]] | None = knob(
        None, "functions that the chat template offers to the model, as OpenAI's API describes them", RUN, rare=True
    )

    @property
    def is_chat(self) -> bool:
        """Whether prompts are user messages: with --chat, or with a system message."""
        return self.chat or self.system is not None


@cache
def knobs(kind: type = Generation) -> dict[str, dataclasses.Field[Any]]:
    """Every knob of `Generation` (or `Runtime`) by name, in declaration order."""
    return {item.name: item for item in dataclasses.fields(kind)}


@cache
def hints(kind: type = Generation) -> dict[str, Any]:
    """The type of each knob, with bounds (`Annotated`)."""
    return get_type_hints(kind, include_extras=True)


def spelled(name: str) -> str:
    """A knob's name on the command line, without the leading dashes."""
    item = {**knobs(Generation), **knobs(Runtime)}.get(name)
    return (item is not None and item.metadata["flag"]) or name.replace("_", "-")
