"""The causes that an audit tries, and its findings, as values. Imports no torch.

A cause has a key, words, advice and, if it is arithmetic, the forms in which numbers are rounded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias

from genctl.parity.values import Text

Family: TypeAlias = Literal["number", "prompt", "arithmetic", "model"]


@dataclass(frozen=True)
class Cause:
    """A cause. `words` may have a {} for the parameter."""

    key: str
    family: Family
    words: str
    advice: str
    parameter: str = ""

    @property
    def sentence(self) -> str:
        """Its words, with the parameter."""
        return self.words.format(self.parameter)


@dataclass(frozen=True)
class Form:
    """How an engine rounds numbers, besides its dtype. Roundings are names for `forms.rounded`; "" rounds nothing."""

    parameter: str = ""  # of the cause: names this form among its forms
    weights: str = ""  # a rounding, a file type of llama.cpp, or "file": the types in the GGUF file that is read
    activations: str = ""  # for the inputs of products with weights; file types of llama.cpp have their own
    linears: bool = False  # linear layers only: embeddings and head are not rounded
    keys: str = ""
    values: str = ""
    flash: bool = False  # llama.cpp's attention: accumulates in float16 and rounds queries, too
    rotated: bool = False  # a Hadamard matrix rotates keys and values before they are rounded (llama.cpp, 2026)

    def and_(self, other: Form) -> Form:
        """Both forms combined; where they conflict, this one wins."""
        own = {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}
        return replace(other, **own)

    @property
    def is_wide(self) -> bool:
        """Whether it rounds keys or values: the attention of float32 readings does not do that."""
        return bool(self.keys or self.values)


BLOCKS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # types of llama.cpp's cache, and of its files
SEARCHED = ("q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s")  # file types of mixed block types, with searched codes
GGUF = (*BLOCKS, *SEARCHED)
_PROCESSED = "ask for raw log-probabilities (vLLM: logprobs_mode=raw_logprobs; llama-server: post_sampling_probs=false)"
_DTYPE = "load the weights in the dtype of the checkpoint"
_EIGHT = "load without 8-bit quantisation"
_FOUR = "load without 4-bit quantisation"
_CACHE = "llama.cpp: --cache-type-k f16 --cache-type-v f16"
_FULL = "llama.cpp: --cache-type-k f32 --cache-type-v f32 --flash-attn off"


def _cached(kind: str) -> tuple[Form, ...]:
    """Forms of a cache in llama.cpp's blocks: for keys and values, for keys alone, and for values alone."""
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
    *((name, f"GGUF {name.upper()}{{}}", "use a GGUF file with more bits", (Form(weights=name),)) for name in GGUF),
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
    *((f"cache-{kind}", f"KV cache in {kind.upper()}{{}}", _CACHE, _cached(kind)) for kind in BLOCKS[1:]),
    ("cache-fp8", "KV cache in 8-bit floats", "vLLM: --kv-cache-dtype auto", (Form(keys="fp8", values="fp8"),)),
)  # fmt: skip
_ALL = {**_ROWS, "arithmetic": tuple(row[:3] for row in _ARITHMETIC)}
CAUSES = {key: Cause(key, family, words, advice) for family, rows in _ALL.items() for key, words, advice in rows}
FORMS = {key: forms for key, _, _, forms in _ARITHMETIC}  # how an engine may have rounded numbers, by cause


def cause(key: str, parameter: str = "") -> Cause:
    """The cause `key` with its parameter."""
    return replace(CAUSES[key], parameter=parameter)


# -- what an audit finds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AuditPosition:
    """A token before and after the explanation, in nats and in units of the noise."""

    id: str
    index: int
    token: int
    number: float  # as written
    reference: float  # the log-probability in the reference
    before: float
    after: float
    ratio: float  # of `before` to noise
    ratio_after: float


@dataclass(frozen=True)
class TriedCause:
    """A line of the report."""

    causes: tuple[str, ...]
    words: str
    explained: float
    log_likelihood: float  # minus that of no cause
    ratio: float


