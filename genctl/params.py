"""The knobs, said once: name, type, bound, default and meaning. No torch.

Names are those of transformers' `GenerationConfig` wherever it has the knob. TOML presets, `--set`, JSONL `params`,
command-line flags, `--help`, the JSON Schema and `--dry` are all read from here.
"""
# ruff: noqa: RUF009 — `knob` returns a dataclass field, which is what a dataclass default may be

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

Ids: TypeAlias = list[int]
Words: TypeAlias = list[str]
Probability: TypeAlias = Annotated[float, Gt(0.0), Le(1.0)]

LENGTH, SAMPLING, PENALTIES, WORDS, STOPPING, CACHE = "Length", "Sampling", "Penalties", "Words", "Stopping", "Cache"
MODEL, RUN = "Model", "Run"
SEARCH = "Search"
STRUCTURE = "Structure"

Fraction: TypeAlias = Annotated[float, Ge(0.0), Lt(1.0)]
Rows: TypeAlias = Annotated[int, Ge(1), Le(1 << 16)]  # held in memory all at once: more are a slip of the keyboard
Bias: TypeAlias = tuple[Ids, float]  # a sequence of ids and what is added to the score of its last one


def knob(
    default: Any, about: str, group: str, *, flag: bool | str = True, neutral: Any = None, sampling: bool = False
) -> Any:
    """A field with its meaning. `flag` is its command-line name where that is another, or False for none.

    `neutral` is the setting that changes nothing; `sampling` knobs need `do_sample`.
    """
    metadata = {"about": about, "group": group, "flag": flag, "neutral": neutral, "sampling": sampling}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Generation:
    """Everything that decides which tokens are written. Unset optional knobs are None."""

    # -- length ------------------------------------------------------------------------------------------------------
    max_new_tokens: Annotated[int, Ge(1)] | None = knob(
        None, "most new tokens (256, or what the context holds)", LENGTH
    )
    max_length: Annotated[int, Ge(1)] | None = knob(None, "most tokens, prompt included", LENGTH)
    min_new_tokens: Annotated[int, Ge(0)] | None = knob(None, "no EOS before this many new tokens", LENGTH, neutral=0)
    min_length: Annotated[int, Ge(0)] = knob(0, "no EOS before this length, prompt included", LENGTH, neutral=0)
    num_return_sequences: Rows = knob(1, "sequences returned for each prompt", LENGTH, neutral=1)

    # -- sampling ----------------------------------------------------------------------------------------------------
    do_sample: bool = knob(False, "draw tokens instead of taking the most probable", SAMPLING)
    temperature: Annotated[float, Ge(0.0)] = knob(
        1.0, "below 1 sharpens, above 1 flattens; 0 means greedy", SAMPLING, neutral=1.0, sampling=True
    )
    top_k: Annotated[int, Ge(0)] = knob(
        50, "keep the k most probable tokens; 0 keeps all", SAMPLING, neutral=0, sampling=True
    )
    top_p: Annotated[float, Ge(0.0), Le(1.0)] = knob(
        1.0, "keep the smallest set with this much probability", SAMPLING, neutral=1.0, sampling=True
    )
    min_p: Annotated[float, Ge(0.0), Le(1.0)] | None = knob(
        None, "drop tokens below this fraction of the best one's probability", SAMPLING, sampling=True
    )

    top_h: Probability | None = knob(
        None, "keep the best tokens up to this share of the entropy (arXiv:2509.02510)", SAMPLING, sampling=True
    )
    typical_p: Probability = knob(
        1.0,
        "keep the most typical tokens with this much probability (arXiv:2202.00666)",
        SAMPLING,
        neutral=1.0,
        sampling=True,
    )
    epsilon_cutoff: Fraction = knob(
        0.0, "drop tokens below this probability; 0 is off (arXiv:2210.15191)", SAMPLING, neutral=0.0, sampling=True
    )
    eta_cutoff: Fraction = knob(
        0.0,
        "epsilon cutoff that gives way when entropy is high; 0 is off (arXiv:2210.15191)",
        SAMPLING,
        neutral=0.0,
        sampling=True,
    )
    top_n_sigma: Annotated[float, Gt(0.0)] | None = knob(
        None, "keep tokens within n standard deviations of the best score (arXiv:2411.07641)", SAMPLING, sampling=True
    )
    xtc_probability: Annotated[float, Ge(0.0), Le(1.0)] = knob(
        0.0,
        "how often to exclude the top choices (XTC, oobabooga/text-generation-webui#6335)",
        SAMPLING,
        neutral=0.0,
        sampling=True,
    )
    xtc_threshold: Annotated[float, Gt(0.0), Le(0.5)] = knob(
        0.1,
        "XTC: tokens at least this probable are top choices; the least probable of them stays",
        SAMPLING,
        sampling=True,
    )
    dynatemp_range: Annotated[float, Ge(0.0)] = knob(
        0.0,
        "temperature varies this much around `temperature`, with the entropy (llama.cpp)",
        SAMPLING,
        neutral=0.0,
        sampling=True,
    )
    dynatemp_exponent: Annotated[float, Gt(0.0)] = knob(
        1.0, "dynatemp: how normalised entropy maps to temperature", SAMPLING, sampling=True
    )
    mirostat_tau: Annotated[float, Gt(0.0)] | None = knob(
        None, "mirostat 2: target surprise in bits (arXiv:2007.14966); set top_k = 0 with it", SAMPLING, sampling=True
    )
    mirostat_eta: Annotated[float, Gt(0.0), Le(1.0)] = knob(0.1, "mirostat 2: learning rate", SAMPLING, sampling=True)
    sampler: Literal["multinomial", "inverse-cdf"] = knob(
        "multinomial",
        "how a token is drawn: multinomial as torch does, inverse-cdf faster with other luck",
        SAMPLING,
        sampling=True,
    )

    # -- penalties ---------------------------------------------------------------------------------------------------
    repetition_penalty: Annotated[float, Gt(0.0)] = knob(
        1.0, "above 1 makes tokens already present less likely (arXiv:1909.05858)", PENALTIES, neutral=1.0
    )
    encoder_repetition_penalty: Annotated[float, Gt(0.0)] = knob(
        1.0, "above 1 makes tokens of the prompt (or source) more likely", PENALTIES, neutral=1.0
    )
    presence_penalty: Annotated[float, Ge(-2.0), Le(2.0)] = knob(
        0.0, "subtracted from the score of tokens already written (OpenAI API)", PENALTIES, neutral=0.0
    )
    frequency_penalty: Annotated[float, Ge(-2.0), Le(2.0)] = knob(
        0.0, "subtracted for each time a token was already written (OpenAI API)", PENALTIES, neutral=0.0
    )
    no_repeat_ngram_size: Annotated[int, Ge(0)] = knob(
        0, "no sequence of n tokens twice, prompt included; 0 is off", PENALTIES, neutral=0
    )
    encoder_no_repeat_ngram_size: Annotated[int, Ge(0)] = knob(
        0, "no sequence of n tokens of the prompt (or source) again; 0 is off", PENALTIES, neutral=0
    )
    dry_multiplier: Annotated[float, Ge(0.0)] = knob(
        0.0,
        "DRY: strength of the penalty on continuing a repetition (oobabooga/text-generation-webui#5677)",
        PENALTIES,
        neutral=0.0,
    )
    dry_base: Annotated[float, Ge(1.0)] = knob(1.75, "DRY: growth of the penalty with each repeated token", PENALTIES)
    dry_allowed_length: Annotated[int, Ge(1)] = knob(2, "DRY: repetitions shorter than this are free", PENALTIES)
    dry_sequence_breakers: Words = knob(
        ["\n", ":", '"', "*"], "DRY: texts across which nothing counts as a repetition", PENALTIES
    )
    exponential_decay_length_penalty: tuple[Annotated[int, Ge(0)], Annotated[float, Gt(0.0)]] | None = knob(
        None, "[start, factor]: EOS grows more likely by factor per token after start new tokens", PENALTIES, flag=False
    )
    remove_invalid_values: bool = knob(
        False, "replace NaN and infinite scores instead of failing", PENALTIES, neutral=False
    )
    renormalize_logits: bool = knob(
        False, "make log-probabilities of the scores after all processors", PENALTIES, neutral=False
    )
    guidance_scale: Annotated[float, Ge(0.0)] | None = knob(
        None, "classifier-free guidance: away from the negative prompt (arXiv:2306.17806)", PENALTIES, neutral=1.0
    )
    negative_prompt: str | None = knob(
        None, "what guidance_scale leads away from (default: the prompt's last token alone)", PENALTIES
    )
    watermarking_config: dict[str, Any] | None = knob(
        None, "fields of WatermarkingConfig (arXiv:2306.04634) or SynthIDTextWatermarkingConfig", PENALTIES, flag=False
    )

    # -- words -------------------------------------------------------------------------------------------------------
    bad_words: Words | None = knob(
        None, "texts never written; without a leading space: neither bare nor after a space", WORDS
    )
    bad_words_ids: list[Ids] | None = knob(None, "sequences of ids never written", WORDS, flag=False)
    logit_bias: dict[str, float] | None = knob(
        None, 'added to scores: {" yes" = 2.0}; "#123" is the token with id 123', WORDS, flag=False
    )
    sequence_bias: list[Bias] | None = knob(
        None, "[[ids], bias] pairs: bias is added to the last id once the others are there", WORDS, flag=False
    )
    suppress_tokens: Ids | None = knob(None, "ids never written", WORDS, flag=False)
    begin_suppress_tokens: Ids | None = knob(None, "ids that no text begins with", WORDS, flag=False)
    forced_bos_token_id: int | None = knob(
        None, "first id written after decoder_start_token_id (multilingual encoder-decoders)", WORDS, flag=False
    )
    forced_eos_token_id: int | Ids | None = knob(None, "last id where max_length is reached", WORDS, flag=False)

    # -- structure ---------------------------------------------------------------------------------------------------
    json_schema: dict[str, Any] | bool | str | None = knob(
        None, "write JSON that this schema allows: a file, or the schema itself (an object, true or false)", STRUCTURE
    )
    regex: str | None = knob(None, "write a text that this regular expression matches as a whole", STRUCTURE)
    grammar: str | None = knob(
        None, "write a text of this grammar: a file in Lark's syntax, or the grammar itself", STRUCTURE
    )
    prefix: str | None = knob(None, "what the new text must begin with", STRUCTURE)
    token_healing: bool = knob(
        False, "take back the prompt's last tokens if a longer token could cover them", STRUCTURE, neutral=False
    )

    # -- search ------------------------------------------------------------------------------------------------------
    num_beams: Rows = knob(1, "hypotheses kept alive at each step; 1 is no beam search", SEARCH)
    length_penalty: Annotated[float, Ge(-50.0), Le(50.0)] = knob(
        1.0, "score = total / length ** length_penalty: above 0 favours long hypotheses, below 0 short ones", SEARCH
    )
    early_stopping: bool | Literal["never"] = knob(
        False, "true: stop at num_beams results; false: when better ones are unlikely; never: when impossible", SEARCH
    )
    num_beam_groups: Annotated[int, Ge(1)] = knob(
        1, "groups that the beams are divided into, kept apart by diversity_penalty (arXiv:1610.02424)", SEARCH
    )
    diversity_penalty: Annotated[float, Ge(0.0)] = knob(
        0.0, "subtracted for each beam of an earlier group that chose the same token at this step", SEARCH
    )
    stochastic_beams: bool = knob(
        False, "with do_sample: beams drawn without replacement by Gumbel top-k (arXiv:1903.06059)", SEARCH
    )
    force_words: list[str | Words] | None = knob(
        None, "texts that must appear; an inner list holds alternatives, one of which must", SEARCH
    )
    force_words_ids: list[list[int | Ids]] | None = knob(
        None, "the same as ids: [[ids], …], or [[[ids], [ids]], …] where there are alternatives", SEARCH, flag=False
    )
    best_of: Rows | None = knob(
        None, "draw so many samples, return those with the highest log-probability / length ** length_penalty", SEARCH
    )
    mbr_samples: Annotated[int, Ge(2), Le(1 << 16)] | None = knob(
        None, "draw so many samples, return those most like all of them (arXiv:2005.10283)", SEARCH
    )
    mbr_utility: Literal["chrf"] = knob("chrf", "how mbr_samples measures likeness: chrF (Popović 2015)", SEARCH)
    penalty_alpha: Annotated[float, Ge(0.0), Le(1.0)] | None = knob(
        None, "contrastive search: weight of not resembling the context; needs top_k (arXiv:2202.06417)", SEARCH
    )

    # -- drafting and contrast ---------------------------------------------------------------------------------------
    assistant_model: str | None = knob(
        None,
        "a smaller checkpoint that writes ahead; the model checks its tokens in one pass (arXiv:2211.17192)",
        SEARCH,
    )
    prompt_lookup_num_tokens: Annotated[int, Ge(1)] | None = knob(
        None, "write ahead so many tokens that followed the newest ones where they stood before", SEARCH
    )
    max_matching_ngram_size: Annotated[int, Ge(1)] = knob(
        2, "prompt lookup: how many of the newest tokens are looked for, at most", SEARCH
    )
    assistant_early_exit: Annotated[int, Ge(1)] | None = knob(
        None, "the model's own first layers, so many, write ahead (arXiv:2404.16710)", SEARCH
    )
    num_assistant_tokens: Annotated[int, Ge(1)] = knob(20, "tokens that an assistant writes ahead at a time", SEARCH)
    num_assistant_tokens_schedule: Literal["constant", "heuristic", "heuristic_transient"] = knob(
        "constant",
        "either heuristic: 2 more after a draft accepted whole, else 1 less; each prompt begins anew",
        SEARCH,
    )
    assistant_confidence_threshold: Annotated[float, Ge(0.0), Le(1.0)] = knob(
        0.4, "an assistant stops after a token that it gave less than this; 0 never stops", SEARCH
    )
    assistant_lookbehind: Annotated[int, Ge(1)] = knob(
        10, "assistant with another tokenizer: its tokens encoded anew with each draft", SEARCH
    )
    target_lookbehind: Annotated[int, Ge(1)] = knob(
        10, "assistant with another tokenizer: the model's tokens encoded anew for it", SEARCH
    )
    dola_layers: Literal["low", "high"] | list[Annotated[int, Ge(0)]] | None = knob(
        None, "DoLa: layers that the last one is contrasted with; low, high or [1, 3] (arXiv:2309.03883)", SEARCH
    )
    amateur_model: str | None = knob(
        None, "contrastive decoding: a worse checkpoint whose faults are subtracted (arXiv:2210.15097)", SEARCH
    )
    contrastive_alpha: Annotated[float, Ge(0.0), Le(1.0)] = knob(
        0.1, "contrastive decoding: tokens below this fraction of the best one's probability are out", SEARCH
    )
    contrastive_beta: Annotated[float, Ge(0.0)] | None = knob(
        None, "contrastive decoding: score (1 + beta) log p - beta log p_amateur instead (arXiv:2309.09117)", SEARCH
    )
    amateur_temperature: Annotated[float, Gt(0.0)] = knob(
        1.0, "contrastive decoding: the amateur's own temperature", SEARCH
    )

    # -- stopping ----------------------------------------------------------------------------------------------------
    stop_strings: str | Words | None = knob(None, "texts that end a sequence; cut off unless keep_stop", STOPPING)
    stop_regex: str | None = knob(
        None, "a regular expression that ends a sequence where the new text matches", STOPPING
    )
    keep_stop: bool = knob(False, "keep the stop string, token or match in the text", STOPPING, neutral=False)
    stop_token_ids: Ids | None = knob(None, "further ids that end a sequence", STOPPING, flag=False)
    max_time: Annotated[float, Gt(0.0)] | None = knob(None, "most seconds spent on a sequence", STOPPING)
    stop_mean_logprob: Annotated[float, Le(0.0)] | None = knob(
        None, "stop where the mean log-probability of the new tokens falls below this (nats)", STOPPING
    )
    stop_repeat_ngram: Annotated[int, Ge(1)] | None = knob(
        None, "stop where the same n tokens follow each other stop_repeat_times times", STOPPING
    )
    stop_repeat_times: Annotated[int, Ge(2)] = knob(3, "repetitions that stop_repeat_ngram allows no more", STOPPING)

    # -- special tokens ----------------------------------------------------------------------------------------------
    eos_token_id: int | Ids | None = knob(
        None, "ids that end a sequence (default: the checkpoint's)", STOPPING, flag=False
    )
    pad_token_id: int | None = knob(None, "id used as padding (default: the checkpoint's)", STOPPING, flag=False)
    bos_token_id: int | None = knob(None, "id that begins a sequence (default: the checkpoint's)", STOPPING, flag=False)
    decoder_start_token_id: int | None = knob(
        None, "first decoder id of an encoder-decoder (default: the checkpoint's)", STOPPING, flag=False
    )

    # -- cache -------------------------------------------------------------------------------------------------------
    use_cache: bool = knob(True, "keep keys and values instead of reading everything again", CACHE)
    cache_implementation: Literal["dynamic", "static", "quantized", "offloaded", "off"] = knob(
        "dynamic", "how keys and values are kept; quantized (8 bits) is lossy", CACHE, flag="cache"
    )


