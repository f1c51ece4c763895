"""What an engine may compute otherwise than it should: name, words, advice, and how numbers are rounded. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
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


@dataclass(frozen=True)
class Form:
    """How an engine rounds numbers, beside its dtype. Roundings are names of `forms.ROUNDINGS`; "" rounds nothing."""

    parameter: str = ""  # of the cause: which of its forms this is
    weights: str = ""  # a rounding, a file type of llama.cpp, or "file": the types of the GGUF file that is read
    activations: str = ""  # what the products of weights read; of a file type its own, where this is ""
    linears: bool = False  # the embeddings and the head are as they are
    keys: str = ""
    values: str = ""
    flash: bool = False  # llama.cpp's attention adds up in float16, and rounds what is multiplied with keys
    rotated: bool = False  # keys and values are turned by a Hadamard matrix before they are rounded (llama.cpp, 2026)

    def and_(self, other: Form) -> Form:
        """Both; where both round the same numbers, as this one does."""
        own = {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}
        return replace(other, **own)

    @property
    def is_wide(self) -> bool:
        """Whether it rounds within operations that are seen in float64 alone."""
        return bool(self.keys or self.values)


GGUF = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # file types, and types of llama.cpp's cache
_PROCESSED = "ask for raw log-probabilities (vLLM: logprobs_mode=raw_logprobs; llama-server: post_sampling_probs=false)"
_DTYPE = "load the weights in the dtype of the checkpoint"
_EIGHT = "load without 8-bit quantisation"
_FOUR = "load without 4-bit quantisation"
_CACHE = "llama.cpp: --cache-type-k f16 --cache-type-v f16"
_FULL = "llama.cpp: --cache-type-k f32 --cache-type-v f32 --flash-attn off"


def _cached(kind: str) -> tuple[Form, ...]:
    """A cache in blocks of llama.cpp, also of keys alone and of values alone."""
    flash = [Form(keys=kind, values=kind, flash=True)]
    flash += [Form(", keys alone", keys=kind, values=other, flash=True) for other in ("f16", "")]
    flash += [Form(", values alone", keys=other, values=kind, flash=True) for other in ("f16", "")]
    return (Form(keys=kind, values=kind), *flash, *(replace(form, rotated=True) for form in flash))


_ROWS: dict[Family, tuple[tuple[str, str, str], ...]] = {
    "number": (
        ("temperature", "log-probabilities after temperature {}", _PROCESSED),
        ("top-k", "renormalised after top-k {}", _PROCESSED),
        ("top-p", "renormalised after top-p {}", _PROCESSED),
        ("min-p", "renormalised after min-p {}", _PROCESSED),
        ("repetition", "after a repetition penalty of {}", _PROCESSED),
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
    "model": (
        ("rope-scaling-ignored", "rope scaling ignored", "pass rope_scaling of config.json"),
        ("rope-scaling-added", "rope scaling that config.json does not have: {}",
         "leave out --rope-scaling and --rope-scale"),
        ("rope-theta-ignored", "rope theta {} for that of config.json", "pass rope_theta of config.json"),
        ("window-ignored", "sliding window ignored", "enable the sliding window"),
        ("window-off-by-one", "sliding window of {} tokens", "check whether the window counts the token itself"),
        ("softcap-missing", "soft cap of the {} missing", "use an attention that has soft caps"),
        ("epsilon", "an epsilon of {} in the norms", "pass rms_norm_eps of config.json"),
        ("adapter-missing", "adapter not loaded", "load the adapter; check its name in the request"),
        ("adapter-doubled", "adapter applied twice", "merge the adapter, or load it, not both"),
        ("checkpoint-other", "another checkpoint: {}", "serve the checkpoint that is named"),
    ),
}  # fmt: skip
_ARITHMETIC: tuple[tuple[str, str, str, tuple[Form, ...]], ...] = (
    ("bfloat16", "weights in bfloat16", _DTYPE, (Form(weights="bf16", activations="bf16"),)),
    ("float16", "weights in float16", _DTYPE, (Form(weights="f16", activations="f16"),)),
    ("int8", "int8 weights and activations", _EIGHT, (
        Form(weights="int8", activations="int8"), Form(weights="int8", activations="int8", linears=True))),
    ("int8-weights", "int8 weights", _EIGHT, (Form(weights="int8"), Form(weights="int8", linears=True))),
    *((name, f"GGUF {name.upper()}", "use a GGUF file with more bits", (Form(weights=name),)) for name in GGUF),
    ("int4", "int4 weights in groups of 32", _FOUR, (Form(weights="int4"), Form(weights="int4", linears=True))),
    ("int4-128", "int4 weights in groups of 128", _FOUR, (Form(weights="int4-128", linears=True),)),
    ("nf4", "NF4 weights", _FOUR, (Form(weights="nf4", linears=True),)),
    ("fp8", "weights in 8-bit floats", "load without fp8 quantisation", (
        Form(weights="fp8", linears=True), Form(weights="fp8-rows", linears=True),
        Form(weights="fp8-rows", activations="fp8-rows", linears=True))),
    ("flash-float16", "flash attention in float16, as llama.cpp computes by default", _FULL, (
        Form(keys="f16", values="f16", flash=True),)),
    ("cache-float16", "KV cache in float16", _FULL, (Form(keys="f16", values="f16"),)),
    ("cache-bfloat16", "KV cache in bfloat16", "keep the cache in the dtype of the weights", (
        Form(keys="bf16", values="bf16"), Form(keys="bf16", values="bf16", flash=True))),
    ("cache-q8_0", "KV cache in 8-bit blocks{}", _CACHE, _cached("q8_0")),
    *((f"cache-{kind}", f"KV cache in {kind.upper()}{{}}", _CACHE, _cached(kind)) for kind in GGUF[1:]),
    ("cache-fp8", "KV cache in 8-bit floats", "vLLM: --kv-cache-dtype auto", (Form(keys="fp8", values="fp8"),)),
)  # fmt: skip
_ALL = {**_ROWS, "arithmetic": tuple(row[:3] for row in _ARITHMETIC)}
CAUSES = {key: Cause(key, family, words, advice) for family, rows in _ALL.items() for key, words, advice in rows}
FORMS = {key: forms for key, _, _, forms in _ARITHMETIC}  # in which an engine may have rounded numbers, by cause


def cause(key: str, parameter: str = "") -> Cause:
    """A cause with its parameter."""
    return replace(CAUSES[key], parameter=parameter)