@dataclass(frozen=True)
class Audit:
    """The findings about a trace."""

    trace: str
    reference: str
    verdict: str  # same, explained, unexplained
    reason: str
    causes: tuple[Cause, ...] = ()
    candidates: tuple[TriedCause, ...] = ()  # they fit equally well
    tried: tuple[TriedCause, ...] = ()
    positions: tuple[AuditPosition, ...] = ()
    texts: tuple[Text, ...] = ()
    explained: float = 0.0
    rows_left: int = 0
    first: tuple[str, int] | None = None  # the first position with a difference
    ratio: float = math.nan  # median ratio of the difference to noise, before an explanation
    allowed: float = math.nan
    noise: float = math.nan  # nats, median
    notes: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{self.trace} against {self.reference}: {self.verdict}>"


# -- impossible numbers ------------------------------------------------------------------------------------------------

LEAST = -9999.0  # servers write this, or less, for log 0


class Impossible:
    """Finds impossible values: a chosen token of probability 0, NaN, an id beyond the vocabulary.

    A log-probability above 0 counts only if no cause explains it: the engine may have logged probabilities.
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._counts: Counter[str] = Counter()
        self._firsts: dict[str, str] = {}  # the first occurrence of each kind

    def _add(self, kind: str, row: str, index: int | None, value: float) -> None:
        place = "its prompt" if index is None else f"token {index + 1}"
        self._firsts.setdefault(kind, f"row {row}, {place}, {value:g}")
        self._counts[kind] += 1

    def known(self, row: str, index: int | None, ids: Sequence[int]) -> int:
        """How many leading ids are in the vocabulary; `index` is the position of the first, None in a prompt."""
        for place, id in enumerate(ids):
            if id >= self.vocabulary:
                self._add("ids", row, None if index is None else index + place, id)
                return place
        return len(ids)

    def number(self, row: str, index: int, number: float | None, *, unlisted: bool) -> float:
        """The number of a chosen token, or NaN if no model gives it. `unlisted`: its list lacks the token."""
        self._counts["tokens"] += 1
        if number is None or (number == LEAST and unlisted):
            self._counts["missing" if number is None else "unlisted"] += 1
            return math.nan
        if not LEAST < number < math.inf:
            self._add("zero" if number <= LEAST else "nan", row, index, number)
            return math.nan
        if number > 0:
            self._add("above", row, index, number)
        return number

    def listed(self, row: str, index: int, numbers: Mapping[int, float]) -> dict[int, float]:
        """The numbers of a list and of the chosen token, without those that no model gives."""
        wrong = [number for number in numbers.values() if math.isnan(number) or number == math.inf]
        if wrong:
            self._add("nan", row, index, wrong[0])
        self._counts["listed"] += sum(number <= LEAST for number in numbers.values())
        return {other: number for other, number in numbers.items() if LEAST < number < math.inf}

    def judge(self, one: Audit) -> Audit:
        """Add this evidence to an audit; with evidence the verdict is `unexplained`."""
        counts, tokens = self._counts, self._counts["tokens"]
        notes = {
            "missing": f"{counts['missing']} of {tokens} tokens have no number",
            "unlisted": f"{counts['unlisted']} chosen tokens have {LEAST:g}, OpenAI's number of a token that its list "
                        "lacks",
            "listed": f"{counts['listed']} listed tokens have probability 0: they are left out",
        }  # fmt: skip
        one = replace(one, notes=(*one.notes, *(note for kind, note in notes.items() if counts[kind])))
        evidence = {
            "zero": f"probability 0 for {counts['zero']} of {tokens} chosen tokens",
            "nan": f"NaN or infinity for {counts['nan']} of {tokens} tokens",
            "ids": f"ids beyond the vocabulary (0 to {self.vocabulary - 1}), {counts['ids']}",
            "above": f"a log-probability above 0 for {counts['above']} of {tokens} chosen tokens",
        }
        if one.verdict != "unexplained":
            del evidence["above"]
        kinds = [kind for kind in evidence if kind in self._firsts]
        if not kinds:
            return one
        found = [f"{evidence[kind]} (the first: {self._firsts[kind]})" for kind in kinds]
        if one.reason:
            found.append((f"all else is {one.verdict}: " if kinds != ["above"] else "") + one.reason)
        return replace(one, verdict="unexplained", reason="; ".join(found), causes=(), explained=0.0)