@dataclass(frozen=True)
class Runtime:
    """Everything that decides where the tokens are computed and what is asked of the checkpoint."""

    model: str = knob("builtin:stories", "builtin:NAME, a local folder, or a Hub id", MODEL)
    revision: str | None = knob(None, "branch, tag or commit of a Hub checkpoint", MODEL)
    offline: bool = knob(False, "never reach for the network", MODEL)
    device: str = knob("auto", "auto, cpu, cuda, cuda:1, mps, …", MODEL)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = knob(
        "auto", "auto keeps the checkpoint's; on a CUDA device float32 is read as bfloat16", MODEL
    )
    device_map: str | None = knob(None, "auto spreads the weights over devices, memory and disk (accelerate)", MODEL)
    max_memory: str | None = knob(None, "with --device-map: 0=20GiB,cpu=64GiB", MODEL)
    offload_folder: str | None = knob(None, "with --device-map: where weights that fit nowhere else are kept", MODEL)
    pack: bool = knob(True, "on the CPU, lay weights out for speed where several rows run", MODEL)
    quantize: Literal["int8", "int4"] | None = knob(
        None, "on the CPU, hold the weights of linear layers in 8 or 4 bits: faster, less exact", MODEL
    )
    compile: bool = knob(
        False, "run the steps through torch.compile, and as CUDA graphs on a GPU: worth it for long runs there", MODEL
    )
    runtime: Literal["auto", "native", "transformers"] = knob(
        "auto",
        "who computes: genctl's own forward pass (native), transformers' classes, or auto: native where it is known",
        MODEL,
    )
    seed: Annotated[int, Ge(0), Lt(2**64)] | None = knob(
        None, "seed of the first prompt (default: random, always recorded)", RUN
    )
    batch_size: Rows | Literal["auto"] | None = knob(
        None, "prompts decoded at once, or auto: what memory holds (default: 1 on a terminal, else 16)", RUN
    )
    truncate: Literal["left", "right", "middle"] | None = knob(
        None, "take so much from a prompt, there, that it fits the context together with max_new_tokens", RUN
    )
    row_timeout: Annotated[float, Gt(0.0)] | None = knob(
        None, "most seconds spent on a prompt, from its first token read to all its sequences", RUN
    )
    prompt_cache: str | None = knob(None, "reuse a prompt that genctl inspect-cache --save-cache has written", RUN)
    chat: bool = knob(False, "wrap each prompt in the checkpoint's chat template", RUN)
    system: str | None = knob(None, "system message of the chat; implies --chat", RUN)


