"""What an engine may have done otherwise than it should: a name, words, and what to change there. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Family: TypeAlias = Literal["number", "prompt", "arithmetic", "model"]


@dataclass(frozen=True)
class Cause:
    """A cause. `words` and `advice` may have a {} for a parameter."""

    key: str
    family: Family
    words: str
    advice: str
    parameter: str = ""

    @property
    def sentence(self) -> str:
        """What it is."""
        return self.words.format(self.parameter)


_PROCESSED = "ask for raw log-probabilities (vLLM: logprobs_mode=raw_logprobs; llama-server: post_sampling_probs=false)"
_ROWS: dict[Family, tuple[tuple[str, str, str], ...]] = {
    "number": (
        ("temperature", "log-probabilities after temperature {}", _PROCESSED),
        ("top-k", "renormalised after top-k {}", _PROCESSED),
        ("top-p", "renormalised after top-p {}", _PROCESSED),
        ("min-p", "renormalised after min-p {}", _PROCESSED),
        ("repetition", "after a repetition penalty of {}", _PROCESSED),
        ("presence", "after a presence penalty of {}", _PROCESSED),
        ("frequency", "after a frequency penalty of {}", _PROCESSED),
        ("base-2", "logarithms to base 2", "multiply by 0.6931"),
        ("base-10", "logarithms to base 10", "multiply by 2.3026"),
        ("probability", "probabilities, not their logarithms", "take the logarithm"),
        ("percent", "percentages, not logarithms", "divide by 100 and take the logarithm"),
        ("negated", "negative log-probabilities", "change the sign"),
        ("shifted", "numbers one token off: each is that of the token one {}", "align numbers with tokens: no shift"),
        ("drafted", "numbers of the first choice, not of the token written",
         "gather the log-probability of the accepted token, not of the drafted or best one"),
        ("digits", "numbers cut to {} digits", "write all digits (%.9g)"),
        ("dtype", "numbers rounded to {}", "compute and keep log-probabilities in float32"),
    ),
    "prompt": (
        ("bos-missing", "BOS missing", "tokenise with add_special_tokens=True, or put BOS before the prompt"),
        ("bos-doubled", "double BOS", "leave BOS out of the text, or tokenise it with add_special_tokens=False"),
        ("bos-added", "a BOS that this model does not have", "tokenise without BOS (llama.cpp: add_bos_token=false)"),
        ("eos-appended", "EOS behind the prompt", "tokenise without EOS at the end"),
        ("template-missing", "no chat template", "apply the checkpoint's chat template"),
        ("template-added", "a chat template around a plain prompt", "use the completions endpoint"),
        ("template-other", "another chat template ({})", "use the checkpoint's own chat template"),
        ("no-generation-prompt", "no generation prompt", "render the template with add_generation_prompt=True"),
        ("system-lost", "the system prompt lost", "send the system message"),
        ("special-as-text", "special tokens read as text", "parse special tokens (llama.cpp: parse_special=true)"),
        ("spaces", "spaces {}", "send the prompt as it is, without trimming"),
        ("truncated", "prompt truncated left to {} tokens", "raise the context or the truncation limit"),
    ),
    "arithmetic": (
        ("bfloat16", "weights in bfloat16", "load the weights in the dtype of the checkpoint"),
        ("float16", "weights in float16", "load the weights in the dtype of the checkpoint"),
        ("int8", "int8 weights and activations{}", "load without 8-bit quantisation"),
        ("int8-weights", "int8 weights", "load without 8-bit quantisation"),
        ("q8_0", "GGUF Q8_0", "convert with --outtype f32 or bf16"),
        ("q4_0", "GGUF Q4_0", "use a GGUF file with more bits"),
        ("int4", "int4 weights in groups of 32", "load without 4-bit quantisation"),
        ("int4-128", "int4 weights in groups of 128", "load without 4-bit quantisation"),
        ("nf4", "NF4 weights", "load without 4-bit quantisation"),
        ("fp8", "weights in 8-bit floats", "load without fp8 quantisation"),
        ("cache-float16", "KV cache in float16", "llama.cpp: --cache-type-k f32 --cache-type-v f32"),
        ("cache-bfloat16", "KV cache in bfloat16", "keep the cache in the dtype of the weights"),
        ("cache-q8_0", "KV cache in 8-bit blocks", "llama.cpp: --cache-type-k f16 --cache-type-v f16"),
        ("cache-fp8", "KV cache in 8-bit floats", "vLLM: --kv-cache-dtype auto"),
    ),
    "model": (
        ("rope-scaling-ignored", "rope scaling ignored", "pass rope_scaling of config.json"),
        ("rope-theta-ignored", "rope theta {} for that of config.json", "pass rope_theta of config.json"),
        ("window-ignored", "sliding window ignored", "enable the sliding window"),
        ("window-off-by-one", "sliding window of {} tokens", "check whether the window counts the token itself"),
        ("softcap-missing", "soft cap of the {} missing", "use an attention that has soft caps"),
        ("head-tied", "the embeddings used as the head", "load lm_head.weight (tie_word_embeddings=false)"),
        ("epsilon", "an epsilon of {} in the norms", "pass rms_norm_eps of config.json"),
        ("scale-ignored", "{} ignored", "pass the factor of config.json"),
        ("adapter-missing", "adapter not loaded", "load the adapter; check its name in the request"),
        ("adapter-doubled", "adapter applied twice", "merge the adapter, or load it, not both"),
        ("checkpoint-other", "another checkpoint: {}", "serve the checkpoint that is named"),
    ),
}  # fmt: skip
CAUSES = {key: Cause(key, family, words, advice) for family, rows in _ROWS.items() for key, words, advice in rows}


def cause(key: str, parameter: str = "") -> Cause:
    """A cause with its parameter."""
    one = CAUSES[key]
    return Cause(key, one.family, one.words, one.advice, parameter)