@cache
def knobs(kind: type = Generation) -> dict[str, dataclasses.Field[Any]]:
    """Every knob of `Generation` (or `Runtime`) by name, in declaration order."""
    return {item.name: item for item in dataclasses.fields(kind)}


@cache
def hints(kind: type = Generation) -> dict[str, Any]:
    """The type of each knob, bounds (`Annotated`) included."""
    return get_type_hints(kind, include_extras=True)


def spelled(name: str) -> str:
    """A knob as it is written on the command line, without the dashes before it."""
    item = {**knobs(Generation), **knobs(Runtime)}.get(name)
    flag = item.metadata["flag"] if item is not None else True
    return flag if isinstance(flag, str) else name.replace("_", "-")


_EVENTS = "genctl reports events instead of tensors; use --scores, --top-logprobs or --events"

# Fields of transformers' GenerationConfig that genctl has no use for, each with the reason.
REFUSED: dict[str, str] = {
    "output_attentions": "genctl does not return attention maps; use transformers for those",
    "output_hidden_states": "genctl does not return hidden states; use transformers for those",
    "output_scores": _EVENTS,
    "output_logits": _EVENTS,
    "return_dict_in_generate": _EVENTS,
    "use_mtp": "multi-token prediction heads are not driven by genctl; see the assisted strategies",
    "speculation_type": "names a drafting scheme inside transformers' own loop, which genctl does not run",
    "is_assistant": "an internal mark that transformers puts on draft models; name the draft model instead",
    "assistant_ensemble_weight": "bends the result towards the assistant; genctl's assisted text is the model's own",
    "cache_config": "fields of transformers' cache classes; genctl makes its caches itself",
    "max_cache_len": "only sizes transformers' static caches; genctl's caches grow with the text",
    "compile_config": "genctl chooses torch.compile's options itself; compile = true asks for it",
    "disable_compile": "genctl compiles nothing by itself; compile = true asks for it",
    "continuous_batching_config": "deprecated in transformers; genctl batches continuously by itself, see batch_size",
    "constraints": "takes Python objects; say the same with force_words or force_words_ids",
    "low_memory": "no longer does anything in transformers; batch_size bounds what is computed at once",
    "prefill_chunk_size": "genctl reads a prompt in one pass",
}

# What a checkpoint's generation_config.json holds besides knobs: read over, never refused.
METADATA: frozenset[str] = frozenset({"transformers_version", "_from_model_config", "_commit_hash"})
